"""Cases of attention's backward, and what their launches compile."""
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from cuflash import attention_backward, kernels
from cuflash.attention import Saved, flash_attention_backward, flash_attention_forward
from cuflash.precision import Precision, as_precision
from cuflash.testing import DTYPES, KEY, Case
from cuflash.tiles import Shape

# batch, heads, kv_heads, Tq, Tk, D, causal
SHAPES = {
    "tile": (1, 2, 2, 128, 128, 64, False), "causal": (1, 2, 2, 200, 200, 64, True),
    "group": (2, 2, 1, 129, 193, 64, True), "more rows": (1, 1, 1, 193, 129, 64, True),
    "one": (1, 1, 1, 1, 1, 64, True), "d128": (1, 1, 1, 256, 256, 128, True),
    "d128 group": (1, 2, 1, 150, 140, 128, False), "d40": (1, 4, 2, 67, 300, 40, False),
    "d80": (1, 1, 1, 100, 200, 80, True), "d256": (1, 1, 1, 70, 90, 256, True),
    "d192": (1, 1, 1, 130, 66, 192, False), "d1": (1, 1, 1, 33, 17, 1, False),
    "d63": (1, 3, 1, 5, 2, 63, True),
    "d33": (1, 1, 1, 300, 260, 33, True), "d16": (1, 1, 1, 520, 520, 16, True),
    "long": (1, 1, 1, 900, 1000, 64, True), "long d128": (1, 1, 1, 600, 450, 128, True),
    "no keys": (1, 2, 1, 3, 0, 64, True), "no rows": (1, 2, 1, 0, 5, 64, False),
}
DISTRIBUTIONS = ("normal", "heavy", "ties", "one_sign", "huge", "tiny", "flat", "infinite", "nan",
                 "empty rows")


def _precision(name: str, *rounds: str, **switches: Any) -> Precision:
    p = as_precision(name).replace(**switches) if switches else as_precision(name)
    return p.round(*rounds) if rounds else p


MAIN = ("bf16-fa2", "bf16", "fp16-fa2")
PRECISIONS = {name: as_precision(name) for name in (*MAIN, "fp32")} | {
    "fa2 mufu": _precision("bf16-fa2", exp="mufu"),
    "bf16 mufu": _precision("bf16", exp="mufu"),
    "fp32 fa2": _precision("fp32", order="fa2"),
    "fa2 sequential": _precision("bf16-fa2", accumulator="sequential"),
    "fa2 m_l": _precision("bf16-fa2", p_bwd_from="m_l"),
    "bf16 m_l": _precision("bf16", p_bwd_from="m_l"),
    "fa2 o_unrounded": _precision("bf16-fa2", delta_from="o_unrounded"),
    "fa2 o_fp32": _precision("bf16-fa2", delta_from="o_fp32"),
    "bf16 o_fp32": _precision("bf16", delta_from="o_fp32"),
    "fa2 p_dp": _precision("bf16-fa2", delta_from="p_dp"),
    "bf16 p_dp": _precision("bf16", delta_from="p_dp"),
    "fp32 p_dp": _precision("fp32", delta_from="p_dp"),
    "fa2 plain": _precision("bf16-fa2", algorithm="plain"),
    "bf16 plain": _precision("bf16", algorithm="plain"),
    "fa2 tile 16": _precision("bf16-fa2", tile=(16, 16)),
    "bf16 tile 16": _precision("bf16", tile=(16, 16)),
    "fa2 tile 48,32": _precision("bf16-fa2", tile=(48, 32)),
    "bf16 tile 32,48": _precision("bf16", tile=(32, 48)),
    "fa2 three tiles": _precision("bf16-fa2", tile=((128, 128), (192, 64), (64, 192))),
    "bf16 three tiles": _precision("bf16", tile=((128, 128), (64, 256), (128, 16))),
    "fa2 no tiles": _precision("bf16-fa2", tile=(None, None)),
    "bf16 no tiles": _precision("bf16", tile=(None, None)),
    "bf16 tile 512": _precision("bf16", tile=(512, 512)),
    "fa2 tile 256,none": _precision("bf16-fa2", tile=(256, None)),
    "fa2 narrow sums": _precision("bf16-fa2", "attn.dv_acc=bf16", "attn.dk_acc=e5m6", "attn.dq_acc=bf16",
                                  "attn.dq_tile=bf16"),
    "bf16 wide sums": _precision("bf16", "attn.dv_acc=fp32", "attn.dk_acc=fp16"),
    "fa2 e4m3": _precision("bf16-fa2", "attn.ds=e4m3", "attn.p_bwd=e5m2", "attn.dv_acc=e4m3"),
    "bf16 fp8": _precision("bf16", "attn.q=fp8_e4m3", "attn.s=fp8_e5m2", "attn.ds=fp8_e4m3",
                           "attn.dq_acc=e5m3:ru", "attn.dk_tile=e4m9:rd"),
    "all bf16 rz": as_precision("all-bf16:rz"),
    "all tf32": as_precision("all-tf32"),
    "fa2 sr": _precision("bf16-fa2", "attn.ds=bf16:sr", "attn.p_bwd=bf16:sr", "attn.k=bf16:sr",
                         "attn.dk=bf16:sr", "attn.dq_tile=bf16:sr"),
    "bf16 sr": _precision("bf16", "attn.s=bf16:sr", "attn.dp=bf16:sr", "attn.do=bf16:sr",
                          "attn.delta_prod=bf16:sr", "attn.dv_acc=bf16:sr"),
    "fa2 mixed": _precision("bf16-fa2", "attn.ds=fp16", "attn.v=fp16"),
    "bf16 p fp32": _precision("bf16", "attn.p_bwd=fp32"),
    "bf16 q fp32": _precision("bf16", "attn.q=fp32"),
    "fa2 scoped": _precision("bf16-fa2", "H0/attn.p_bwd=e8m4", "H1/attn.dk=e8m3", "bwd/attn.s=bf16"),
}


class BackwardCase(NamedTuple):
    precision: str
    shape: str
    distribution: str
    dtype: str
    strided: bool  # rows that no 16-byte copy can read, NaN around them

    def __str__(self) -> str:
        words = (self.precision, self.shape, self.distribution, self.dtype, *["strided"] * self.strided)
        return "-".join(words)

    def saved(self, rng: np.random.Generator, accumulator: str) -> tuple[np.ndarray, Saved]:
        """dO, and what a forward on the CPU leaves: backward is tested by itself."""
        batch, heads, kv_heads, tq, tk, d, causal = SHAPES[self.shape]
        p = PRECISIONS[self.precision]
        kind = "normal" if self.distribution == "empty rows" else self.distribution
        case = Case(heads, kv_heads, tq, tk, d, causal, p, dtype=self.dtype, distribution=kind, batch=batch)
        q, k, v, do = case.inputs(rng) if min(tq, tk) else self._draw(rng)
        accumulator = "sequential" if p.accumulator == "sequential" else accumulator
        forward = p.replace(accumulator="library", exp="defined")  # whatever made O and L
        saved = flash_attention_forward(q, k, v, causal=causal, precision=forward, key=KEY)[1]
        lse = saved.lse.copy()
        if self.distribution == "empty rows":  # others than those that a mask makes
            lse[..., ::7] = -np.inf
        return do, Saved(q, k, v, saved.o, lse, m=saved.m, l=saved.l, o_unrounded=saved.o_unrounded,
                         causal=causal, precision=p.replace(accumulator=accumulator), key=KEY)

    def _draw(self, rng: np.random.Generator) -> list[np.ndarray]:
        batch, heads, kv_heads, tq, tk, d, _ = SHAPES[self.shape]
        shapes = [(batch, *rest, d) for rest in ((heads, tq), (kv_heads, tk), (kv_heads, tk), (heads, tq))]
        return [rng.standard_normal(shape).astype(np.float32).astype(DTYPES[self.dtype]) for shape in shapes]


def _cases() -> Iterator[BackwardCase]:
    at_64 = [name for name, shape in SHAPES.items() if shape[5] == 64]
    others = [name for name, shape in SHAPES.items() if shape[5] != 64]
    for i, name in enumerate(PRECISIONS):
        main = name in MAIN
        shapes = list(SHAPES)
        if not main:
            shapes = [*(at_64[(i + j) % len(at_64)] for j in range(4)), others[i % len(others)]]
        own = "fp16" if name.startswith("fp16") else "fp32" if name.startswith("fp32") else "bf16"
        for j, shape in enumerate(shapes):
            every = main and shape in ("causal", "group", "d128")
            for distribution in DISTRIBUTIONS if every else [DISTRIBUTIONS[(i + j) % len(DISTRIBUTIONS)]]:
                yield BackwardCase(name, shape, distribution, own, False)
        shape = "group" if main else shapes[i % len(shapes)]
        yield BackwardCase(name, shape, "normal", ("fp32", "bf16", "fp16")[i % 3], True)


CASES = list(_cases())


# ---- compilations, without a GPU ----------------------------------------------------------------

class DeviceArray(np.ndarray):
    """What the launch uses of a cupy.ndarray."""

    @property
    def data(self) -> Any:
        part = self.base is not None and self.base.shape != self.shape
        return types.SimpleNamespace(ptr=8 if part else 1 << 20)

    device = types.SimpleNamespace(id=0)


def device_array(shape: Any, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype).view(DeviceArray)


@contextmanager
def recording(capability: int) -> Iterator[dict]:
    """Launches on DeviceArrays record (source, defines, headers) instead of running, as on such a device."""
    seen: dict[tuple, None] = {}

    def kernel(source, function, defines={}, headers={}, *, shared=0):
        seen[source, tuple(defines.items()), tuple(headers.items())] = None
        return lambda *args, **kwargs: None

    cupy = kernels.import_cupy()
    fakes = [mock.patch.object(cupy, "ndarray", DeviceArray), mock.patch.object(cupy, "empty", device_array),
             mock.patch.object(cupy, "array", lambda x, dtype: np.array(x, dtype).view(DeviceArray)),
             mock.patch.object(cupy.cuda.runtime, "getDevice", lambda: 0),
             mock.patch.object(kernels, "kernel", kernel),
             mock.patch.object(kernels, "capability", lambda device: capability)]
    attention_backward.plan.cache_clear()
    for fake in fakes:
        fake.start()
    try:
        yield seen
    finally:
        for fake in fakes:
            fake.stop()
        attention_backward.plan.cache_clear()


def launch(case: BackwardCase) -> None:
    """The case's launch; inside `recording`."""
    batch, heads, kv_heads, tq, tk, d, causal = SHAPES[case.shape]
    p = PRECISIONS[case.precision]
    dtype = DTYPES[case.dtype]

    def rows(h: int, t: int, dtype: Any = dtype) -> Any:
        if case.strided:
            return device_array((batch, h, t + 1, d + 3), dtype)[:, :, 1:, :d]
        return device_array((batch, h, t, d), dtype)

    def dtype_of(direction: str, site: str) -> np.dtype:
        return DTYPES.get(p.sites_for(direction, KEY.layer, "", 0)[site].format, np.dtype(np.float32))

    q, k, v, do = rows(heads, tq), rows(kv_heads, tk), rows(kv_heads, tk), rows(heads, tq)
    wide = p.delta_from in ("o_unrounded", "o_fp32")
    o = rows(heads, tq, np.float32 if wide else dtype_of("fwd", "attn.o"))
    line = device_array((batch, heads, tq))
    results = [device_array(x.shape, dtype_of("bwd", site))
               for x, site in ((q, "attn.dq"), (k, "attn.dk"), (v, "attn.dv"))]
    attention_backward.launch_backward(do, q, k, v, o, line, line, line, *results, p, Shape(tq, tk, causal),
                                       d ** -0.5, KEY)


def compilations(cases: list[BackwardCase], capability: int) -> list[tuple]:
    """(source, defines, headers) of everything that the cases launch."""
    with recording(capability) as seen:
        for case in cases:
            launch(case)
    return list(seen)


def reference(case: BackwardCase, seed: int, accumulator: str) -> tuple[np.ndarray, Saved, tuple]:
    """dO, what was saved, and the gradients on the CPU."""
    with np.errstate(all="ignore"):
        do, saved = case.saved(np.random.default_rng(seed), accumulator)
        return do, saved, flash_attention_backward(do, saved)
