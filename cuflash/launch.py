"""What launches of the network's kernels share: dtypes, sites, and places for stochastic rounding.

A GPU keeps values in the dtype of their site's format (bf16, fp16), or in fp32. Work is queued on CuPy's
current stream.

Under a watcher an operation's own site is compiled as fp32 and rounded afterwards by `Rounder`, which shows
the watcher both values: the same bits, at a cost.
"""
import functools
import sys
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import kernels
from cuflash.formats import storage_dtype
from cuflash.kernel_header import network_header
from cuflash.precision import Rounding

if TYPE_CHECKING:
    from cuflash.sites import Rounder

C_TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "fp16"}
BLOCK_ELEMENTS = 4096  # of an elementwise kernel (cuda/rows.cuh)

# struct Place of cuda/rows.cuh: seed, step, sample; layers and modules of up to three sites; rows and
# columns.
_PLACE = Struct("12I")
NOWHERE = np.zeros(48, np.uint8).view("V48")  # for kernels that round nothing


def on_gpu(x: Any) -> bool:
    """Whether x is a CuPy array. CuPy is not imported to find out."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
    return sys.modules["cupy"].empty(shape, dtype)


def c_type(x: Any) -> str:
    """The CUDA type of an array's elements."""
    return _c_type(x.dtype)


@functools.cache
def _c_type(dtype: np.dtype) -> str:
    """The CUDA type of a dtype.

    Raises:
        TypeError: the kernels have none for it.
    """
    if dtype.name not in C_TYPES:
        raise TypeError(f"the network's kernels take {', '.join(C_TYPES)}, got {dtype.name}: cast it, as by "
                        ".astype('float32')")
    return C_TYPES[dtype.name]


@functools.cache
def storage(format: str) -> np.dtype:
    """The dtype that a GPU keeps a format's values in."""
    dtype = storage_dtype(format)
    return dtype if dtype is not None and dtype.name in C_TYPES else np.dtype(np.float32)


def checked(rnd: "Rounder", site: str) -> Rounding:
    """What a site does.

    Raises:
        ValueError: the precision is fp64, or words are to be drawn without a key.
    """
    if rnd.dtype == np.float64:
        raise ValueError("precision fp64 runs on NumPy arrays only: use device cpu")
    found = rnd.rounding(site)
    if rnd.key is None and found.format != "fp32" and found.rule.needs_key:
        raise ValueError(f"site {site} rounds stochastically: pass key=cuflash.Key(seed)")
    return found


def rounding(rnd: "Rounder", site: str) -> Rounding:
    """What an operation's kernel does at its site: nothing, where a watcher wants both values."""
    found = checked(rnd, site)
    return found if rnd.watch is None else Rounding()


def result(shape: tuple[int, ...], rnd: "Rounder", site: str) -> Any:
    """An empty array for an operation's result, before `shown`."""
    return empty(shape, storage(rounding(rnd, site).format))


def shown(rnd: "Rounder", site: str, y: Any) -> Any:
    """An operation's result, which a watcher gets to see."""
    return y if rnd.watch is None else rnd(site, y)


def place(shape: Sequence[int], *rnds: "Rounder", sample: int | None = None) -> np.ndarray:
    """Where an array of this shape lies at a kernel's sites, one Rounder or three; `sample` in place of the
    Rounder's."""
    rnd = rnds[0]
    seed, step = (rnd.key.seed, rnd.key.step) if rnd.key else (0, 0)
    if sample is None:
        sample = int(rnd.samples[0]) if len(rnd.samples) else 0
    a, b, c = rnds if len(rnds) == 3 else (rnd, rnd, rnd)
    rows = shape[-2] if len(shape) > 1 else 1
    packed = _PLACE.pack(seed & 0xFFFFFFFF, seed >> 32, step, sample, a.layer, b.layer, c.layer, a.heads[0],
                         b.heads[0],
                         c.heads[0], rows or 1, shape[-1] or 1)
    return np.frombuffer(packed, "V48")


def run(source: str, function: str, blocks: int | tuple[int, ...], threads: int, args: tuple[Any, ...],
        defines: Mapping[str, object], sites: tuple[tuple[str, Rounding], ...] = (), *, products: str = "",
        shared: int = 0) -> None:
    """Queues a kernel whose precision.cuh has these sites (and `products`)."""
    grid = blocks if isinstance(blocks, tuple) else (blocks,)
    kernel = kernels.kernel(source, function, defines, _headers(sites, products), shared=shared)
    kernel(grid, (threads,), args, shared_mem=shared)


@functools.lru_cache(maxsize=1024)
def _headers(sites: tuple[tuple[str, Rounding], ...], products: str) -> dict[str, str]:
    return {"precision.cuh": network_header(sites) + products}


def elementwise(size: int) -> int:
    """Blocks of an elementwise kernel; each goes on to further elements where these are too few."""
    return max(1, min(-(-size // BLOCK_ELEMENTS), 1 << 30))


@functools.cache
def multiprocessors() -> int:
    cupy = kernels.import_cupy()
    return cupy.cuda.Device().attributes["MultiProcessorCount"]


def flat(x: Any) -> Any:
    """x contiguous and aligned to 16 bytes: itself, or a copy."""
    if not x.flags.c_contiguous:
        return sys.modules["cupy"].ascontiguousarray(x)
    return x.copy() if x.data.ptr % 16 else x


def indices(x: Any) -> Any:
    """Tokens as contiguous int32."""
    cupy = sys.modules["cupy"]
    return cupy.ascontiguousarray(x.astype(np.int32, copy=False))


def cast(x: Any, dtype: np.dtype) -> Any:
    """x in another dtype that holds its values."""
    if x.dtype == dtype:
        return x
    x = flat(x)
    y = empty(x.shape, dtype)
    run("round", "round_site", elementwise(x.size), 256, (x, y, np.int64(x.size), NOWHERE),
        {"ROUNDED": "unrounded", "X_T": c_type(x), "Y_T": c_type(y)})
    return y
