"""`cuflash.dot` against tensor-core results recorded on an H200 by tests/gpu/test_hardware.py."""
from pathlib import Path

import h5py
import numpy as np
import pytest

from cuflash.accumulators import dot_fp32

RECORD = Path(__file__).parent / "record" / "hardware_sm90.h5"

with h5py.File(RECORD) as _file:
    INSTRUCTIONS = sorted(_file)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_recorded_bits(instruction):
    format = instruction.split("_")[1]
    with h5py.File(RECORD) as file:
        group = file[instruction]
        names = list(group.attrs["distributions"])
        a, b, c, d = (group[part][:].view(np.float32) for part in "abcd")
    assert len(names) >= 12 and d.size >= 144 * len(names)
    got = dot_fp32(a, b, c, "hopper", format, format)
    equal = (got.view(np.uint32) == d.view(np.uint32)) | (np.isnan(got) & np.isnan(d))
    assert equal.all(), [name for name, ok in zip(names, equal, strict=True) if not ok.all()]
