"""The reference against bits recorded on a GPU, and the record against the kernels' sources.

To renew it, on a machine with an H100 or H200: CUFLASH_TEST_RECORD=tests/record python -m pytest tests/gpu
"""
import h5py
import pytest

from cuflash.testing import OUTPUTS, equal
from tests.record import RECORDED, ROOT, describe, read_inputs, sources_digest

FILE = ROOT / "tests" / "record" / "attention_sm90.h5"


def test_kernels_are_those_that_were_recorded():
    with h5py.File(FILE) as f:
        assert f.attrs["sources"] == sources_digest(), "kernels changed since the record: run tests/gpu and renew it"
        assert len(f) == len(RECORDED)


@pytest.mark.parametrize("i", range(len(RECORDED)))
def test_reference_gives_the_recorded_bits(i):
    with h5py.File(FILE) as f:
        group = f[f"{i:02}"]
        assert group.attrs["case"] == describe(RECORDED[i])
        for name, got in zip(OUTPUTS, RECORDED[i].run(read_inputs(group, RECORDED[i]))):
            assert equal(got, group[name][()]), name
