"""AdamW, the gradient norm and sums over micro-batches."""
import numpy as np
import pytest

from cuflash.accumulate import accumulate
from cuflash.adamw import AdamWCuda, adamw_update
from cuflash.flat import Flat
from cuflash.grad_norm import clip_factor, grad_norm, grad_norm_cuda
from cuflash.reduce import column_sum, column_sum_cuda, total_sum, total_sum_cuda

from .network import PRECISIONS, assert_same, put, rounder, values

SHAPES = {"wte": (300, 70), "ln": (70,), "w": (128, 512), "b": (1,)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_steps(precision, grad_clip, seed):
    import cupy
    rng = np.random.default_rng(seed)
    p = PRECISIONS[precision].round("L3/weight=fp16")  # one parameter rounds unlike the others
    layers = {name: i for i, name in enumerate(SHAPES)}

    def of(name):
        return rounder(p, "bwd", layer=layers[name], module=layers[name])

    w = {name: values(rng, shape) for name, shape in SHAPES.items()}
    m, v = ({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(2))
    flat = [Flat.of(arrays) for arrays in (w, m, v)]
    optimizer = AdamWCuda(*flat, of, lambda name: len(SHAPES[name]) > 1)
    failed, losses = cupy.zeros(1, np.int32), cupy.ones(2, np.float32)
    for step in range(1, 4):
        g = {name: values(rng, shape, wide=True) for name, shape in SHAPES.items()}
        g_flat = Flat.of(g)
        norm, factor = grad_norm_cuda(g_flat.buffer, grad_clip, losses, failed,
                                      cupy.asarray([step], np.int32))
        optimizer.update(g_flat, factor, failed, cupy.asarray(AdamWCuda.scalars(step=step, lr=0.01,
                                                                                weight_decay=0.1)))
        expected = grad_norm(g.values())
        assert_same(norm, expected, "norm")
        clip = clip_factor(expected, grad_clip)
        assert_same(factor, np.float32(clip), "factor")
        for name in SHAPES:
            adamw_update(w[name], g[name], m[name], v[name], of(name), step=step, lr=0.01, clip=clip,
                         weight_decay=0.1 if len(SHAPES[name]) > 1 else 0.0)
        for arrays, got, what in zip((w, m, v), flat, "wmv"):
            for name in SHAPES:
                assert_same(got.arrays[name], arrays[name], f"{what} of {name} at step {step}, seed {seed}")
    assert not failed.get()[0]
    before = [x.buffer.copy() for x in flat]
    losses[1] = np.nan
    norm, factor = grad_norm_cuda(g_flat.buffer, grad_clip, losses, failed, cupy.asarray([4], np.int32))
    losses[1] = 1
    for step in (4, 5):
        optimizer.update(g_flat, factor, failed, cupy.asarray(AdamWCuda.scalars(step=step, lr=0.01)))
    assert failed.get()[0] == 4 and all((a == x.buffer).all() for a, x in zip(before, flat))


@pytest.mark.parametrize("shape", [(1, 1), (40, 70), (5000, 768), (17, 3), (600, 2304)], ids=str)
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_sums(shape, format, seed):
    x = values(np.random.default_rng(seed), shape, format, wide=True)
    assert_same(column_sum_cuda(put(x, format)), column_sum(x), f"column_sum, seed {seed}")
    assert_same(total_sum_cuda(put(x)), total_sum(x), f"total_sum, seed {seed}")
    assert_same(column_sum_cuda(put(np.pad(x, ((0, 0), (0, 3))), format)[:, :shape[1]]), column_sum(x),
                "padded rows")


def test_accumulate(seed):
    import cupy
    rng = np.random.default_rng(seed)
    g = [values(rng, (33, 70), "bf16", wide=True) for _ in range(3)]
    total, out = None, cupy.empty((33, 70), np.float32)
    for i, x in enumerate(g):
        total = accumulate(total, x)
        accumulate(out if i else None, put(x, "bf16"), out)
        assert_same(out, total, f"micro-batch {i}, seed {seed}")
