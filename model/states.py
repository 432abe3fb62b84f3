"""Saved states of a run, and what attention takes and gives there under two precisions (arXiv 2510.04212, eq. 1 and 2).

Layer by layer, on the same q, k, v and dO: what a precision changes in δ, in dQ and in the gradient of W_Q,
dW_Q = Σ dQ[T]ᵀ X[T]. All of it on the CPU, where every value of attention can be seen.
"""
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuflash.audit import Capture, Pass
from cuflash.fixes import Fix
from cuflash.model.passes import captures, one_pass
from cuflash.model.run import Run
from cuflash.precision import Precision
from cuflash.sites import Rounder
from cuflash.watching import watching


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer in the pass after a checkpoint.

    Attributes:
        step: the one that training would do next.
        x: (B, T, C), what goes into W_Q.
        w_q: (C, C).
        precision, fix: of the pass.
    """

    step: int
    layer: int
    capture: Capture
    x: np.ndarray
    w_q: np.ndarray
    precision: Precision
    fix: Fix

    def leading(self) -> tuple[np.ndarray, float, np.ndarray]:
        """u, σ, v of W_Q's largest singular value, fp64."""
        u, s, vt = np.linalg.svd(self.w_q.astype(np.float64))
        return u[:, 0], float(s[0]), vt[0]

    def dw_q(self, found: Pass) -> np.ndarray:
        """(C, C), fp64, from the dQ of a pass of this layer's attention."""
        assert found.dq is not None
        batch, heads, length, dim = found.dq.shape
        dq = found.dq.astype(np.float64).transpose(0, 2, 1, 3).reshape(batch * length, heads * dim)
        return dq.T @ self.x.reshape(batch * length, -1).astype(np.float64)

    def pk(self, head: int) -> np.ndarray:
        """P·K of a head (B, T, D), fp64: what δ's error is multiplied by in dQ."""
        q, k = (getattr(self.capture, n)[:, head].astype(np.float64) for n in "qk")
        s = q @ k.swapaxes(1, 2) * self.capture.scale
        s[:, ~np.tri(s.shape[1], dtype=bool)] = -np.inf
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        return p @ k / p.sum(axis=-1, keepdims=True)


class NoState(ValueError):
    """A run has no checkpoint of a state that is asked for."""


def states_before(run: Run, onset: int, count: int) -> list[int]:
    """The last checkpoints whose next pass comes before a failure showed, steps ascending.

    Raises:
        NoState: there is none.
    """
    steps = [step for step, _ in run.checkpoints() if step + 1 < onset]
    if not steps:
        raise NoState(f"{run.path} has no checkpoint from before step {onset}, where its failure shows")
    return steps[-count:]


def layer_states(path: pathlib.Path, step: int, samples: Sequence[int],
                 layers: Sequence[int] | None = None) -> list[LayerState]:
    """These layers, default all, of the pass after the checkpoint of a step, on these samples of its batch."""
    p = one_pass(path, step=step, samples=samples)
    c = p.header.model
    chosen = list(range(c.n_layer)) if layers is None else list(layers)
    inputs: dict[int, np.ndarray] = {}

    def watch(rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
        if rnd.layer in chosen and (rnd.direction, site, rnd.module) == ("fwd", "linear.x", "c_attn"):
            whole = inputs.setdefault(rnd.layer, np.empty((len(p.x), c.block_size, c.n_embd), np.float32))
            whole[rnd.samples] = rounded.reshape(-1, c.block_size, c.n_embd)

    with watching(watch):
        found = captures(p, chosen, samples=list(samples))
    weights = {i: p.model.params[f"h.{i}.attn.c_attn.weight"][:c.n_embd] for i in chosen}
    return [LayerState(p.step, i, found[i], inputs[i][list(samples)], weights[i], p.model.precision, p.model.fix)
            for i in chosen]
