"""Bits of kernels, recorded on a GPU and kept in tests/record/ for machines without one."""
import hashlib
from pathlib import Path

import h5py
import numpy as np

from cuflash import Precision
from cuflash.fixes import as_fix
from cuflash.kernel_header import precision_header
from cuflash.testing import DTYPES, OUTPUTS, Case

ROOT = Path(__file__).parent.parent
INPUTS = ("q", "k", "v", "do")


def sources_digest() -> str:
    """SHA-256 of all that is compiled: cuda/, names and contents, and precision.cuh of the recorded cases."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "cuda").iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for case in RECORDED:
        for direction in ("fwd", "bwd"):
            for head in range(case.heads):
                digest.update(precision_header(case.precision, case.d, direction, case.precision.accumulator,
                                               as_fix(case.fix), 0, head).encode())
    return digest.hexdigest()


def write_case(group: h5py.Group, case: Case, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    group.attrs["case"] = describe(case)
    for name, x in zip(INPUTS + OUTPUTS, inputs + outputs):
        wide = x if name == "stats" else x.astype(np.float32)  # exact, and every HDF5 reads it
        group.create_dataset(name, data=wide, compression="gzip", shuffle=True)


def read_inputs(group: h5py.Group, case: Case) -> list[np.ndarray]:
    return [group[name][()].astype(DTYPES[case.dtype]) for name in INPUTS]


def describe(case: Case) -> str:
    return "\n".join(f"{k}: {v.to_toml() if k == 'precision' else v}" for k, v in case._asdict().items())


def _precision(name: str, *rounds: str, **switches: object) -> Precision:
    return Precision.named(name).replace(**{"accumulator": "hopper"} | switches).round(*rounds)


# Small on purpose: CI compares every bit of them, and tests/gpu/ draws many more afresh.
RECORDED = [
    Case(2, 1, 140, 140, 64, True, _precision("bf16"), "capped", distribution="ties"),
    Case(1, 1, 100, 150, 64, True, _precision("bf16", delta_from="p_dp", p_bwd_from="m_l", tile=(64, 128)), "qiu-b2", distribution="one_sign"),
    Case(1, 1, 90, 90, 40, True, _precision("bf16", tile=(None, None), delta_from="o_unrounded"), "qiu-b7", "fp32"),
    Case(1, 1, 150, 150, 64, True, _precision("bf16-fa2", exp="mufu")),
    Case(1, 1, 70, 140, 128, True, _precision("bf16-fa2"), "capped", distribution="ties"),
    Case(1, 1, 60, 70, 160, False, _precision("bf16-fa2", delta_from="o_fp32"), distribution="heavy"),
    Case(1, 1, 90, 90, 80, True, _precision("fp16-fa2"), "capped", "fp16", "ties"),
    Case(2, 1, 60, 90, 33, True, _precision("fp32"), dtype="fp32"),
    Case(1, 1, 70, 40, 16, True, _precision("all-fp8_e5m2"), dtype="fp32", distribution="heavy"),
    Case(2, 2, 65, 140, 32, True, _precision("bf16", "attn.s=e6m9:rz", "attn.p=fp16:sr", "attn.o_acc=bf16:sr", "H1/attn.o=fp32:rz",
                                             "attn.dv_acc=bf16:sr", "attn.ds=fp16:rna"), dtype="fp32"),
    Case(1, 1, 64, 96, 64, False, _precision("bf16", algorithm="plain")),
    Case(1, 1, 80, 80, 64, True, _precision("bf16", accumulator="sequential")),
    Case(1, 1, 70, 150, 64, True, _precision("bf16"), "on", distribution="infinite"),
    Case(1, 1, 70, 150, 64, True, _precision("bf16-fa2"), distribution="nan"),
]
