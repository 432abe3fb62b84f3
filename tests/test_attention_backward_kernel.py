"""The backward kernels compile for every architecture, without a GPU, and keep everything in registers."""
import re

import pytest

from cuflash import attention_backward, kernels
from cuflash.precision import as_precision
from tests.attention_backward_cases import CASES, PRECISIONS, BackwardCase, compilations

needs_nvrtc = pytest.mark.skipif(kernels.nvrtc_reason() is not None, reason=str(kernels.nvrtc_reason()))


def resources(job: tuple, arch: str) -> dict[str, kernels.Resources]:
    source, defines, headers = job
    return kernels.resources(source, arch, dict(defines), dict(headers))


def test_args_are_packed_as_the_kernels_read_them():
    text = (kernels.source_dir() / "attention_backward.cuh").read_text(encoding="utf-8")
    body = re.search(r"struct Args \{(.*?)\n\n", text, re.S)[1]
    body = re.sub(r"//.*", "", body).replace("Array<const void>", "A").replace("Array<void>", "A")
    names = [name for line in body.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    b = attention_backward
    assert names == [*b._ARRAYS, *b._POINTERS, "padded_rows", *b._SCALARS]


FAST = [(name, shape, capability) for capability in (80, 90) for name in ("bf16-fa2", "bf16")
        for shape in ("causal", "d128", "d256")]
FAST += [(name, shape, 90) for name in ("fp16-fa2", "fa2 mufu", "bf16 mufu") for shape in ("causal", "d128")]


@needs_nvrtc
@pytest.mark.parametrize("name, shape, capability", FAST)
def test_fast_kernels_spill_no_registers(name, shape, capability):
    if (name, shape, capability) == ("bf16", "d256", 80):
        return  # sums in shared memory leave too little of it there: attention_backward_any.cu
    case = BackwardCase(name, shape, "normal", "fp16" if name == "fp16-fa2" else "bf16", False)
    jobs = compilations([case], capability)
    assert {"attention_dkdv", "attention_dq", "attention_delta"} == {job[0] for job in jobs}
    for job in jobs:
        for function, r in resources(job, kernels.architecture(capability)).items():
            assert r.spill_stores == r.spill_loads == 0, f"{function} {dict(job[1])}: {r}"


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "newest"])
@pytest.mark.parametrize("name", ["fp16-fa2", "fp32", "fa2 p_dp", "bf16 tile 16"])
def test_compiles(name, arch):
    arch = kernels.newest_architecture() if arch == "newest" else arch
    capability = int(re.search(r"\d+", arch)[0])
    cases = [c for c in CASES if c.precision == name and c.shape in ("group", "d1", "one")][:2]
    jobs = compilations(cases or [BackwardCase(name, "group", "normal", "bf16", True)], capability)
    assert jobs
    for source, defines, headers in jobs:
        assert kernels.compile_cubin(source, arch, dict(defines), dict(headers)).stat().st_size > 0


@needs_nvrtc
def test_fast_kernels_compile_for_the_newest(monkeypatch):
    """There `auto` is sequential, which never takes them; they run where hopper's sums are asked for."""
    arch = kernels.newest_architecture()
    monkeypatch.setitem(PRECISIONS, "by name", as_precision("bf16-fa2").replace(accumulator="hopper"))
    jobs = compilations([BackwardCase("by name", "causal", "normal", "bf16", False)], int(re.search(r"\d+", arch)[0]))
    assert {"attention_dkdv", "attention_dq"} <= {job[0] for job in jobs}
    for source, defines, headers in jobs:
        assert kernels.compile_cubin(source, arch, dict(defines), dict(headers)).exists()


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_case_can_be_launched(name):
    """Arguments are packed and a kernel is chosen for every shape; nothing is compiled."""
    assert compilations([c for c in CASES if c.precision == name], 90)
