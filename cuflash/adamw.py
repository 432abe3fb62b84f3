"""AdamW (Loshchilov & Hutter 2019, algorithm 2), in the operation order of torch.optim.AdamW."""
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash import launch
from cuflash.flat import BLOCK, Flat
from cuflash.linear import round_weight
from cuflash.sites import Rounder


def adamw_update(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, rnd: Rounder, *, step: int,
                 lr: float, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8,
                 weight_decay: float = 0.0, clip: float = 1.0) -> None:
    """One update of a parameter, in place.

    g ← clip·g; w ← w·(1 − lr·λ); m ← m + (g − m)·(1 − β₁); v ← v·β₂ + (g·g)·(1 − β₂);
    w ← w − (m/(√v/√(1 − β₂ᵗ) + ε))·(lr/(1 − β₁ᵗ)). Each scalar is one fp64 expression rounded once to
    fp32; each array operation rounds once.

    Args:
        w, m, v: weight and moments, of one shape, overwritten; sites `weight`, `adam.m`, `adam.v`.
        g: gradient; site `grad`. Its memory is reused.
        step: t, from 1.
        clip: what the gradient is multiplied by first (`clip_factor`).
    """
    f = rnd.dtype
    if clip != 1.0:
        g *= f(clip)
    g = round_weight(rnd, "grad", g)
    if weight_decay:
        w *= f(1 - lr * weight_decay)
    change = g - m
    change *= f(1 - beta1)
    m += change
    m[...] = round_weight(rnd, "adam.m", m)
    np.multiply(g, g, out=change)
    change *= f(1 - beta2)
    v *= f(beta2)
    v += change
    v[...] = round_weight(rnd, "adam.v", v)
    np.sqrt(v, out=change)
    change /= f(math.sqrt(1 - beta2 ** step))
    change += f(eps)
    np.divide(m, change, out=change)
    change *= f(lr / (1 - beta1 ** step))
    w -= change
    w[...] = round_weight(rnd, "weight", w)


# ---- CUDA ---------------------------------------------------------------------------------------

_SITES = ("grad", "adam.m", "adam.v", "weight")
_TENSOR = np.dtype([("begin", "i8"), ("size", "i8"), ("rows", "u4"), ("columns", "u4"), ("layer", "u4"),
                    ("module", "u4"), ("decays", "i4")], align=True)


class AdamWCuda:
    """`adamw_update` of all parameters of a `Flat` by one kernel; those that round alike go together.

    Args:
        w, m, v: weights and moments, laid out alike; updated in place.
        rounder: a parameter's Rounder by its name, as it is now: called again at each update for its key.
        decays: whether weight decay acts on a parameter, by its name.
    """

    def __init__(self, w: Flat, m: Flat, v: Flat, rounder: Callable[[str], Rounder],
                 decays: Callable[[str], bool]) -> None:
        import cupy
        self.w, self.m, self.v, self.rounder = w, m, v, rounder
        tensors = np.zeros(len(w.arrays), _TENSOR)
        tensor_of = np.empty(w.buffer.size // BLOCK, np.int32)
        groups: dict[tuple, list[int]] = {}
        for i, (name, x) in enumerate(w.arrays.items()):
            begin, rnd = w.begins[name], rounder(name)
            tensors[i] = (begin, x.size, x.size // x.shape[-1], x.shape[-1], rnd.layer, int(rnd.heads[0]),
                          decays(name))
            blocks = range(begin // BLOCK, -(-(begin + x.size) // BLOCK))
            tensor_of[blocks.start:blocks.stop] = i
            groups.setdefault(tuple((site, launch.checked(rnd, site)) for site in _SITES), []).extend(blocks)
        self.groups = [(sites, cupy.asarray(np.array(blocks, np.int32))) for sites, blocks in groups.items()]
        self.tensors, self.tensor_of = cupy.asarray(tensors.view(np.uint8)), cupy.asarray(tensor_of)

    @staticmethod
    def scalars(*, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8,
                weight_decay: float = 0.0) -> np.ndarray:
        """What `adamw_update` computes of these numbers before it looks at an array: (7,) fp32."""
        return np.array([1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2 ** step),
                         eps, lr / (1 - beta1 ** step)]).astype(np.float32)

    def update(self, g: Flat, clip: Any, failed: Any, scalars: Any) -> None:
        """One update.

        Args:
            clip, failed: as `grad_norm_cuda` leaves them; once `failed` is set nothing changes.
            scalars: of this step, on the GPU.
        """
        place = launch.place((1, 1), self.rounder(next(iter(self.w.arrays))), sample=0)
        for sites, blocks in self.groups:
            launch.run("adamw", "adamw", blocks.size, 256,
                       (self.w.buffer, g.buffer, self.m.buffer, self.v.buffer, blocks, self.tensor_of,
                        self.tensors, clip, failed, scalars, place), {}, sites)
