"""FlashAttention-2 itself as a witness: `bf16-fa2` with the hardware's exp against torch's flash backend, bit for bit."""
import numpy as np
import pytest

from cuflash import Precision
from cuflash.attention import Saved, flash_attention_backward, flash_attention_forward
from cuflash.kernels import import_cupy
from cuflash.testing import Case

torch = pytest.importorskip("torch", reason="torch's flash backend is the witness")

# (heads, T, head_dim, causal); the batch is such that torch does not split the keys over blocks (below about 0.8 · 2 blocks
# an SM of 64 rows it does, and combines the parts in another order).
SHAPES = [(4, 256, 64, True), (4, 256, 64, False), (2, 193, 64, True), (2, 1024, 64, True), (1, 4096, 64, True), (3, 128, 32, False),
          (4, 256, 128, True), (4, 100, 128, False), (2, 1024, 128, True), (2, 1024, 128, False), (2, 256, 96, True), (2, 300, 192, True),
          (2, 300, 256, True)]
LEAST = 0.999  # share of equal bits that issue and contract ask for; what is seen is printed


def share(a, b):
    """Share of equal elements, and the largest distance of the rest in ulp (of 16-bit formats)."""
    a, b = (x.view(np.int16).astype(np.int32) for x in (a, b))
    a, b = (np.where(x < 0, -(x & 0x7FFF), x) for x in (a, b))  # ordered like the numbers
    return (a == b).mean(), np.abs(a - b).max()


@pytest.mark.parametrize("distribution", ["normal", "ties", "one_sign", "heavy"])
@pytest.mark.parametrize("heads, t, d, causal", SHAPES)
@pytest.mark.parametrize("name, dtype", [("bf16-fa2", "bf16"), ("fp16-fa2", "fp16")])
def test_torch_gives_our_bits(name, dtype, heads, t, d, causal, distribution, seed):
    if dtype == "fp16" and distribution == "heavy":
        pytest.skip("values past fp16's largest: Inf and NaN on both sides")
    cupy = import_cupy()
    p = Precision.named(name).replace(accumulator="hopper", exp="mufu")
    batch = -(-216 // (heads * -(-t // 64)))
    arrays = Case(heads, heads, t, t, d, causal, p, dtype=dtype, distribution=distribution, batch=batch).inputs(np.random.default_rng(seed))
    q, k, v, do = (cupy.asarray(x) for x in arrays)
    tq, tk, tv, tdo = (torch.from_dlpack(x) for x in (q, k, v, do))
    to, tlse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(tq, tk, tv, 0.0, causal, False)
    tgrads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        tdo, tq, tk, tv, to, tlse, rest[0], rest[1], t, t, 0.0, causal, rest[4], rest[5])

    o, saved = flash_attention_forward(q, k, v, causal=causal, precision=p)
    theirs = {n: cupy.asnumpy(cupy.from_dlpack(x.contiguous())) for n, x in zip(("o", "dq", "dk", "dv"), (to, *tgrads))}
    found = {"o": cupy.asnumpy(o)}
    same_lse = Saved(q, k, v, o, cupy.from_dlpack(tlse), precision=p, causal=causal)
    found |= {n: cupy.asnumpy(x) for n, x in zip(("dq", "dk", "dv"), flash_attention_backward(do, same_lse))}
    lse = np.mean(cupy.asnumpy(saved.lse) == cupy.asnumpy(cupy.from_dlpack(tlse)))
    shares = {n: share(found[n], theirs[n]) for n in found}
    print(f"seed {seed}:", ", ".join(f"{n} {s:.4%} (≤ {ulp} ulp)" for n, (s, ulp) in shares.items()), f"lse {lse:.4%}")
    assert shares["o"][0] >= LEAST and shares["o"][1] <= 2
    assert shares["dk"][0] >= LEAST and shares["dv"][0] >= LEAST
    if -(-t // p.tiles(d).dq[1]) <= 2:  # beyond two key tiles torch's atomics add dQ in any order
        kept = np.abs(found["dq"].astype(np.float32)) >= 2.0**-126  # and they flush subnormals to zero
        assert share(found["dq"][kept], theirs["dq"][kept])[0] >= LEAST
