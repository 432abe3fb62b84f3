"""The bias of Ō and O against the number of ties in a row and the size of the rest (arXiv 2510.04212, 3.3).

Rows in which some keys tie at P̄ = 1, at a maximum uniform in [1, 16], and one more key has a given P̄;
V uniform in [−4, −2], of the precision's own format. Errors are against fp64 arithmetic on the same
exponents and V.
"""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cuflash.attention import flash_attention
from cuflash.fixes import Fix
from cuflash.formats import Format, format_named, round_to, ulp
from cuflash.philox import Key
from cuflash.precision import Precision, as_precision
from cuflash.sites import Rounder

TIES = (1, 2, 3, 4, 8)
RESTS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
HEAD_DIM = 64


@dataclass(frozen=True)
class Bias:
    """Mean of (x − golden)/ulp with its standard error, over independent draws; x is `o_bar` (Ō) or `o`.

    `rest` is P̄ of the key that does not tie; ulp are those of `format`.
    """

    precision: str
    x: str
    format: str
    ties: int
    rest: float
    mean: float
    se: float


def bias(precision: Precision | str, ties: int, rest: float, *, fix: Fix | str = "off", rows: int = 512,
         seed: int = 0) -> tuple[Bias, Bias]:
    """The biases of Ō and of O in `rows` × 64 draws.

    Raises:
        ValueError: precision fp64, fewer than one tie, or a rest that is not in [0, 1).
    """
    p = as_precision(precision)
    if p.is_fp64 or p.algorithm == "plain":
        raise ValueError(
            f"precision {p.name}: name one of flash attention (plain has no Ō, fp64 is what is compared with)"
        )
    if ties < 1 or not 0 <= rest < 1:
        raise ValueError(f"ties {ties}, rest {rest}: valid: 1 or more, and 0 up to but not 1")
    format = _format(p)
    rng = np.random.default_rng([seed, ties, RESTS.index(rest) if rest in RESTS else 99])
    v = round_to(rng.uniform(-4, -2, (rows, 1, ties + 1, HEAD_DIM)).astype(np.float32), format)
    q = np.ones((rows, 1, 1, HEAD_DIM), np.float32)
    maxima = rng.uniform(1, 16, (rows, 1, 1, 1))  # of α·S; α = 1/8, so k is an eighth
    # S is rounded as the precision says, and so the rest is not quite `rest`: golden takes P̄ from attn.x.
    k = np.empty((rows, 1, ties + 1, HEAD_DIM), np.float32)
    k[:, :, :ties] = maxima / 8
    k[:, :, ties:] = (maxima + np.log(rest)) / 8 if rest else -1e4
    parts: dict[str, list[np.ndarray]] = {s: [] for s in ("attn.x", "attn.o_acc", "attn.o")}

    def watch(rnd: Rounder, site: str, x: np.ndarray, y: np.ndarray) -> None:
        if site in parts:  # one tile, so once for each block of samples
            parts[site].append(y.astype(np.float64))

    flash_attention(q, k, v, precision=p, fix=fix, key=Key(seed), watch=watch)
    x, o_bar, o = (np.concatenate(parts[s]) for s in parts)
    weights = np.exp2(x) if p.order == "fa2" else np.exp(x)  # (rows, 1, keys)
    exact = np.einsum("rqk,rkd->rqd", weights, v[:, 0].astype(np.float64))
    golden = {"o_bar": exact, "o": exact / weights.sum(axis=-1, keepdims=True)}
    found = []
    for name, value in (("o_bar", o_bar), ("o", o)):
        error = ((value - golden[name]) / ulp(golden[name], format)).reshape(-1)
        found.append(
            Bias(p.name, name, format.name, ties, rest, float(error.mean()),
                 float(error.std(ddof=1) / np.sqrt(error.size))))
    return found[0], found[1]


def table(precisions: Sequence[Precision | str], *, ties: Sequence[int] = TIES,
          rests: Sequence[float] = RESTS, fix: Fix | str = "off", rows: int = 512,
          seed: int = 0) -> Iterator[Bias]:
    """`bias` for each precision, number of ties and rest."""
    for precision in precisions:
        for n in ties:
            for rest in rests:
                yield from bias(precision, n, rest, fix=fix, rows=rows, seed=seed)


def _format(p: Precision) -> Format:
    """What O is rounded to; bf16 where it is not."""
    name = p.sites_for("fwd", 0, "", 0)["attn.o"].format
    return format_named("bf16" if name == "fp32" else name)
