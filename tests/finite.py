"""Finite differences in fp64, against which every gradient by hand is checked."""
from collections.abc import Callable

import numpy as np

from cuflash.precision import Precision
from cuflash.sites import Rounder

STEP = 1e-5


def rounder(precision: str = "fp64", direction: str = "fwd", **scope: object) -> Rounder:
    return Rounder(Precision.named(precision), direction, **scope)


def assert_gradient(
    loss: Callable[[], float], x: np.ndarray, dx: np.ndarray, *, entries: int = 40, seed: int = 0
) -> None:
    """dx is the gradient of loss() by x, which loss reads anew each time; some entries of x are tried.

    A central difference with step h is wrong by about h²·f'''/6 and eps·f/h: both below 1e-9 here
    for values of order 1, so 1e-7 (relative to the largest entry, at least 1) leaves room for f'''.
    """
    assert x.shape == dx.shape and x.dtype == dx.dtype == np.float64
    flat, bound = x.reshape(-1), 1e-7 * max(1.0, float(np.abs(dx).max()))
    chosen = np.random.default_rng(seed).permutation(flat.size)[:entries]
    assert np.shares_memory(flat, x)
    for i in chosen:
        kept = flat[i]
        flat[i] = kept + STEP
        above = loss()
        flat[i] = kept - STEP
        below = loss()
        flat[i] = kept
        assert abs((above - below) / (2 * STEP) - dx.reshape(-1)[i]) < bound, (
            i,
            above,
            below,
            dx.reshape(-1)[i],
        )


class Watcher:
    """Notes which sites were rounded."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    def __call__(self, rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
        self.sites.append(site)
