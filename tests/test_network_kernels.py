"""The network's kernels compile as the operations launch them, without a GPU: arrays that pass for CuPy's."""
import re
import types

import ml_dtypes
import numpy as np
import pytest

from cuflash import cross_entropy, kernels, launch, linear
from cuflash.accumulate import accumulate
from cuflash.adamw import AdamWCuda
from cuflash.cross_entropy import cross_entropy_backward, cross_entropy_forward
from cuflash.embedding import embedding_backward, embedding_forward
from cuflash.flat import Flat
from cuflash.gelu import gelu_backward, gelu_forward
from cuflash.grad_norm import grad_norm_cuda
from cuflash.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from cuflash.linear import linear_backward, linear_forward
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.residual import residual_backward, residual_forward
from cuflash.sites import Rounder

BF16 = ml_dtypes.bfloat16


class DeviceArray(np.ndarray):
    """What the launches use of a cupy.ndarray."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=1 << 20, memset_async=lambda value, size: None)

    device = types.SimpleNamespace(id=0)

    def get(self):
        return np.asarray(self)


def empty(shape, dtype=np.float32):
    return np.empty(shape, dtype).view(DeviceArray)


@pytest.fixture(params=["sm_80", "sm_90a", "newest"])
def launched(request, monkeypatch):
    """The set of (source, function) that were compiled, in place of launched."""
    arch = kernels.newest_architecture() if request.param == "newest" else request.param
    cupy = kernels.import_cupy()
    fakes = {"ndarray": DeviceArray, "empty": empty, "zeros": empty,
             "asarray": lambda x: np.asarray(x).view(DeviceArray),
             "ascontiguousarray": lambda x: np.ascontiguousarray(x).view(DeviceArray)}
    for name, fake in fakes.items():
        monkeypatch.setattr(cupy, name, fake)
    seen: dict[tuple[str, str], set[str]] = {}

    def run(source, function, blocks, threads, args, defines, sites=(), *, products="", shared=0):
        headers = launch._headers(sites, products)
        names = kernels.resources(source, arch, defines, headers)
        assert function in names
        if names[function].spill_stores and arch in ("sm_80", "sm_90a") and not any(r.mode == "sr" for _,
                                                                                    r in sites):
            spilled.append((source, function, dict(defines)))
        text = (kernels.source_dir() / f"{source}.cu").read_text()
        parameters = re.search(rf"\b{function}\(([^)]*)\)\s*{{", text)[1]
        assert len(args) == parameters.count(",") + 1, (function, parameters)
        seen.setdefault((source, function), set()).add(arch)

    spilled: list = []
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "multiprocessors", lambda: 132)
    monkeypatch.setattr(cross_entropy, "_shared_limit", lambda: 227 << 10)
    monkeypatch.setattr(kernels, "capability", lambda device: 90)
    monkeypatch.setattr(linear, "_library", lambda a, b, common, site, rounding, place,
                        bias: linear._finished(
        empty((len(a), b.shape[1])), bias, site, rounding, place))
    yield seen
    assert not spilled


def rounders(precision: str | Precision, samples: int = 2) -> tuple[Rounder, Rounder]:
    p = Precision.named(precision) if isinstance(precision, str) else precision
    return tuple(Rounder(p, d, 1, key=Key(1), samples=range(samples)) for d in ("fwd", "bwd"))


SR = Precision.named("bf16").round("linear=bf16:sr", "residual=bf16:sr", "ln=e5m9:sr", "gelu=fp16:sr",
                                   "embed=bf16:sr",
                                   "loss=bf16:sr", "grad=bf16:sr", "adam=bf16:sr", "weight=bf16:sr")


@pytest.mark.parametrize("precision,width", [("bf16-fa2", 768), ("fp32", 70), (SR, 96)],
                         ids=["bf16-fa2", "fp32", "sr"])
def test_operations(launched, precision, width):
    fwd, bwd = rounders(precision)
    x, branch, w = empty((2, 20, width)), fwd("linear.y", empty((2, 20, width))), empty(width)
    stream, h, saved = residual_layernorm_forward(x, branch, w, w, fwd, fwd, operand=fwd)
    assert h.dtype == fwd("linear.x", x).dtype and stream.dtype == fwd("residual.y", x).dtype
    assert fwd("linear.x", h) is h
    f = gelu_forward(branch, fwd)
    df = gelu_backward(f, branch, bwd)
    residual_forward(x, branch, fwd)
    residual_backward(x, df, bwd)
    dx, operand, dw, db = residual_layernorm_backward(stream, df, saved, bwd, operand=bwd)
    assert operand.dtype == fwd("linear.x", x).dtype and dw.shape == db.shape == (width,)
    q = fwd("linear.y", empty((2, 40, 32)))  # QK-norm: rows are heads of tokens
    y, saved = layernorm_forward(q, empty(32), None, fwd)
    dq, dw, db = layernorm_backward(empty((2, 40, 32)), saved, bwd, bias=False)
    assert y.shape == dq.shape == q.shape and dw.shape == (32,) and db is None
    idx = np.zeros((2, 20), np.int64).view(DeviceArray)
    embedding_forward(idx, empty((50, width)), empty((30, width)), fwd)
    dwte, _ = embedding_backward(dx, idx, 50, 30)
    accumulate(dwte, dwte, dwte)
    for accumulator in ("auto", "hopper", "sequential"):
        p = fwd.precision.replace(accumulator=accumulator)
        fwd2, bwd2 = rounders(p)
        y, linear_saved = linear_forward(h, empty((64, width)), empty(64), fwd2)
        linear_backward(y, linear_saved, empty((64, width)), bwd2)
    expected = {"layernorm_forward", "layernorm_backward", "column_chunks", "column_join", "gelu_forward",
                "gelu_backward", "residual",
                "embedding_forward", "embedding_links", "embedding_sums", "embedding_tokens", "embedding_positions",
                "accumulate", "linear", "linear_finish"}
    assert expected <= {function for _, function in launched}


@pytest.mark.parametrize("vocab_size,dtype", [(50257, BF16), (50304, np.float32), (256, np.float16),
                                              (120_000, np.float32)])
def test_loss(launched, vocab_size, dtype):
    fwd, bwd = rounders({BF16: "bf16-fa2", np.float32: "fp32", np.float16: "fp16-fa2"}[dtype])
    logits, targets = empty((2, 3, vocab_size), dtype), np.zeros((2, 3), np.int64).view(DeviceArray)
    _, saved = cross_entropy_forward(logits, targets, fwd)
    cross_entropy_backward(saved, logits.shape, 1.0, bwd)
    loss, dlogits = cross_entropy.cross_entropy(logits, targets, 1.0, fwd, bwd)
    assert loss.shape == () and dlogits.dtype == dtype
    assert {"cross_entropy", "block_sums", "row_sum"} <= {function for _, function in launched}


def test_optimizer(launched):
    fwd, bwd = rounders(SR)
    flat = [Flat({"w": (300, 70), "b": (70,)}) for _ in range(4)]
    assert flat[0].begins == {"w": 0, "b": 24576} and flat[0].buffer.size == 32768
    optimizer = AdamWCuda(*flat[:3], lambda name: bwd, lambda name: name == "w")
    failed = empty(1, np.int32)
    _, factor = grad_norm_cuda(flat[3].buffer, 1.0, empty(2), failed, empty(1, np.int32))
    scalars = AdamWCuda.scalars(step=1, lr=1e-3, weight_decay=0.1).view(DeviceArray)
    optimizer.update(flat[3], factor, failed, scalars)
    assert {"adamw", "grad_norm"} <= {function for _, function in launched}
