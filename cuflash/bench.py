"""Speed of the kernels with the roofline, beside other programs on the same machine in the same run.

FLOPs of attention as the field counts them: forward 4·B·H·Tq·Tk·D, half of it under a causal mask,
backward 2.5 times that.
"""
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cuflash.attention import flash_attention, flash_attention_backward, flash_attention_forward
from cuflash.kernels import import_cupy
from cuflash.precision import Precision, as_precision


class Row(NamedTuple):
    """One shape of the table in docs/performance.md."""

    head_dim: int
    seq: int
    batch: int
    heads: int
    causal: bool

    def flops(self) -> float:
        """Floating-point operations of a forward."""
        return 4.0 * self.batch * self.heads * self.seq**2 * self.head_dim * (0.5 if self.causal else 1)

    def bytes(self) -> int:
        """Least bytes of a forward in bf16: q, k, v read, O written."""
        return 4 * 2 * self.batch * self.heads * self.seq * self.head_dim

    def __str__(self) -> str:
        return f"D {self.head_dim}  T {self.seq}  B×H {self.batch}×{self.heads}  {'causal' if self.causal else 'full'}"


ROWS = (Row(64, 1024, 16, 32, True), Row(64, 1024, 16, 32, False), Row(64, 4096, 4, 32, True),
        Row(64, 16384, 1, 32, True), Row(128, 1024, 16, 16, True), Row(128, 4096, 4, 16, True),
        Row(128, 4096, 4, 16, False), Row(128, 16384, 1, 16, True))
PAPER_SHAPE = Row(64, 1024, 32, 12, True)


class Timer:
    """Median time of a call on CuPy's current stream, the L2 cache emptied before each."""

    def __init__(self, repeats: int = 20) -> None:
        self.cupy = import_cupy()
        self.repeats = repeats
        self.scratch = self.cupy.empty(256 << 20, self.cupy.uint8)

    def __call__(self, call: Callable[[], Any]) -> float:
        """Seconds."""
        for _ in range(3):
            call()
        events = [[self.cupy.cuda.Event() for _ in range(2)] for _ in range(self.repeats)]
        for start, end in events:
            self.scratch.fill(0)
            start.record()
            call()
            end.record()
        self.cupy.cuda.get_current_stream().synchronize()
        return statistics.median(self.cupy.cuda.get_elapsed_time(s, e) for s, e in events) / 1e3


def ceilings(timer: Timer) -> tuple[float, float]:
    """Measured here and now: bf16 8192³ matrix product (FLOP/s) and copy bandwidth (bytes/s, read and written)."""
    cupy = timer.cupy
    a, b = (_normal((8192, 8192), i) for i in range(2))
    product = 2 * 8192**3 / timer(lambda: a @ b)
    source, target = (cupy.empty(1 << 30, cupy.uint8) for _ in range(2))
    return product, 2 * source.nbytes / timer(lambda: cupy.copyto(target, source))


def inputs(row: Row, seed: int = 0) -> list[Any]:
    """q, k, v, dO: random normal bf16 on the GPU."""
    return [_normal((row.batch, row.heads, row.seq, row.head_dim), seed + i) for i in range(4)]


def _normal(shape: tuple[int, ...], seed: int) -> Any:
    """Normal bf16 of this shape on the GPU: four million drawn by NumPy, repeated (CuPy's own random needs cuRAND)."""
    import ml_dtypes
    cupy = import_cupy()
    drawn = np.random.default_rng(seed).standard_normal(1 << 22, dtype=np.float32).astype(ml_dtypes.bfloat16)
    size = math.prod(shape)
    bits = cupy.tile(cupy.asarray(drawn.view(np.uint16)), -(-size // drawn.size))
    return bits[:size].reshape(shape).view(ml_dtypes.bfloat16)


def own(row: Row, precision: Precision | str, timer: Timer, fix: str = "off") -> tuple[float, float]:
    """Seconds of forward and of backward."""
    p = as_precision(precision)
    q, k, v, do = inputs(row)
    _, saved = flash_attention_forward(q, k, v, causal=row.causal, precision=p, fix=fix)
    forward = timer(lambda: flash_attention(q, k, v, causal=row.causal, precision=p, fix=fix))
    return forward, timer(lambda: flash_attention_backward(do, saved))


def own_both(row: Row, precision: Precision | str, timer: Timer, fix: str = "off") -> float:
    """Seconds of a forward that keeps what backward needs, and of its backward, as one call."""
    p = as_precision(precision)
    q, k, v, do = inputs(row)

    def call() -> None:
        _, saved = flash_attention_forward(q, k, v, causal=row.causal, precision=p, fix=fix)
        flash_attention_backward(do, saved)

    return timer(call)


def torch_attention(row: Row, backend: str, timer: Timer) -> tuple[float, float]:
    """Seconds of forward and of backward of torch's scaled_dot_product_attention.

    backend: FLASH_ATTENTION or CUDNN_ATTENTION.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v, do = (torch.from_dlpack(x).requires_grad_(i < 3) for i, x in enumerate(inputs(row)))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=row.causal)  # noqa: E731
        with torch.no_grad():
            forward = timer(call)
        o = call()
        return forward, timer(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))


def paper_forward(q: Any, k: Any, v: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """O and L = m + log l of bf16 torch tensors (…, T, D): algorithm 1 of arXiv 2510.04212 with one tile.

    One torch operation after another, each T×T result in memory, in the dtypes that bf16 autocast gives them:
    the roundings of precision `bf16`.

    mask: (Tq, Tk), True where a query does not see a key.
    """
    s = _paper_scores(q, k, mask, scale)
    m = s.amax(-1, keepdim=True)
    p = (s - m).float().exp()
    l = p.sum(-1, keepdim=True).bfloat16()
    return (p.bfloat16() @ v) / l, m.float() + l.float().log()


def paper_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, mask: Any,
                   scale: float) -> tuple[Any, Any, Any]:
    """dQ, dK and dV after `paper_forward`, likewise (algorithm 2): P again from S and L, δ = rowsum(dO∘O)."""
    delta = (do * o).float().sum(-1, keepdim=True)
    p = (_paper_scores(q, k, mask, scale) - lse).exp()
    dv = p.bfloat16().mT @ do
    ds = (p * scale * (do @ v.mT - delta)).bfloat16()
    return ds @ k, ds.mT @ q, dv


def _paper_scores(q: Any, k: Any, mask: Any, scale: float) -> Any:
    return (q @ k.mT * scale).masked_fill(mask, -math.inf)


def paper_both(row: Row, timer: Timer) -> float:
    """Seconds of `paper_forward` and `paper_backward` as one call."""
    import torch
    q, k, v, do = (torch.from_dlpack(x) for x in inputs(row))
    mask = torch.ones(row.seq, row.seq, dtype=torch.bool, device=q.device).triu(1 if row.causal else row.seq)
    scale = 1 / math.sqrt(row.head_dim)

    def call() -> None:
        o, lse = paper_forward(q, k, v, mask, scale)
        paper_backward(do, q, k, v, o, lse, mask, scale)

    return timer(call)


def compare(rows: tuple[Row, ...], programs: dict[str, Callable[[Row, Timer], tuple[float, float]]],
            timer: Timer) -> Iterator[tuple[Row, dict[str, tuple[float, float]]]]:
    """Every program on every row, one row at a time so that a table can grow while it is measured."""
    for row in rows:
        yield row, {name: program(row, timer) for name, program in programs.items()}
