"""precision.cuh: what kernels are told of a precision; and that attention's kernels compile with it, without a GPU."""
import re
from pathlib import Path

import numpy as np
import pytest

from cuflash import kernels
from cuflash.attention_forward import compile_arguments, geometry, scale_in_bf16
from cuflash.fixes import Capped, Fix, as_fix
from cuflash.kernel_header import SHARED_MEMORY, device_accumulator, precision_header
from cuflash.precision import Precision
from cuflash.site_table import SITE_ID, SITES

ROOT = Path(__file__).parent.parent
needs_nvrtc = pytest.mark.skipif(bool(kernels.nvrtc_reason()), reason=f"no NVRTC: {kernels.nvrtc_reason()}")


def header(precision="bf16", direction="fwd", accumulator="hopper", fix="off", head_dim=64, **place):
    p = Precision.named(precision) if isinstance(precision, str) else precision
    return precision_header(p, head_dim, direction, accumulator, as_fix(fix), **place)


# ---- the text

@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_has_a_line_for_each_site_of_attention(direction):
    lines = re.findall(r"^SITE\((\w+), (\d+), (\d+), (\w+), (\w+), (\d+), (\w+)\)$", header(direction=direction), re.M)
    found = {name: (int(e), int(m), int(number)) for name, e, m, _, _, number, _ in lines}
    expected = {name.replace(".", "_"): (8, 7 if site.bf16 == "bf16" else 23, SITE_ID[name])
                for name, site in SITES.items() if name.startswith("attn.")}
    assert found == expected


def test_says_the_mode_the_saturation_and_whether_the_tile_counts():
    text = header(Precision.named("bf16").round("attn.p=fp8_e4m3:rz", "attn.m=e5m4:rna"))
    assert f"SITE(attn_p, 4, 3, rz, true, {SITE_ID['attn.p']}, false)" in text
    assert f"SITE(attn_m, 5, 4, rna, false, {SITE_ID['attn.m']}, true)" in text


def test_scopes_reach_their_direction_layer_and_head_only():
    p = Precision.named("bf16").round("fwd/L1/H2/attn.o=fp16")
    line = f"SITE(attn_o, 5, 10, rne, false, {SITE_ID['attn.o']}, true)"
    assert line in header(p, layer=1, head=2)
    for direction, layer, head in (("bwd", 1, 2), ("fwd", 0, 2), ("fwd", 1, 1)):
        assert line not in header(p, direction, layer=layer, head=head)


@pytest.mark.parametrize("sites, s, pv", [
    ({}, "PRODUCT(s, bf16)", "PRODUCT(pv, bf16)"),
    ({"attn.p": "fp16", "attn.v": "fp8_e4m3"}, "PRODUCT(s, bf16)", "PRODUCT(pv, fp16)"),
    ({"attn.p": "fp16"}, "PRODUCT(s, bf16)", "PRODUCT(pv, tf32)"),
    ({"attn.q": "fp8_e5m2", "attn.v": "fp32"}, "PRODUCT(s, bf16)", "SEQUENTIAL_PRODUCT(pv)"),
    ({"attn.k": "e8m12"}, "SEQUENTIAL_PRODUCT(s)", "PRODUCT(pv, bf16)"),
])
def test_each_product_runs_in_a_format_that_holds_both_operands(sites, s, pv):
    text = header(Precision.named("bf16-fa2").replace(sites))
    assert s in text and pv in text


def test_parameters_of_a_fix_are_exact():
    text = header(fix="capped:cap=0.1")
    cap = re.search(r"float cap = (\S+)f;", text)
    assert np.float32(float.fromhex(cap[1])) == np.float32(0.1)


def test_a_fix_or_mode_without_cuda_is_refused(tmp_path):
    class NumPyOnly(Fix):
        name = "numpy-only"

        def rule(self, r_m, ties):
            return r_m + 1

    class OtherRule(Capped):  # what it inherits is the CUDA of another rule
        name = "other-rule"
        rule = NumPyOnly.rule

    class OtherLimit(Capped):
        name = "other-limit"

        def limited(self, r_m, ties):
            return r_m > 3

    for fix, words in ((NumPyOnly, "numpy-only.*cuda_rule"), (OtherRule, "other-rule.*cuda_rule"), (OtherLimit, "other-limit.*cuda_limited")):
        with pytest.raises(ValueError, match=words):
            header(fix=fix())
    (tmp_path / "mine.py").write_text("import cuflash\nup = cuflash.Mode('up', lambda fraction, *rest: fraction > 0)\n")
    with pytest.raises(ValueError, match="'up'.*cuda"):
        header(Precision.named("bf16").round(f"attn.p=bf16:{tmp_path}/mine.py:up"))


def test_two_modes_of_one_name_are_refused_where_they_differ(tmp_path):
    for file, rule in (("a.py", "odd"), ("b.py", "!odd")):
        (tmp_path / file).write_text(f"import cuflash\ntwin = cuflash.Mode('twin', lambda *a: a[2], '{rule}')\n")
    p = Precision.named("bf16").round(f"attn.p=bf16:{tmp_path}/a.py:twin", f"attn.o=bf16:{tmp_path}/b.py:twin")
    with pytest.raises(ValueError, match="two modes are named 'twin'"):
        header(p)


@pytest.mark.parametrize("switches, capability, expected", [
    ({}, 90, "hopper"), ({}, 80, "ampere"), ({}, 89, "ampere"), ({}, 120, "sequential"),
    ({"accumulator": "hopper"}, 120, "hopper"), ({"accumulator": "sequential"}, 90, "sequential"),
])
def test_auto_takes_the_devices_own_tensor_core(switches, capability, expected):
    assert device_accumulator(Precision.named("bf16").replace(**switches), capability) == expected


@pytest.mark.parametrize("switches, capability, words", [
    ({"accumulator": "hopper"}, 80, "ampere.*CPU reference"), ({"accumulator": "ampere"}, 90, "hopper.*CPU reference"),
    ({"accumulator": "library"}, 90, "sequential"), ({"accumulator": "exact"}, 90, "NumPy"),
    ({"exp": "library"}, 90, "defined"),
])
def test_a_device_refuses_what_it_cannot_run(switches, capability, words):
    with pytest.raises(ValueError, match=words):
        device_accumulator(Precision.named("bf16").replace(**switches), capability)


# ---- sites: table, reference and kernels name the same

def names(pattern: str, *files: str) -> set[str]:
    return {"attn." + found for file in files for found in re.findall(pattern, (ROOT / file).read_text())}


def test_table_reference_and_kernel_name_the_same_sites():
    table = {name for name, site in SITES.items() if name.startswith("attn.") and site.direction != "bwd"}
    kernel = names(r"\battn_(\w+)", "cuda/attention_forward.cu", "cuda/attention_forward_tiles.cuh")
    reference = names(r"rnd\(\"attn\.(\w+)", "cuflash/attention_forward.py")
    assert kernel == table
    assert reference == table


# ---- compilation

MIXED = Precision.named("bf16").round(
    "attn.s=bf16:rz", "attn.x=bf16:sr", "attn.p=fp16:sr", "attn.v=fp16", "attn.alpha=e5m7:ru", "attn.pv=bf16:rna",
    "attn.o_acc=bf16:sr", "attn.lse=bf16:rd", "attn.k=fp8_e4m3")
VARIANTS = [  # precision, head dim, fix, dtype
    ("bf16-fa2", 64, "off", "bfloat16"), ("bf16-fa2", 128, "off", "bfloat16"), ("bf16", 64, "capped", "bfloat16"),
    ("bf16", 128, "qiu-b2", "bfloat16"), (Precision.named("bf16-fa2").replace(exp="mufu"), 64, "off", "bfloat16"),
    ("fp32", 64, "off", "float32"), ("all-fp8_e5m2", 32, "off", "float32"), ("all-tf32", 16, "off", "float32"),
    (MIXED, 7, "qiu-b7", "float32"), (Precision.named("bf16").replace(tile=(512, 512)), 64, "qiu-b2", "bfloat16"),
    (Precision.named("bf16").replace(tile=(128, None)), 192, "off", "bfloat16"),
    (Precision.named("bf16-fa2").replace(algorithm="plain"), 64, "off", "float16"),
    ("bf16", 64, "shift:beta=2,gamma=0.5,epsilon=1e30", "bfloat16"),
]
# Where speed counts, nothing may spill.
FAST = VARIANTS[:5]


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "newest"])
@pytest.mark.parametrize("precision, head_dim, fix, dtype", VARIANTS, ids=lambda x: getattr(x, "name", x))
def test_forward_compiles(precision, head_dim, fix, dtype, target):
    p = Precision.named(precision) if isinstance(precision, str) else precision
    arch = kernels.newest_architecture() if target == "newest" else target
    capability = int(re.search(r"\d+", arch)[0])
    core = "ampere" if capability < 90 else "hopper"
    _, defines, text = compile_arguments(p, as_fix(fix), head_dim, 0, 0, dtype, dtype, head_dim % 8 == 0, True, core,
                                         capability, scale_in_bf16(head_dim ** -0.5))
    used = kernels.resources("attention_forward", arch, defines, {"precision.cuh": text})["attention_forward"]
    if target == "sm_90a" and (precision, head_dim, fix, dtype) in FAST:
        assert used.spill_stores == used.spill_loads == 0


MUFU = Precision.named("bf16-fa2").replace(exp="mufu")
UNCOUNTED = [(p, d, "off") for p in ("bf16", "bf16-fa2", "fp16-fa2", MUFU) for d in (64, 128)]
MEASURED = [*((*variant, False) for variant in UNCOUNTED), ("bf16-fa2", 64, "capped", True), ("bf16-fa2", 128, "capped", True)]
OTHERS = [(p, d, fix, True) for p in ("bf16", "bf16-fa2") for d, fix in ((16, "capped"), (32, "off"), (80, "off"),
                                                                          (192, "capped"), (256, "off"))]
OTHERS += [("fp32", d, "off", True) for d in (64, 128, 256)]


@needs_nvrtc
@pytest.mark.parametrize("precision, head_dim, fix, count", [*MEASURED, *OTHERS], ids=lambda x: getattr(x, "name", x))
def test_registers_do_not_spill(precision, head_dim, fix, count):
    """`flash_attention`, which benchmarks call, counts no ties: another kernel than that of test_forward_compiles."""
    p = Precision.named(precision) if isinstance(precision, str) else precision
    dtype = {"fp16-fa2": "float16", "fp32": "float32"}.get(precision, "bfloat16")
    _, defines, text = compile_arguments(p, as_fix(fix), head_dim, 0, 0, dtype, dtype, True, count, "hopper", 90,
                                         scale_in_bf16(head_dim ** -0.5))
    used = kernels.resources("attention_forward", "sm_90a", defines, {"precision.cuh": text})["attention_forward"]
    assert used.spill_stores == used.spill_loads == 0, used


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("head_dim", [1, 16, 64, 72, 96, 128, 160, 192, 208, 256])
@pytest.mark.parametrize("tile", [None, (16, 16), (48, 112), (128, 128), (512, 512), (None, None), (64, 144)])
def test_every_tile_and_head_dim_fits_the_device(capability, head_dim, tile):
    for base in ("fp32", "bf16", "bf16-fa2"):
        p = Precision.named(base).replace(tile=tile)
        g = geometry(p, head_dim, [base != "fp32"] * 2, capability)
        br, bc = p.tiles(head_dim).forward
        assert g.blocks * g.shared <= SHARED_MEMORY[capability]
        assert g.keys == bc or bc is None or g.keys < bc  # a tile at once, or in parts
        # Rows that multiply together lie in one tile of query rows, so that they visit the same tiles of keys.
        assert br is None or br % (64 if g.warpgroup else g.rows) == 0
