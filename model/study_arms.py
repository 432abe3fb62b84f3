"""The arms of study 1: rows of the isolation table, values that are swept, cures. Options as of `cuflash train`.

Source: arXiv 2510.04212, section 3.2 (the paper prints no table), section 4 and appendix C.
"""
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from cuflash.errors import unknown
from cuflash.model.trials import Arm
from cuflash.model.verdict import FAILS, TRAINS
from cuflash.precision import Precision, as_precision
from cuflash.site_table import SITES

O_BAR = ("attn.pv", "attn.o_scaled", "attn.o_acc")
ALL_FP32 = "attn fp32"
UNCONDITIONAL = 1e30  # a tolerance beyond every S: each row with two keys or more counts as tied


def label(precision: str) -> str:
    """A file by its stem."""
    return pathlib.Path(precision).stem if precision.endswith(".toml") else precision


def base(precision: str) -> Arm:
    if not short_sites(precision):
        raise ValueError(f"precision {precision} has all of attention in fp32 or fp64, so there is nothing to study; "
                         "give a low one, as bf16")
    return Arm(label(precision), {"precision": precision}, "low precision, nothing else changed", keep=True,
               paper=FAILS)


def reference(precision: str) -> Arm:
    """The same with all of attention in fp32."""
    return Arm(ALL_FP32, {"precision": precision, "round": ("attn=fp32",)}, "all of attention in fp32",
               paper=TRAINS, low=label(precision))


def controls(arms: Sequence[Arm]) -> dict[str, str]:
    """The arm with all of attention in fp32 that each is paired with: that of its low precision, or the first."""
    of = {a.low: a.name for a in reversed(arms) if a.options.get("round") == ("attn=fp32",)}
    first = next((a.name for a in arms if a.name in of.values()), "")
    return {a.name: of.get(a.low or a.name, first) for a in arms}


def full(precision: str, sites: Iterable[str], scope: str = "") -> tuple[str, ...] | None:
    """--round texts that put sites in fp32, those that are short under the precision; None where none is."""
    short = short_sites(precision)
    return tuple(f"{scope}{s}=fp32" for s in sites if s in short or s == "attn") or None


def short_sites(precision: str | Precision) -> list[str]:
    """Attention's sites that round to a short format, somewhere in the network."""
    p = as_precision(precision)
    short = {s for s, r in p.table().items() if r.format != "fp32"}
    short |= {s for o in p.overrides if o.rounding.format != "fp32" for s in o.names()}
    return [s for s in SITES if s.startswith("attn.") and s in short and s not in p.merged]


def stochastic(precision: str, sites: Iterable[str]) -> tuple[str, ...] | None:
    """--round texts that round these sites to the formats that they have, by chance; None where none is short."""
    p, sites = as_precision(precision), set(sites) & set(short_sites(precision))
    texts = [f"{s}={r.format}:sr" for s, r in p.table().items() if s in sites and r.format != "fp32"]
    for o in p.overrides:
        *scopes, _ = o.target.split("/")
        texts += ["/".join([*scopes, f"{s}={o.rounding.format}:sr"]) for s in o.names()
                  if s in sites and o.rounding.format != "fp32"]
    return tuple(texts) or None


def own_places(precision: str | Precision) -> list[str]:
    """Roundings of attention in single layers, heads or directions, which sets of sites cannot stand for."""
    return [str(o) for o in as_precision(precision).overrides if o.scoped and any(n.startswith("attn.")
                                                                                  for n in o.names())]


def _numbers(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def isolation(precision: str, *, n_layer: int, layer: int, heads: Sequence[int]) -> list[Arm]:
    """The isolation table.

    Args:
        layer: where low precision does its harm, the paper's second layer.
        heads: of that layer, those that keep O in full in the row of chosen heads; none: no such row.

    Raises:
        ValueError: the model has no such layer.
    """
    if not 0 <= layer < n_layer:
        raise ValueError(f"--layer {layer}: the model has layers 0 to {n_layer - 1}")
    others = [i for i in range(n_layer) if i != layer]
    o = (*O_BAR, "attn.o")

    def arm(name: str, paper: str, note: str, round: tuple[str, ...] | None = None, **options: Any) -> Arm | None:
        if round is None and not options:
            return None  # none of its sites is short under this precision
        return Arm(name, {"precision": precision} | ({"round": round} if round else {}) | options, note, paper=paper)

    rows = [
        base(precision), reference(precision),
        arm("tiling off", FAILS, "row 1: one tile of all keys", set=("tile=none,none",)),
        arm("plain attention", "", "P is divided by l before PV: no Ō", algorithm="plain"),
        arm(f"low in layer {layer} only", FAILS, "row 3a: fp32 attention in the other layers",
            full(precision, ("attn",), f"L{_numbers(others)}/") if others else None),
        arm(f"low but in layer {layer}", TRAINS, "row 3b: fp32 attention in this layer",
            full(precision, ("attn",), f"L{layer}/")),
        arm("delta from P∘dP", TRAINS, "row 4", set=("delta_from=p_dp",)),
        arm("delta from fp32 O", TRAINS, "row 5a: O = PV again in fp32 for δ", set=("delta_from=o_fp32",)),
        arm("delta from O unrounded", "", "O before its last rounding for δ", set=("delta_from=o_unrounded",)),
        arm("O fp32", TRAINS, "row 5b: forward's PV, Ō and O in fp32", full(precision, o)),
        arm(f"O fp32 in heads {_numbers(heads)}", TRAINS, f"row 6: of layer {layer}",
            full(precision, o, f"L{layer}/H{_numbers(heads)}/")) if heads else None,
        arm("Ō fp32", TRAINS, "row 7: P̄V and its sum over the tiles", full(precision, O_BAR)),
        arm("l fp32", "", "the row sum", full(precision, ("attn.l",))),
        arm("S fp32", "", "S and α·S, all else low", full(precision, ("attn.s", "attn.s_scaled"))),
    ]
    return [dataclasses.replace(r, low="" if r.keep else label(precision)) for r in (*rows, *_fa2(precision)) if r]


def _fa2(precision: str) -> list[Arm]:
    """The precision of FlashAttention-2's kernels, where it is another one."""
    same = as_precision(precision).digest == as_precision("bf16-fa2").digest
    return [] if same else [Arm("bf16-fa2", {"precision": "bf16-fa2"},
                                "another precision: running values in fp32, as FlashAttention-2")]


FIXES = (("qiu-b2", "the paper's rule, v4", TRAINS), ("qiu-b7", "the paper's rule, v2", TRAINS),
         ("capped", "cuflash's", ""))


def fixes(precision: str) -> list[Arm]:
    return [Arm(f"fix {f}", {"precision": precision, "fix": f}, note, paper=paper) for f, note, paper in FIXES]


# ---- sweeps ---------------------------------------------------------------------------------------

BETAS = (1.5, 2, 3, 4, 6, 8)
EPSILONS = (0.0, 1e-3, 1e-2, 0.1)
OFFSETS = (0.01, 1.0, 10.0)
GAMMAS = (0.0, 0.5, 0.9, 0.999)
BITS = (4, 5, 6, 8, 9, 10, 12, 16)  # of the mantissa; bf16 has 7
LR_FACTORS = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)


def sweeps(precision: str, lr: float) -> dict[str, list[Arm]]:
    """What `study sweep` varies, by name; 1 of a parameter that means "as without a fix" is left out."""
    def fix(name: str, text: str, note: str) -> Arm:
        return Arm(name, {"precision": precision, "fix": text}, note)

    short = short_sites(precision)
    return {
        "beta": [fix(f"beta {b:g}", f"qiu-b7:beta={b:g}", "exact ties, β·r_m above zero, 0 below") for b in BETAS],
        "epsilon": [fix(f"epsilon {e:g}", f"shift:beta=2,gamma=0,epsilon={e:g}", "β = 2, ties within ε")
                    for e in EPSILONS],
        "gamma": [fix(f"gamma {g:g}", f"shift:beta=2,gamma={g:g}", "β = 2, γ·r_m below zero") for g in GAMMAS],
        "offset": [fix(f"offset {o:g}", f"shift:offset={o:g},epsilon={UNCONDITIONAL:g}",
                       "a fixed offset on every row") for o in OFFSETS],
        "unconditional": [fix("beta 2 on every row", f"shift:beta=2,gamma=0,epsilon={UNCONDITIONAL:g}",
                              "the shift without its condition")],
        "bits": [Arm(f"{b} bits", {"precision": precision, "round": tuple(f"{s}=e8m{b}" for s in short)},
                     "mantissa bits of attention's short sites") for b in BITS],
        "lr": [Arm(f"{a.name}, lr {lr * f:g}", a.options | {"lr": lr * f}, "the rate of learning",
                   low=a.low and f"{a.low}, lr {lr * f:g}")
               for f in LR_FACTORS for a in (base(precision), reference(precision))],
    }


def sweep(precision: str, lr: float, what: Sequence[str]) -> list[Arm]:
    """The arms of these sweeps behind the two that they are compared with.

    Raises:
        ValueError: an unknown sweep.
    """
    known = sweeps(precision, lr)
    for name in what:
        if name not in known:
            raise unknown("sweep", name, known)
    return [base(precision), reference(precision), *(arm for name in what for arm in known[name])]


# ---- cures ----------------------------------------------------------------------------------------

def cures_of(precisions: Sequence[str], lrs: Sequence[float] = (), own: Sequence[Arm] = ()) -> list[Arm]:
    """`cures` of each precision; several are told apart by their names. One that is itself among the precisions is
    no cure of the others."""
    if len(precisions) == 1:
        return cures(precisions[0], lrs, own)
    lows = {label(p) for p in precisions}
    return [dataclasses.replace(a, name=a.name if a.keep else f"{label(p)}: {a.name}")
            for p in precisions for a in cures(p, lrs, own) if a.keep or cure_of(a.name) not in lows]


def cure_of(name: str) -> str:
    """An arm's name without the precision and the rate that `cures_of` has added."""
    return name.rpartition(": ")[2].partition(", lr ")[0]


def cures(precision: str, lrs: Sequence[float] = (), own: Sequence[Arm] = (), short: bool = False) -> list[Arm]:
    """What might bring the failure rate to that of fp32, at each rate of learning; first nothing and fp32.

    short: only the paper's cures and cuflash's.
    """
    rows = [base(precision), reference(precision), *fixes(precision)]
    if m := full(precision, ("attn.m", "attn.dm")):
        rows.append(Arm("capped, m fp32", {"precision": precision, "fix": "capped", "round": m},
                        "cuflash's, its shift not rounded down to m's format"))
    rows += [Arm(name, {"precision": precision, "set": (f"delta_from={value}",)}, note) for name, value, note in (
        ("delta from P∘dP", "p_dp", "no O in δ"), ("delta from fp32 O", "o_fp32", "PV again in fp32"),
        ("delta from O unrounded", "o_unrounded", "a second, unrounded O is stored"))]
    named: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("Ō fp32", O_BAR, "running O in fp32, as kernels have it"),
        ("O fp32", (*O_BAR, "attn.o"), "O is stored in fp32"),
        ("l fp32", ("attn.l",), "the row sum in fp32"),
        ("Ō, l fp32", (*O_BAR, "attn.l"), "both"),
        ("S, x, m fp32", ("attn.s", "attn.s_scaled", "attn.m", "attn.x", "attn.dm"), "softmax's argument in fp32"))
    rows += [Arm(name, {"precision": precision, "round": texts}, note)
             for name, sites, note in named if (texts := full(precision, sites))]
    rows += [Arm(name, {"precision": precision, "round": texts}, "stochastic rounding") for name, sites in (
        ("Ō, O stochastic", (*O_BAR, "attn.o")), ("attn stochastic", tuple(s for s in SITES if s.startswith("attn."))))
        if (texts := stochastic(precision, sites))]
    rows += _fa2(precision)
    rows.append(Arm("QK-norm", {"precision": precision, "qk_norm": True}, "LayerNorm of q and k: another model"))
    if short:
        kept = (label(precision), ALL_FP32, "delta from P∘dP", "Ō fp32", "l fp32",
                *(f"fix {f}" for f, _, _ in FIXES))
        rows = [r for r in rows if r.name in kept]
    rows += [Arm(a.name, {"precision": precision} | a.options, a.note) for a in own]
    low = label(precision)
    if not lrs:
        return [dataclasses.replace(r, low="" if r.keep else low) for r in rows]
    return [dataclasses.replace(r, name=f"{r.name}, lr {lr:g}", options=r.options | {"lr": lr},
                                low="" if r.keep else f"{low}, lr {lr:g}") for lr in lrs for r in rows]
