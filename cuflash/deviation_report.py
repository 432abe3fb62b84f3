"""What the rows of `deviation` say of the claims of arXiv 2405.02803, section by section of a report.

Every sentence is made of measured values; each verdict follows the rule that stands beside its claim.
"""
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cuflash.deviation import EMULATIONS, GROUPS, LENGTH_FORMATS, SHAPES, TILE_FORMATS, Options, Row
from cuflash.report import Claim, table, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_FORMATS = ("bf16", "fp16", "fp32", "fp64")
ABOUT_TEN = (5.0, 20.0)  # a ratio that counts as "about 10 times"
TREND = 0.5              # a rank correlation (Kendall's tau) that counts as a trend
RULES = f"""Rules: "about 10 times" is a ratio of {ABOUT_TEN[0]:g} to {ABOUT_TEN[1]:g}; growing and
shrinking are Kendall's tau of at least {TREND} and at most −{TREND} over all draws; a ratio is that of the
largest errors, its mean over draws the geometric one. A claim holds in part where it does for some inputs
or formats."""


def where(rows: Iterable[Row], **fields: object) -> list[Row]:
    """Rows whose fields have these values."""
    return [r for r in rows if all(getattr(r, name) == value for name, value in fields.items())]


def mean_of(rows: Sequence[Row], measure: str) -> float:
    """Mean over draws."""
    return float(np.mean([getattr(r, measure) for r in rows])) if rows else math.nan


def ratio_of(rows: Sequence[Row]) -> float:
    """Geometric mean over draws of flash's largest error by plain's; NaN where one has no logarithm."""
    ratios = np.array([r.ratio for r in rows])
    good = len(ratios) and np.isfinite(ratios).all() and ratios.all()
    return float(np.exp(np.log(ratios).mean())) if good else math.nan


def tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's rank correlation over the pairs whose x differ; 0 where there are none. Equal y count 0."""
    dx, dy = (np.sign(np.subtract.outer(v, v)) for v in (np.asarray(x, float), np.asarray(y, float)))
    pairs = np.count_nonzero(dx)
    return float((dx * dy).sum() / pairs) if pairs else 0.0


def inputs_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(r.input for r in rows))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The claims of figures 3 to 6; one is left out where its rows are not there."""
    by_figure = {f: where(rows, figure=f) for f in ("3-4", "5", "6", "sites")}
    found: list[Claim] = []
    formats = {r.format for r in by_figure["3-4"]}
    if len(formats.intersection(PAPER_FORMATS)) > 1:
        found.append(_formats(by_figure["3-4"]))
    if "bf16" in formats:
        found += [_ten_times(by_figure["3-4"], by_figure["5"], by_figure["sites"]),
                  _running_fp32(by_figure["3-4"])]
    if by_figure["5"]:
        found.append(_lengths(by_figure["5"]))
    if by_figure["6"]:
        found += [_areas(by_figure["6"]), _swapped(by_figure["6"]), _square(by_figure["6"])]
    return found


def _formats(rows: Sequence[Row]) -> Claim:
    falls, said, rises = [], [], []
    there = [f for f in PAPER_FORMATS if where(rows, format=f, emulation="per-tile")]
    for kind in inputs_of(rows):
        mine = where(rows, input=kind, emulation="per-tile")
        means = [mean_of(where(mine, format=f), "flash_plain_max") for f in there]
        falls.append(all(a > b for a, b in zip(means, means[1:])))
        said.append(f"{kind}: " + " > ".join(f"{m:.2g}" for m in means))
        for e in EMULATIONS:
            order = sorted({(r.mantissa_bits, r.format) for r in where(rows, input=kind, emulation=e)})
            values = [
                mean_of(where(rows, input=kind, emulation=e, format=f), "flash_plain_max") for _, f in order
            ]
            rises += [f"{kind}, {e}: {f} after {g}" for (b, f), (c, g), x, y in
                      zip(order[1:], order, values[1:], values) if b > c and not x < y]
    why = ("each further bit of mantissa halves a rounding" if not rises
           else "among the other formats it rises at " + "; ".join(rises))
    return Claim("3", f"max |flash − plain| falls with the bits of the format ({', '.join(there)})",
                 "per-tile, " + "; ".join(said), verdict(falls), why)


def _ten_times(rows: Sequence[Row], lengths: Sequence[Row], sites: Sequence[Row]) -> Claim:
    kinds = inputs_of(rows)
    ratios = {k: ratio_of(where(rows, input=k, format="bf16", emulation="per-tile")) for k in kinds}
    held = {k: ABOUT_TEN[0] <= r <= ABOUT_TEN[1] for k, r in ratios.items()}
    tiles = {k: where(rows, input=k)[0].tiles for k in kinds}
    why = "the factor belongs to the number of key tiles and to the inputs, not to bf16"
    at = {k: [(n, ratio_of(where(lengths, input=k, format="bf16", emulation="per-tile", tiles=n)))
              for n in sorted({r.tiles for r in lengths})] for k in inputs_of(lengths)}
    if at:
        why += ": " + "; ".join(f"{k} " + ", ".join(f"{r:.1f}" for _, r in series)
                                for k, series in at.items())
        why += " with " + ", ".join(str(n) for n, _ in next(iter(at.values()))) + " tiles"
    if sites:
        why += ". " + _sites_sentence(sites)
    return Claim("4", "at bf16 flash attention's largest error is about 10 times plain attention's",
                 "per-tile: " + ", ".join(f"{k} {r:.1f} ({tiles[k]} tiles)" for k, r in ratios.items()),
                 verdict(held.values()), why)


def _sites_sentence(sites: Sequence[Row]) -> str:
    """What the running row sum and Ō in fp32 leave of the ratio."""
    ratios = {g: [ratio_of(where(sites, input=k, fp32=g)) for k in inputs_of(sites)] for g in GROUPS}
    said = {g: ", ".join(f"{r:.1f}" for r in values) for g, values in ratios.items()}
    both = "l, o_scaled, o_acc"
    found = (f"With l in fp32 alone it is {said['l']}, with Ō in fp32 alone {said['o_scaled, o_acc']}, with "
             f"both {said[both]} ({', '.join(inputs_of(sites))})")
    if all(a < b / 1.5 for a, b in zip(ratios[both], ratios["none"]) if b > ABOUT_TEN[0] / 2):
        found += ": it is rounding these two for each tile that costs"
    return found


def _running_fp32(rows: Sequence[Row]) -> Claim:
    ratios = {k: ratio_of(where(rows, input=k, format="bf16", emulation="fa2")) for k in inputs_of(rows)}
    more = [r > 1 for r in ratios.values()]
    return Claim(
        "4",
        "where running values stay in fp32, as in FlashAttention-2's kernels, it still errs more than plain",
        "fa2: " + ", ".join(f"{k} {r:.2f}" for k, r in ratios.items()), verdict(more),
        "plain attention rounds S, softmax and O, FlashAttention-2 only P̄ and O: it is the more exact one"
        if not any(more) else "S is not rounded, P̄ and O are, as in plain attention")


def _lengths(rows: Sequence[Row]) -> Claim:
    found, spread = {}, {}
    for k in inputs_of(rows):
        for f in LENGTH_FORMATS:
            mine = where(rows, input=k, format=f, emulation="per-tile")
            found[k, f] = tau([r.length for r in mine], [r.flash_plain_max for r in mine])
            spread[k, f] = tau([r.length for r in mine], [r.ratio for r in mine])
    kinds = inputs_of(rows)
    fa2 = {}
    for k in kinds:
        mine = where(rows, input=k, format="bf16", emulation="fa2")
        fa2[k] = tau([r.length for r in mine], [r.flash_plain_max for r in mine])
    ends = min(r.length for r in rows), max(r.length for r in rows)
    outputs = {k: [mean_of(where(rows, input=k, length=n), "golden_std") for n in ends] for k in kinds}
    why = ("O itself changes with the length: its standard deviation goes "
           + ", ".join(f"for {k} from {a:.2g} to {b:.2g}" for k, (a, b) in outputs.items())
           + "; in units of plain attention's own error the deviation grows: tau "
           + "; ".join(f"{k} {f} {t:+.2f}" for (k, f), t in spread.items())
           + ". fa2 at bf16: " + ", ".join(f"{k} {t:+.2f}" for k, t in fa2.items()))
    return Claim("5", "max |flash − plain| grows with the length, tiles held",
                 "per-tile, tau: " + "; ".join(f"{k} {f} {t:+.2f}" for (k, f), t in found.items()),
                 verdict(t >= TREND for t in found.values()), why)


def _areas(rows: Sequence[Row]) -> Claim:
    found = {}
    for k in inputs_of(rows):
        for f in TILE_FORMATS:
            mine = where(rows, input=k, format=f, emulation="per-tile", shape="square")
            found[k, f] = tau([r.tile_keys for r in mine], [r.flash_plain_max for r in mine])
    held = [f"{k} {f} {t:+.2f}" for (k, f), t in found.items() if t <= -TREND]
    not_held = [f"{k} {f} {t:+.2f}" for (k, f), t in found.items() if t > -TREND]
    why = "fewer tiles, fewer roundings of l and Ō"
    if not_held:
        wide = [ratio_of(where(rows, input=k, format="fp32", emulation="per-tile", shape="square"))
                for k in inputs_of(rows)]
        why += ("; no trend in " + ", ".join(not_held)
                + ": at fp32 nothing is rounded but sums, and plain attention's, over all keys at once, "
                "err more (flash / plain " + ", ".join(f"{r:.2f}" for r in wide) + ")")
    return Claim("6c", "larger tiles, smaller max |flash − plain|",
                 "per-tile, tau: " + (", ".join(held) or "none"),
                 verdict(t <= -TREND for t in found.values()), why)


def _swapped(rows: Sequence[Row]) -> Claim:
    shares: dict[str, tuple[float, float]] = {}
    for f in TILE_FORMATS:
        mine = where(rows, format=f, emulation="per-tile")
        wide, tall = ({(r.input, _area(r), r.draw): r.flash_plain_max for r in where(mine, shape=shape)}
                      for shape in ("wide", "tall"))
        shares[f] = (float(np.mean([tall[key] > wide[key] for key in wide])),
                     float(np.mean([tall[key] < wide[key] for key in wide])))
    said = ", ".join(f"{f} {a:.0%} / {b:.0%}" for f, (a, b) in shares.items())
    return Claim("6a", "the two dimensions swapped (more query rows, fewer keys), larger difference",
                 f"per-tile, larger / smaller in: {said}",
                 verdict(a - b >= TREND for a, b in shares.values()),
                 "swapping changes the number of keys of a tile, and with it the number of tiles; nothing "
                 "else of it reaches the result")


def _square(rows: Sequence[Row]) -> Claim:
    same = total = 0
    alike: dict[tuple[object, ...], list[Row]] = {}
    for r in rows:
        alike.setdefault((r.input, r.format, r.emulation, r.tile_keys, r.draw), []).append(r)
    for group in alike.values():
        numbers = [(r.flash_plain_max, r.flash_golden_mean) for r in group]
        total += len(numbers) - 1
        same += numbers[1:].count(numbers[0])
    return Claim("6b", "square tiles have no effect of their own",
                 f"{same} of {total} pairs of tiles with as many keys, square or not, give the same numbers "
                 "to the last bit", verdict([0 < same == total]),
                 "rows of a tile do not meet; the number of query rows changes no bits")


def _area(r: Row) -> int:
    return r.tile_rows * r.tile_keys


# ---- tables ---------------------------------------------------------------------------------------

def ratios_table(rows: Sequence[Row]) -> str:
    """Figure 4 as numbers: largest errors and their ratio, by input and format."""
    rows = where(rows, figure="3-4")
    lines = []
    for k in inputs_of(rows):
        for f in dict.fromkeys(r.format for r in where(rows, input=k)):
            here = where(rows, input=k, format=f)
            cells = [f"{mean_of(here, 'plain_golden_max'):.3g}"]
            for e in EMULATIONS:
                mine = where(here, emulation=e)
                cells += [f"{mean_of(mine, 'flash_golden_max'):.3g}", _ratio(ratio_of(mine))]
            lines.append((k, f, *cells))
    return table(("input", "format", "plain", "flash, per-tile", "ratio", "flash, fa2", "ratio"), lines)


def others_table(rows: Sequence[Row]) -> str:
    """Ratios of further precisions."""
    rows = [r for r in where(rows, figure="3-4") if r.emulation not in EMULATIONS]
    names = list(dict.fromkeys(r.emulation for r in rows))
    lines = [(k, *(_ratio(ratio_of(where(rows, input=k, emulation=n))) for n in names))
             for k in inputs_of(rows)]
    return table(("input", *names), lines) if names else ""


def sites_table(rows: Sequence[Row]) -> str:
    """The ratio at bf16 with single sites in fp32."""
    rows = where(rows, figure="sites")
    kinds = inputs_of(rows)
    return table(("in fp32", *kinds), [
        (", ".join(GROUPS[g]) or "nothing", *(_ratio(ratio_of(where(rows, input=k, fp32=g))) for k in kinds))
        for g in GROUPS])


def lengths_table(rows: Sequence[Row]) -> str:
    """Figure 5 at bf16: max, mean and standard deviation of flash − plain, and the ratio to golden."""
    rows = where(rows, figure="5", format="bf16")
    columns = [f"{e}: {m}" for e in EMULATIONS for m in ("max", "mean", "std", "ratio")]
    lines = []
    for k in inputs_of(rows):
        for n in sorted({r.length for r in rows}):
            here = where(rows, input=k, length=n)
            cells: list[object] = [k, n, here[0].tiles]
            for e in EMULATIONS:
                mine = where(here, emulation=e)
                cells += [f"{mean_of(mine, f'flash_plain_{m}'):.2g}" for m in ("max", "mean", "std")]
                cells.append(_ratio(ratio_of(mine)))
            lines.append(cells)
    return table(("input", "length", "tiles", *columns), lines)


def tiles_table(rows: Sequence[Row]) -> str:
    """Figure 6, per-tile: max |flash − plain| by area and shape."""
    rows = where(rows, figure="6", emulation="per-tile")
    areas = sorted({_area(r) for r in rows})
    lines = []
    for k in inputs_of(rows):
        for f in (f for f in TILE_FORMATS if where(rows, input=k, format=f)):
            for s in SHAPES:
                mine = where(rows, input=k, format=f, shape=s)
                means = [mean_of([r for r in mine if _area(r) == a], "flash_plain_max") for a in areas]
                lines.append((k, f, s, *(f"{mean:.2g}" for mean in means)))
    return table(("input", "format", "tile", *(f"area {a}" for a in areas)), lines)


def _ratio(x: float) -> str:
    return f"{x:.2f}" if math.isfinite(x) else "–"


# ---- a report's part ------------------------------------------------------------------------------

CAPTIONS = {
    "figure_3": "Largest difference of flash and plain attention of one format (the paper's figure 3).",
    "figure_4": "Largest error against fp64, and its ratio; lines at 1 and at the paper's 10 (figure 4).",
    "figure_5": "Over the length, tiles held (figure 5). Bars reach over the draws.",
    "figure_6": "Over the tile's area, of three shapes (figure 6).",
    "figure_sites": "What is left of the ratio at bf16 when single sites are kept in fp32.",
}


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Each figure whose rows are there."""
    from cuflash import plot_study
    there = {r.figure for r in rows}
    needed = {"figure_3": "3-4", "figure_4": "3-4", "figure_5": "5", "figure_6": "6", "figure_sites": "sites"}
    return {name: getattr(plot_study, name)(rows) for name, figure in needed.items() if figure in there}


def sections(rows: Sequence[Row], o: Options, seconds: float) -> str:
    """Figures and tables as Markdown; the figures lie beside it."""
    from cuflash.plot_study import LABELS
    there = {r.figure for r in rows}
    promise = {"library": ", BLAS: its last bits are nobody's promise.",
               "auto": ": BLAS on a CPU, whose last bits are nobody's promise, on a GPU its tensor core."}
    accumulator = f"Products are summed by `{o.accumulator}`" + promise.get(
        o.accumulator, ", exp is `defined`: every machine has these bits, and so these numbers; but not those of "
        "fp64, which BLAS sums.")
    parts = ["## Microbenchmark", f"""Queries {o.queries}, head dim {o.head_dim}, {o.draws} draws, tiles of
{o.tile} × {o.tile} and {o.length} keys where they are not varied. Inputs: normal, uniform on [0, 1), heavy
(Student's t, 3 degrees of freedom, variance 1), and activations where a training's were dumped (its own
length, head dim and mask). They are rounded to the format first, and golden is plain attention in fp64
of the rounded ones. `per-tile`: {LABELS['per-tile']}; `fa2`: {LABELS['fa2']}.
{accumulator} It took {seconds:.0f} s.""", RULES]
    if "3-4" in there:
        parts += [_image("figure_3"), _image("figure_4"), ratios_table(rows)]
        if others := others_table(rows):
            parts += ["Other precisions, ratio of the largest errors:", others]
    if "sites" in there:
        parts += [_image("figure_sites"), sites_table(rows)]
    if "5" in there:
        parts += [_image("figure_5"), "flash − plain at bf16:", lengths_table(rows)]
    if "6" in there:
        parts += [_image("figure_6"), "max |flash − plain|, per-tile:", tiles_table(rows)]
    return "\n\n".join(parts) + "\n"


def _image(name: str) -> str:
    return f"![{CAPTIONS[name]}]({name}.png)\n\n*{CAPTIONS[name]}*"
