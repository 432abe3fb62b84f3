"""What the drifts of study_stable say of the claims of arXiv 2405.02803, figures 7 and 8.

Every sentence is made of measured values; each verdict follows RULES.
"""
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cuflash.deviation_report import TREND, tau
from cuflash.model.config import resolve
from cuflash.model.run import Run
from cuflash.model.study_stable import KINDS, Drift, Trained
from cuflash.precision import Precision
from cuflash.report import Claim, table, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLASH, INIT, LOW = KINDS
SHARE = 0.95  # of the checkpoints that a drift must be the smaller one at
RULES = f"""Rules: a drift grows where Kendall's tau of step and distance is at least {TREND}; it is bounded
by another where it is the smaller one at {SHARE:.0%} of the checkpoints after step 0 or more; "several times"
is 2 or more, by the geometric mean of the ratio over these checkpoints."""
CAPTIONS = {
    "figure_7": "Weights of a flash and a plain run over the steps, all together (the paper's figure 7); "
                "thin: the other seed.",
    "figure_8": "The same beside two initialisations, and low precision against fp32; Wasserstein-1 distance "
                "relative to mean |A| (figure 8).",
}

Key = tuple[str, str, int]  # kind, label, seed


def series(found: Sequence[Drift], name: str = "all") -> dict[Key, list[Drift]]:
    """Each pair's drifts of a group of weights, steps ascending."""
    pairs: dict[Key, list[Drift]] = {}
    for d in found:
        if d.name == name:
            pairs.setdefault((d.kind, d.label, d.seed), []).append(d)
    return pairs


def ratio(a: Sequence[Drift], b: Sequence[Drift], measure: str = "wasserstein") -> tuple[float, float]:
    """A's distance by B's after step 0: the geometric mean, and the share of checkpoints above 1."""
    other = {d.step: getattr(d, measure) for d in b}
    ratios = np.array([getattr(d, measure) / other[d.step] for d in a if d.step and other.get(d.step)])
    if not len(ratios) or (ratios == 0).any():
        return math.nan, math.nan
    return float(np.exp(np.log(ratios).mean())), float((ratios > 1).mean())


def claims(found: Sequence[Drift]) -> list[Claim]:
    """The claims of figures 7 and 8."""
    pairs = series(found)
    return [
        _grows(pairs),
        _against(pairs, INIT, "8", "drift of flash against plain is at most that of another initialisation",
                 lambda mean, share: share >= SHARE, _control(pairs)),
        _against(pairs, LOW, "8", "and 2 to 5 times smaller than that of low precision against fp32",
                 lambda mean, share: mean >= 2, _beginning(pairs))
    ]


def _grows(pairs: dict[Key, list[Drift]]) -> Claim:
    flash = {k: v for k, v in pairs.items() if k[0] == FLASH}
    taus = {k: tau([d.step for d in v], [d.wasserstein for d in v]) for k, v in flash.items()}
    said = "; ".join(f"{label} seed {seed}: W1 {v[-1].wasserstein:.2g}, max {v[-1].max_abs:.2g} "
                     f"(tau {taus[kind, label, seed]:+.2f})" for (kind, label, seed), v in flash.items())
    single = ", ".join(f"{label} {tau([d.step for d in v], [d.mean_abs for d in v]):+.2f}"
                       for (_, label, _), v in flash.items())
    return Claim("7", "the weights of a flash and a plain run differ, and more with each step",
                 f"at step {next(iter(flash.values()))[-1].step}: {said}",
                 verdict(t >= TREND for t in taus.values()),
                 f"training amplifies the first difference; tau of single weights' mean |A − B| is {single}: "
                 "where that of the Wasserstein-1 distance is less, weights still part and their "
                 "distribution no longer does")


def _against(pairs: dict[Key, list[Drift]], kind: str, figure: str, paper: str,
             holds: Callable[[float, float], bool], why: str) -> Claim:
    """The drift of this kind by that of flash and plain, in one format and, if it is there, of one seed."""
    said, held = [], []
    for (k, label, seed), flash in pairs.items():
        if k != FLASH:
            continue
        format = label.removesuffix("-per-tile")
        other = pairs.get((kind, format, seed)) or next(
            (v for (x, y, _), v in pairs.items() if (x, y) == (kind, format)), None)
        if other is None:
            continue
        mean, share = ratio(other, flash)
        said.append(f"{label} seed {seed}: {mean:.3g} times (larger at {share:.0%} of the checkpoints)")
        held.append(holds(mean, share))
    return Claim(figure, paper, f"{kind} by flash / plain, W1: " + "; ".join(said), verdict(held), why)


def _control(pairs: dict[Key, list[Drift]]) -> str:
    """How far the same pair drifts in fp32, where the two differ in the last bits alone."""
    fp32 = next((v for (kind, label, _), v in pairs.items() if (kind, label) == (FLASH, "fp32")), None)
    if fp32 is None or len(fp32) < 2 or not fp32[1].mean_abs:
        return "both begin from other weights there, from the same here"
    first, last = fp32[1], fp32[-1]
    return ("two initialisations differ before the first step, a pair of one seed does not; how far it comes "
            "is how much training amplifies: in fp32, where flash and plain differ in the last bits, mean "
            f"|A − B| goes from {first.mean_abs:.2g} at step {first.step} to {last.mean_abs:.2g}")


def _beginning(pairs: dict[Key, list[Drift]]) -> str:
    """The ratio at the first checkpoint, before training has amplified much."""
    said = []
    for (kind, label, seed), low in pairs.items():
        flash = pairs.get((FLASH, label, seed))
        if kind == LOW and flash is not None and len(flash) > 1 and flash[1].mean_abs:
            said.append(f"{label} seed {seed} {low[1].mean_abs / flash[1].mean_abs:.1f}")
            step = low[1].step
    if not said:
        return "no pair of one format and seed"
    return (f"mean |A − B| at step {step}, before it is amplified much, stands as " + ", ".join(said)
            + ": switching between flash and plain attention changes roundings of attention alone, low "
            "precision those of every layer")


def figures(found: Sequence[Drift]) -> "dict[str, Figure]":
    from cuflash import plot_study
    everything = [d for d in found if d.name == "all"]
    return {
        "figure_7": plot_study.drifts([d for d in everything if d.kind == FLASH],
                                      [("wasserstein", "Wasserstein-1 distance"), ("max_abs", "max |A − B|")],
                                      across=True),
        "figure_8": plot_study.drifts(everything, [("relative", "Wasserstein-1 / mean |A|"),
                                                   ("mean_abs", "mean |A − B|")]),
    }


def sections(found: Sequence[Drift], trained: Sequence[Trained]) -> str:
    """Figures and tables as Markdown."""
    return "\n\n".join([
        "## Trainings", RULES,
        trained_table(trained), *(f"![{CAPTIONS[name]}]({name}.png)\n\n*{CAPTIONS[name]}*"
                                  for name in CAPTIONS), f"All weights at step {max(d.step for d in found)}:",
        last_table(found), "By layer and tensor, W1 / mean |A| at that step:",
        groups_table(found)
    ]) + "\n"


def trained_table(trained: Sequence[Trained]) -> str:
    return table(
        ("training", "steps", "validation loss", "seconds", "ended early"),
        [(t.arm, t.step, f"{t.val_loss:.4f}", f"{t.seconds:.0f}", t.stopped or "no") for t in trained])


def last_table(found: Sequence[Drift]) -> str:
    return table(("pair", "format", "seed", "W1", "W1 / mean |A|", "max |A − B|", "mean |A − B|", "equal"),
                 [(*key, f"{d.wasserstein:.3g}", f"{d.relative:.3g}", f"{d.max_abs:.3g}", f"{d.mean_abs:.3g}",
                   f"{d.equal:.1%}") for key, v in series(found).items() for d in v[-1:]])


def groups_table(found: Sequence[Drift]) -> str:
    """Each group of weights in a line, each pair of the first seed in a column."""
    keys = list(dict.fromkeys((d.kind, d.label) for d in found))
    last = {
        (d.kind, d.label, d.name): d
        for d in reversed(found) if d.step == max(e.step for e in found if e.a == d.a and e.b == d.b)
    }
    names = list(dict.fromkeys(d.name for d in found))
    names.sort(key=lambda n: (n == "all", not n.startswith("h.") or n.count(".") > 1))
    return table(("weights", *(f"{k}, {label}" for k, label in keys)),
                 [(n, *(f"{last[*key, n].relative:.2g}" for key in keys)) for n in names])


def precisions(runs: pathlib.Path, trained: Sequence[Trained]) -> dict[str, Precision]:
    """Of each training, as its run folder says."""
    return {
        f"training {t.arm}": resolve(Run(runs / t.arm).config["train"]).resolved_precision()
        for t in trained
    }
