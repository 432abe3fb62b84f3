"""The vectorised reference against plain loops over the contract, bit for bit."""
import numpy as np
import pytest

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.fixes import as_fix
from cuflash.precision import Precision
from cuflash.testing import equal
from tests.slow_attention import Slow

SHAPES = [(9, 9, 3, True), (20, 35, 2, True), (35, 20, 5, True), (18, 33, 4, False)]
MIXED = {"attn.s": "e5m4:rz", "attn.s_scaled": "e5m5:rna", "attn.m": "bf16:rd", "attn.x": "fp16", "attn.p": "fp8_e5m2",
         "attn.l_tile": "bf16", "attn.pv": "e6m5:ru", "attn.o_acc": "bf16:rz", "attn.delta": "bf16", "attn.dpd": "fp16",
         "attn.dv_tile": "e8m5", "attn.dq_acc": "e8m5:rz"}
PRECISIONS = {
    "fp32": Precision.named("fp32"),
    "bf16": Precision.named("bf16"),
    "bf16, m and l, p∘dp": Precision.named("bf16").replace(p_bwd_from="m_l", delta_from="p_dp", l_from="rounded"),
    "bf16-fa2": Precision.named("bf16-fa2"),
    "bf16-fa2, m and l, unrounded": Precision.named("bf16-fa2").replace(
        {"attn.l": "bf16", "attn.o_scaled": "bf16", "attn.alpha": "fp16", "attn.dk_acc": "bf16"},
        p_bwd_from="m_l", delta_from="o_unrounded", l_from="rounded"),
    "bf16-fa2, p∘dp": Precision.named("bf16-fa2").replace(delta_from="p_dp"),
    "mixed": Precision.named("bf16").replace(MIXED),
}


# Fixes act on S alone: one shape with several tiles is enough for them.
CASES = [(shape, "off") for shape in SHAPES] + [(SHAPES[1], fix) for fix in ("qiu-b7", "qiu-b2", "capped")]


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("shape, fix", CASES)
def test_reference_equals_plain_loops(shape, fix, name):
    tq, tk, d, causal = shape
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    rng = np.random.default_rng(seed)
    q, do = (rng.standard_normal((tq, d)).astype(np.float32) * 2 for _ in range(2))
    k, v = (rng.standard_normal((tk, d)).astype(np.float32) for _ in range(2))
    k[rng.integers(0, tk, tk // 2)] = k[0]  # repeated keys: ties
    p = PRECISIONS[name].replace(accumulator="sequential", tile=((16, 16), (16, 32), (32, 16)))
    slow = Slow(q, k, v, p, causal, np.float32(1 / np.sqrt(d)), as_fix(fix))
    o, lse = slow.forward()
    got, saved = flash_attention_forward(q, k, v, causal=causal, precision=p, fix=fix)
    assert equal(got, o) and equal(saved.lse, lse)
    for name, x, y in zip(("dq", "dk", "dv"), flash_attention_backward(do, saved), slow.backward(do)):
        assert equal(x, y), name
