"""What the GPU tests of the network's operations share: the same call on NumPy and CuPy arrays, bit for
bit."""
from typing import Any

import numpy as np

from cuflash.formats import round_to
from cuflash.launch import storage
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.sites import Rounder

# Every site by a mode that draws words, or in a format that no dtype has.
ODD = Precision.named("bf16").round(
    "embed=bf16:rz", "ln.y=bf16:sr", "ln.dx=e5m9:sr", "linear=bf16:sr", "linear.dx=fp16:ru", "gelu.y=e6m8:sr",
    "gelu.dx=fp16:sr", "residual=bf16:sr", "logits=bf16:sr", "loss.dlogits=bf16:sr", "grad=bf16:sr",
    "adam.m=e8m12:sr", "adam.v=bf16:ru", "weight=bf16:sr")
PRECISIONS = {name: Precision.named(name) for name in ("fp32", "bf16-fa2", "fp16-fa2",
                                                       "bf16-stream")} | {"odd": ODD}


def rounder(precision: Precision, direction: str = "fwd", *, module: int = 3, layer: int = 2,
            samples: int = 1) -> Rounder:
    return Rounder(precision, direction, layer, key=Key(0x1234567890, step=7, sample=5), heads=(module,),
                   samples=range(5, 5 + samples))


def values(rng: np.random.Generator, shape: Any, format: str = "fp32", *, wide: bool = False) -> np.ndarray:
    """fp32 numbers of a format: normal, or over many binades with zeros of both signs."""
    x = rng.standard_normal(shape).astype(np.float32)
    if wide:
        x *= np.float32(2.0) ** rng.integers(-12, 12, shape).astype(np.float32)
        x[rng.random(shape) < 0.01] = 0.0
        x[rng.random(shape) < 0.01] = -0.0
    return round_to(x, format).astype(np.float32) if format != "fp32" else x


def put(x: np.ndarray, format: str = "fp32") -> Any:
    """On the GPU, in the dtype of the format."""
    import cupy
    with np.errstate(invalid="ignore"):  # a NaN's cast
        return cupy.asarray(x.astype(storage(format)))


def assert_same(got: Any, expected: np.ndarray, what: str) -> None:
    """Equal to the bit, all NaNs alike."""
    got = got.get().astype(np.float32)
    expected = np.asarray(expected, np.float32)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    if not same.all():
        at = [tuple(map(int, i)) for i in np.argwhere(~same)[:3]]
        raise AssertionError(f"{what}: {np.count_nonzero(~same)} of {same.size} differ, first "
                             + ", ".join(f"{i}: {got[i]!r} for {expected[i]!r}" for i in at))
