"""The recorded cases on a GPU; with CUFLASH_TEST_RECORD they become tests/record/attention_sm90.h5."""
import h5py
import numpy as np
import pytest

from cuflash.kernels import import_cupy
from cuflash.testing import OUTPUTS, equal
from tests.record import RECORDED, sources_digest, write_case


def test_recorded_cases_equal_the_reference(seed, record_folder):
    cupy = import_cupy()
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the recorded cases name accumulator hopper: they need compute capability 9.0")
    print("seed", seed)
    rng, results, wrong = np.random.default_rng(seed), [], []
    for i, case in enumerate(RECORDED):
        inputs = case.inputs(rng)
        got = [cupy.asnumpy(x) for x in case.run([cupy.asarray(x) for x in inputs])]
        results.append((inputs, got))
        wrong += [(i, name) for name, a, b in zip(OUTPUTS, got, case.run(inputs)) if not equal(a, b)]
    assert not wrong
    if record_folder:
        with h5py.File(record_folder / "attention_sm90.h5", "w") as f:
            f.attrs["sources"] = sources_digest()
            f.attrs["device"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
            for i, (inputs, got) in enumerate(results):
                write_case(f.create_group(f"{i:02}"), RECORDED[i], inputs, got)
