"""Figures 4, 5, 6 and 12 of arXiv 2510.04212 on a failing run of one's own: δ's error, its direction, its cause.

All of it on the CPU and on saved states, so deterministic; hp is plain fp64 on the same q, k, v and dO.
"""
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuflash.audit import DeltaError
from cuflash.audit_map import ErrorMap, error_map, write_maps
from cuflash.dump import recording
from cuflash.model.passes import one_pass
from cuflash.model.states import LayerState, layer_states
from cuflash.whole_file import whole_file

TERMS_FORMAT = "cuflash terms 1"
TERMS = 32  # tokens with the largest |δ_lp − δ_hp|, whose directions are compared
ROW_SITES = ("attn.p", "attn.v", "attn.alpha", "attn.m")


@dataclass(frozen=True)
class DeltaRow:
    """δ_lp − δ_hp in the pass after a checkpoint, of one head, as a row of delta.csv (head −1: all).

    `mean`, `se`, `sum`, `positive` as `cuflash.audit.DeltaError`. For all heads also `growth`: what δ's whole
    low precision adds to −uᵀ·dW_Q·v, by the norm of dW_Q; and `sigma`, W_Q's largest singular value.
    """

    step: int
    layer: int
    head: int
    rows: int
    mean: float
    se: float
    sum: float
    positive: float
    growth: float = math.nan
    sigma: float = math.nan

    @property
    def z(self) -> float:
        return self.mean / self.se if self.se else 0.0


def delta_rows(run: pathlib.Path, step: int, samples: Sequence[int]) -> list[DeltaRow]:
    """Every layer and head at one state."""
    rows = []
    for state in layer_states(run, step, samples):
        error, growth, sigma = _errors(state)
        for head in (-1, *range(error.shape[1])):
            e = DeltaError.of(error if head < 0 else error[:, head])
            more = (growth, sigma) if head < 0 else (math.nan, math.nan)
            rows.append(DeltaRow(state.step, state.layer, head, e.rows, e.mean, e.se, e.sum, e.positive, *more))
    return rows


def _errors(state: LayerState) -> tuple[np.ndarray, float, float]:
    """δ_lp − δ_hp (B, H, T); what it adds to the growth of W_Q; W_Q's largest singular value."""
    found, golden = state.capture.run(state.precision, state.fix), state.capture.golden
    assert found.delta is not None and golden.delta is not None
    error = found.delta - golden.delta
    u, sigma, v = state.leading()
    # dW_Q,lp − dW_Q,hp = −α Σ (δ_lp − δ_hp)[T] (PK)[T]ᵀ X[T] (equation 2), of all heads stacked
    x = state.x.astype(np.float64)
    turned = np.concatenate([np.einsum("bt,btd,btc->dc", error[:, h], state.pk(h), x) for h in range(error.shape[1])])
    growth = state.capture.scale * float(u @ turned @ v) / (float(np.linalg.norm(state.dw_q(golden))) or 1.0)
    return error, growth, sigma


def hottest(rows: Sequence[DeltaRow]) -> tuple[int, int]:
    """The layer whose δ adds most to the growth of W_Q, and its head with the largest mean |Σ| over the states."""
    layers = sorted({r.layer for r in rows})
    layer = max(layers, key=lambda i: np.mean([r.growth for r in rows if (r.layer, r.head) == (i, -1)]))
    heads = sorted({r.head for r in rows if r.head >= 0})
    return layer, max(heads, key=lambda h: abs(np.mean([r.sum for r in rows if (r.layer, r.head) == (layer, h)])))


@dataclass(frozen=True)
class Terms:
    """How alike the rank-1 terms (PK)[T]ᵀX[T] are, of the TERMS tokens with the largest |δ_lp − δ_hp|.

    cosine: mean |cosine| of two of them; rank: effective rank (exp of the entropy of the squared singular
    values, Roy and Vetterli 2007) of all of them, weighted alike; at most `tokens`.
    """

    step: int
    layer: int
    head: int
    tokens: int
    cosine: float
    rank: float


def terms(state: LayerState, head: int) -> tuple[Terms, "Term"]:
    """Their likeness, and the one of the token with the largest |δ_lp − δ_hp|."""
    error = _errors(state)[0][:, head]
    pk = state.pk(head)
    count = min(TERMS, error.size)
    chosen = np.argsort(-np.abs(error).reshape(-1), kind="stable")[:count]
    sample, token = np.unravel_index(chosen, error.shape)
    a, b = pk[sample, token], state.x[sample, token].astype(np.float64)
    a, b = (m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-300) for m in (a, b))
    gram = (a @ a.T) * (b @ b.T)  # cosines of the terms
    values = np.clip(np.linalg.eigvalsh(gram), 0, None)
    share = values[values > 0] / values.sum()
    off = np.abs(gram[~np.eye(count, dtype=bool)])
    found = Terms(state.step, state.layer, head, count, float(off.mean()) if off.size else math.nan,
                  float(np.exp(-(share * np.log(share)).sum())))
    s, t = int(sample[0]), int(token[0])
    return found, Term(state.step, state.layer, head, s, t, pk[s], state.x[s].astype(np.float64))


@dataclass(frozen=True, eq=False)
class Term:
    """PK (T, D) and X (T, C) of a sample, and the token whose term is shown."""

    step: int
    layer: int
    head: int
    sample: int
    token: int
    pk: np.ndarray
    x: np.ndarray

    @property
    def outer(self) -> np.ndarray:
        return np.outer(self.pk[self.token], self.x[self.token])


def write_terms(path: pathlib.Path, found: Sequence[Term]) -> None:
    """HDF5: a group for each, with what it says of itself as attributes."""
    import h5py
    with whole_file(path) as partial, h5py.File(partial, "w") as f:
        f.attrs["format"] = TERMS_FORMAT
        for i, term in enumerate(found):
            group = f.create_group(f"{i:02d}")
            for name, value in vars(term).items():
                if isinstance(value, np.ndarray):
                    group.create_dataset(name, data=value, shuffle=True, compression=1)
                else:
                    group.attrs[name] = value


def read_terms(path: pathlib.Path) -> list[Term]:
    """What `write_terms` wrote.

    Raises:
        ValueError: another file, or a damaged one.
    """
    import h5py
    try:
        with h5py.File(path, "r") as f:
            if f.attrs.get("format") != TERMS_FORMAT:
                raise ValueError(f"{path} is an HDF5 file, but not {TERMS_FORMAT!r}")
            return [Term(**{n: int(v) for n, v in g.attrs.items()}, **{n: d[...] for n, d in g.items()})
                    for g in (f[name] for name in sorted(f))]
    except (OSError, KeyError, TypeError) as e:  # TypeError: a group with other fields
        raise ValueError(f"{path}: damaged, cut short or not HDF5 ({e})") from e


def term_cosine(a: Term, b: Term) -> float:
    """Of two rank-1 terms."""
    return float((a.outer * b.outer).sum() / (np.linalg.norm(a.outer) * np.linalg.norm(b.outer)))


@dataclass(frozen=True)
class Place:
    """A row of attention and a feature of V: what figure 6 shows."""

    step: int
    layer: int
    head: int
    sample: int
    query: int
    feature: int


def widest(m: ErrorMap, step: int, layer: int, head: int) -> Place:
    """The row of a head with the largest |δ_lp − δ_hp|, and the feature that gives most to it."""
    h = m.heads.index(head)
    b, t = np.unravel_index(np.argmax(np.abs(m.delta[:, h])), m.delta[:, h].shape)
    feature = int(np.argmax(np.abs(m.by_feature[b, h, t])))
    return Place(step, layer, head, int(m.batch[int(b)]), int(t), feature)


def record(run: pathlib.Path, checkpoint: int, state: LayerState, head: int, maps: pathlib.Path,
           row: pathlib.Path) -> Place:
    """Writes δ's and O's errors of a layer (for `cuflash plot`), and a dump of its most wrong row."""
    m = error_map(state.capture, state.precision, state.fix)
    place = widest(m, state.step, state.layer, head)
    p = one_pass(run, step=checkpoint, samples=state.capture.batch)
    write_maps(maps, {state.layer: [m]}, p.x[list(state.capture.batch)], p.header.tokens)
    with recording(row, [s for s in ROW_SITES if s not in state.precision.merged], layers=[state.layer],
                   heads=[head], batch=[place.sample], rows=[place.query],
                   attributes={"data_sha256": p.data, "checkpoint": p.checkpoint}):
        p.run()
    return place
