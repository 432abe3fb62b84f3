"""Arguments of attention: outputs given by the caller, and the sentence for each that is not valid."""
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cuflash import Key, Precision, attention_arguments
from cuflash.attention import Saved, flash_attention, flash_attention_backward, flash_attention_forward
from cuflash.testing import equal

BF16 = ml_dtypes.bfloat16


def test_out_takes_the_result_or_refuses():
    q, k, v = np.random.default_rng(10).standard_normal((3, 1, 1, 5, 8)).astype(BF16)
    want = flash_attention(q, k, v)
    for dtype in (BF16, np.float32, np.float64):
        out = np.zeros(q.shape, dtype)
        assert flash_attention(q, k, v, out=out) is out and equal(out, want)
    with pytest.raises(ValueError, match="narrowing would be a rounding outside every site"):
        flash_attention(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), out=np.zeros(q.shape, BF16))
    for dtype in (np.float16, BF16, np.float32):  # each holds every fp8_e5m2 number
        assert equal(flash_attention(q, k, v, precision="all-fp8_e5m2", out=np.zeros(q.shape, dtype)), flash_attention(q, k, v, precision="all-fp8_e5m2"))
    with pytest.raises(TypeError, match="out has dtype complex64"):
        flash_attention(q, k, v, out=np.zeros(q.shape, np.complex64))
    with pytest.raises(ValueError, match="out is q's own memory"):
        flash_attention(q, k, v, out=q)
    with pytest.raises(ValueError, match="out must be an array of shape"):
        flash_attention(q, k, v, out=np.zeros((1, 1, 5, 9), BF16))


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("batch, heads, kv_heads, tq, tk", [
    (0, 2, 1, 4, 4), (1, 0, 0, 4, 4), (2, 4, 2, 0, 5), (2, 4, 2, 5, 0), (0, 0, 0, 0, 0)])
def test_axes_may_be_empty(batch, heads, kv_heads, tq, tk, layout):
    def ones(h, t):
        return np.ones((batch, h, t, 8) if layout == "bhtd" else (batch, t, h, 8), BF16)

    q, k = ones(heads, tq), ones(kv_heads, tk)
    o, saved = flash_attention_forward(q, k, k, causal=True, precision="bf16", layout=layout)
    gradients = flash_attention_backward(q, saved)
    assert saved.lse.shape == (batch, heads, tq) and np.all(saved.lse == -np.inf) and not np.any(saved.stats)
    for x, like in zip((o, *gradients), (q, q, k, k)):
        assert equal(x, np.zeros(like.shape, BF16))


def test_out_may_not_share_memory_with_what_is_read_nor_with_another_out():
    """Kernels read and write in any order, so results would be silently wrong on a GPU."""
    q, k, v, do = np.random.default_rng(11).standard_normal((4, 1, 2, 6, 8), dtype=np.float32)
    o, saved = flash_attention_forward(q, k, v, precision="bf16")
    want = flash_attention_backward(do, saved)
    buffer = np.zeros(2 * q.size, np.float32)
    part, overlapping = buffer[:q.size].reshape(q.shape), buffer[8:q.size + 8].reshape(q.shape)
    with pytest.raises(ValueError, match="out is v's own memory, or part of it"):
        flash_attention(q, k, part, out=overlapping)
    with pytest.raises(ValueError, match="out is k's own memory, or part of it"):
        flash_attention(q, part[:, ::-1], v, out=overlapping[..., ::-1])
    with pytest.raises(ValueError, match="out for dk is out for dq's own memory"):
        flash_attention_backward(do, saved, out=(part, part[:], np.zeros_like(q)))
    for name, taken in (("q", q), ("k", k), ("v", v), ("do", do), ("o", o)):
        with pytest.raises(ValueError, match=f"out for dv is {name}'s own memory"):
            flash_attention_backward(do, saved, out=(np.zeros_like(q), np.zeros_like(k), taken))
    with pytest.raises(ValueError, match=r"out for dq has several elements at one address \(strides \(0, "):
        same = np.lib.stride_tricks.as_strided(part, q.shape, (0, *part.strides[1:-1], 0))
        flash_attention_backward(do, saved, out=(same, np.zeros_like(k), np.zeros_like(v)))
    packed = np.zeros((1, 2, 6, 3, 8), np.float32)  # views that interleave share nothing
    out = tuple(packed[..., i, :] for i in range(3))
    assert all(map(equal, flash_attention_backward(do, saved, out=out), want))


def test_memory_of_a_gpu_is_compared_by_its_addresses():
    def on_device(x):
        return np.asarray(attention_arguments._Addresses(SimpleNamespace(
            itemsize=x.itemsize, shape=x.shape, strides=x.strides, data=SimpleNamespace(ptr=x.ctypes.data))))

    packed = np.zeros((4, 3, 8), BF16)
    rows = [on_device(packed[:, i]) for i in range(3)]
    assert np.shares_memory(rows[0], on_device(packed[::-1, 0])) and np.shares_memory(rows[1], on_device(packed[2:, 1, 4:]))
    assert not any(np.shares_memory(rows[i], rows[j]) for i in range(3) for j in range(i))


def bad(match, error=ValueError, q=None, k=None, v=None, **options):
    x = np.zeros((1, 2, 4, 8), np.float32)
    with pytest.raises(error, match=match):
        flash_attention(*(x if a is None else a for a in (q, k, v)), **options)


def test_messages():
    z = lambda *shape, dtype=np.float32: np.zeros(shape, dtype)  # noqa: E731
    bad("unknown precision 'bf61': did you mean 'bf16'", precision="bf61")
    bad("unknown fix 'caped': did you mean 'capped'", fix="caped")
    bad("unknown parameter of fix capped 'caps': did you mean 'cap'", fix="capped:caps=3")
    bad("unknown layout 'bhdt': did you mean 'bthd' or 'bhtd'", layout="bhdt")
    bad("head_dim is 257; valid: 1 to 256", q=z(1, 2, 4, 257), k=z(1, 2, 4, 257), v=z(1, 2, 4, 257))
    bad("3 query heads cannot share 2 key/value heads", q=z(1, 3, 4, 8))
    bad("k and v differ in shape", v=z(1, 2, 5, 8))
    bad("must agree in every axis but heads and sequence", q=z(2, 2, 4, 8))
    bad("q, k and v differ in dtype", TypeError, q=z(1, 2, 4, 8, dtype=np.float16))
    bad("q has dtype int64", TypeError, q=z(1, 2, 4, 8, dtype=np.int64), precision="fp32")
    integers = z(1, 2, 4, 8, dtype=np.int64)
    bad("q has dtype int64; valid: float32, .*; cast it, as by .astype", TypeError, q=integers)
    bad("q has dtype int64; valid: float32", TypeError, q=integers, k=integers, v=integers)
    bad("q must be an array of NumPy or CuPy, not list", TypeError, q=[[0.0]], precision="fp32")
    bad(r"q must be an array of NumPy or CuPy, not list; pass np.asarray\(q, np.float32\)", TypeError, q=[[0.0]])
    bad("k must be an array of NumPy or CuPy, not list", TypeError, k=[[0.0]])
    bad("layout bthd needs", q=z(4, 8), k=z(4, 8), v=z(4, 8), layout="bthd")
    bad("scale is 0.0; valid: a finite number of fp32, above 0 under order=fa2", scale=0.0, precision="bf16-fa2")
    bad("scale is nan", scale=float("nan"))
    bad("scale is 1e[+]39", scale=1e39)
    bad("scale is 1e-50", scale=1e-50, precision="bf16-fa2")
    bad("scale must be a number, not 'x'", TypeError, scale="x")
    bad("0 query heads cannot share 2", q=z(1, 0, 4, 8))
    bad("samples 4294967295 to 4294967296", q=z(2, 2, 4, 8), k=z(2, 2, 4, 8), v=z(2, 2, 4, 8), key=Key(0, sample=2**32 - 1))
    bad(r"pass key=cuflash.Key\(seed\)", precision=Precision.named("bf16").round("attn.o=bf16:sr"))
    bad("key must be a cuflash.Key", TypeError, key=3)
    bad("precision must be a name or a cuflash.Precision", TypeError, precision=16)
    bad("fix must be a name or a cuflash.Fix", TypeError, fix=1)


def test_messages_of_backward():
    q = np.zeros((1, 2, 4, 8), np.float32)
    _, saved = flash_attention_forward(q, q, q, precision="bf16")
    with pytest.raises(TypeError, match="saved must be a cuflash.attention.Saved, not NoneType"):
        flash_attention_backward(q, None)
    with pytest.raises(TypeError, match="q must be an array"):
        Saved([1], q, q, q, q, precision="bf16")
    with pytest.raises(ValueError, match="unknown layout 'bhdt'"):
        Saved(q, q, q, q, saved.lse, precision="bf16", layout="bhdt")
    with pytest.raises(ValueError, match="k and v differ in shape"):
        Saved(q, q[:, :, :2], q, q, saved.lse, precision="bf16")
    for out in (q, (q, q), (q, q, q)):
        with pytest.raises(ValueError, match="out must be three different arrays"):
            flash_attention_backward(q, saved, out=out)
    with pytest.raises(ValueError, match="do has shape"):
        flash_attention_backward(q[:, :1], saved)
    with pytest.raises(ValueError, match="saved.m is missing: p_bwd_from=m_l"):
        flash_attention_backward(q, saved, precision=Precision.named("bf16").replace(p_bwd_from="m_l"))
    with pytest.raises(ValueError, match="saved.o_unrounded is missing"):
        flash_attention_backward(q, saved, precision=Precision.named("bf16").replace(delta_from="o_unrounded"))
    with pytest.raises(ValueError, match=r"lse has shape \(1, 2, 5\); it must be \(1, 2, 4\)"):
        Saved(q, q, q, q, np.zeros((1, 2, 5), np.float32), precision="bf16")


@pytest.mark.parametrize("kind, module", [(1, "np"), (2, "cupy"), (13, "cupy")])  # dlpack.h: CPU, CUDA, CUDA managed
def test_foreign_arrays_are_told_the_way_in(kind, module):
    class Tensor:
        def __dlpack_device__(self):
            return kind, 0

    x = np.zeros((1, 2, 4, 8), np.float32)
    message = rf"Tensor; pass {module}.from_dlpack\(q\), which copies nothing"
    for precision in (None, "bf16"):
        with pytest.raises(TypeError, match=message):
            flash_attention(Tensor(), x, x, precision=precision)
    _, saved = flash_attention_forward(x, x, x)
    with pytest.raises(TypeError, match=message.replace("\\(q", "\\(do")):
        flash_attention_backward(Tensor(), saved)


def test_saved_is_shown_short():
    q, k, v = np.zeros((3, 2, 4, 64, 32), BF16)
    _, saved = flash_attention_forward(q, k[:, :2], v[:, :2], causal=True, precision="bf16", fix="capped:cap=60")
    assert repr(saved) == ("<Saved: q (2, 4, 64, 32), k (2, 2, 64, 32), bfloat16; bf16-paper, fix capped:beta=2,cap=60, causal; "
                           "of 512 rows 504 tied, 504 changed, 0 capped>")
    by_hand = Saved(q, k, v, q, np.zeros((2, 4, 64), np.float32), precision="fp32", layout="bhtd")
    assert repr(by_hand) == "<Saved: q (2, 4, 64, 32), k (2, 4, 64, 32), bfloat16; fp32, fix off>"
    assert "layout bthd" in repr(flash_attention_forward(q, k, v, layout="bthd")[1])
