"""What the runs of study 1 say: tables, claims of arXiv 2510.04212 with their verdicts, figures.

Every sentence is made of measured values; each verdict follows the rules that the report states.
"""
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.deviation_report import TREND, tau
from cuflash.model.config import TrainConfig, resolve
from cuflash.model.limits import Limits
from cuflash.model.run import Run
from cuflash.model.study_arms import ALL_FP32, cure_of
from cuflash.model.study_failures import Bisected, Found, Timing
from cuflash.model.study_why import Audited, Why
from cuflash.model.trials import Arm, Study, Tally, merged
from cuflash.model.verdict import FAILS, TRAINS, UNDECIDED, Criterion, kaplan_meier
from cuflash.monte_carlo import Bias
from cuflash.precision import Precision
from cuflash.report import VERDICTS, Claim, table, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALIKE = 0.9  # mean |cosine| from which directions count as one
SPIKE = 2.0  # of the largest layer's spectral norm by the median layer's
SURE = 4.0  # standard errors
UNCLEAR = VERDICTS[3]
STATISTICS = """Runs of one seed have weights and batches in common in all arms. An arm takes seeds until Wald's
sequential test (failure rate 5 % or less against 50 % or more, either error 5 %) says *fails* or *trains*; what it
does not settle is *undecided*. Seeds count in their order, up to the first that has not ended. Intervals are
Wilson's, of 95 % for a number of runs fixed beforehand; the median step of failure is Kaplan and Meier's;
pairs with fp32 attention: runs that failed in this arm alone / in the other alone, with McNemar's exact p, and the
mean difference of the last loss where both trained, with its standard error and the sign test's p. As few runs as
the sequential test takes cannot make the exact tests significant; `--least` gives more."""
RULES = f"""Rules: a row of the isolation table is confirmed where its verdict is the paper's. It is undecided where the
two that it is measured by leave it open: *trains* proves nothing where low precision itself does not fail or fp32
attention does not train, *fails* nothing where fp32 attention does not train, and that a part trains nothing against
the paper where the whole does not fail. δ, its direction and its row are those of the layer where δ's low precision
adds most to W_Q's growth, and of its head with the largest |Σ|: such claims are on one place, not on all. A layer
stands out where its W_Q has {SPIKE:g} times the spectral norm of the median layer; terms have one direction where their
mean |cosine| is {ALIKE:g} or more; a sign is sure at {SURE:g} standard errors; a count rises where Kendall's tau with the
step is {TREND} or more."""


# ---- tables ---------------------------------------------------------------------------------------

def setting(config: TrainConfig, criterion: Criterion, study: Study) -> str:
    gpt = config.gpt()
    rows = [("model", f"{gpt.n_params():,} parameters: {gpt.n_layer} layers, {gpt.n_head} heads, width {gpt.n_embd}, "
                      f"context {gpt.block_size}, vocabulary {gpt.vocab_size}, bias {'yes' if gpt.bias else 'no'}"),
            ("batch", f"{config.batch_size * config.grad_accum} sequences, "
                      f"{config.batch_size * config.grad_accum * config.block_size:,} tokens"),
            ("steps", f"{config.steps:,}; {config.schedule} lr {config.lr:g} after {config.warmup_steps} of warm-up"),
            ("AdamW", f"β₁ {config.beta1:g}, β₂ {config.beta2:g}, weight decay {config.weight_decay:g}, clip "
                      f"{config.grad_clip:g}"),
            ("data", config.data), ("seeds", ", ".join(map(str, study.seeds))),
            ("failure", criterion.text + ("; it then ends" if study.stop_early else "; it goes on to the last step"))]
    return "## Setting\n\n" + table(("", ""), rows) + "\n" + STATISTICS + "\n"


def arms_table(tallies: Sequence[Tally], alone: Mapping[str, float] | None = None) -> str:
    """A line for each arm; `alone`: milliseconds of a step where nothing else ran."""
    return table(
        ("arm", "options", "the paper", "verdict", "failed", "95 %", "median failure", "last loss", "pairs", "p",
         "Δ last loss", "p", "ms a step" + ("" if alone is None else ", alone")),
        [(t.arm, f"`{t.options}`", t.paper, f"**{t.verdict}**", f"{t.failures}/{t.runs}",
          f"{t.low:.0%} to {t.high:.0%}", f"step {t.onset:.0f}" if math.isfinite(t.onset) else "",
          pm(t.loss, t.loss_sd), *_pairs(t),
          number((alone or {}).get(t.arm, math.nan) if alone is not None else t.ms, ".3g")) for t in tallies])


def _pairs(t: Tally) -> tuple[str, ...]:
    if not t.against:
        return ("", "", "", "")
    return (f"{t.only_this} / {t.only_other}", number(t.p, ".2g"), pm(t.difference, t.difference_se, "+.4f"),
            number(t.p_loss, ".2g") if math.isfinite(t.difference) else "")


def number(x: float, format: str) -> str:
    return "" if math.isnan(x) else f"{x:{format}}"


def pm(mean: float, spread: float, format: str = ".4f") -> str:
    """Never a mean without its spread."""
    return "" if math.isnan(mean) else f"{mean:{format}} ± " + (f"{spread:.2g}" if math.isfinite(spread) else "?")


def left(lines: Sequence[str]) -> str:
    """What is undecided."""
    if not lines:
        return ""
    return ("## Undecided\n\nThe same command goes on where time was over:\n\n"
            + "".join(f"- {line}\n" for line in lines))


def limits_table(rows: Sequence[Limits]) -> str:
    def at(x: float) -> str:
        return f"{x:.4g}" if math.isfinite(x) else "nowhere"
    return table(("fix", "row maxima", "P̄ = 1 all the same up to", "O = 0 from", "O not finite from"),
                 [(f"`{r.fix}`", r.side, at(r.inert), at(r.zero), at(r.nan)) for r in rows])


def figure(name: str, caption: str) -> str:
    return f"![{caption}]({name}.png)\n\n*{caption}*\n"


@dataclass(frozen=True)
class Ranking:
    """A cure over the settings (precision, rate) in which low precision fails and fp32 attention trains.

    `cost`: time of a step by that of low precision, mean over the settings; NaN where none was taken.
    """

    cure: str
    trains: int
    fails: int
    settings: int
    cost: float


def cure_ranking(found: Found, alone: Mapping[str, float]) -> list[Ranking]:
    """The cures that train in most settings first, of these the cheapest; none where nothing fails."""
    verdicts = {t.arm: t.verdict for t in found.tallies}
    groups: dict[str, dict[str, str]] = {}
    for a in found.arms:
        if a.low:
            groups.setdefault(a.low, {})[cure_of(a.name)] = a.name
    open_ = {low: arms for low, arms in groups.items()
             if (verdicts.get(low), verdicts.get(arms.get(ALL_FP32, ""))) == (FAILS, TRAINS)}
    rows = []
    for cure in dict.fromkeys(c for arms in open_.values() for c in arms):
        mine = [(low, arms[cure]) for low, arms in open_.items() if cure in arms]
        words = [verdicts[name] for _, name in mine]
        costs = [alone.get(name, math.nan) / alone.get(low, math.nan) for low, name in mine]
        rows.append(Ranking(cure, words.count(TRAINS), words.count(FAILS), len(words), sum(costs) / len(costs)))
    return sorted(rows, key=lambda r: (-r.trains, r.fails, r.cost if math.isfinite(r.cost) else math.inf))


def ranking_table(rows: Sequence[Ranking]) -> str:
    if not rows:
        return ("## Cures\n\nIn no setting does low precision fail and fp32 attention train, so there is nothing to "
                "cure.\n")
    return ("## Cures\n\nOver the settings in which low precision fails and fp32 attention trains; the cheapest of "
            "those that train in most of them first.\n\n"
            + table(("cure", "trains", "fails", "settings", "time of a step by low precision's"),
                    [(r.cure, r.trains, r.fails, r.settings, number(r.cost, ".3f")) for r in rows]))


# ---- figures of arms ------------------------------------------------------------------------------

def arm_figures(found: Found, folder: pathlib.Path, prefix: str) -> "dict[str, Figure]":
    """Curves, rates and survival of a study's arms."""
    from cuflash import plot_why
    there = {a.name: found.of(a.name) for a in found.arms if found.of(a.name)}
    if not there:
        return {}
    runs = {n: [columns(Run(folder / t.folder), "step", "loss") for t in trials] for n, trials in there.items()}
    figures = {f"{prefix}_curves": plot_why.curves(runs, {n: [t.failed for t in ts] for n, ts in there.items()}),
               f"{prefix}_rates": plot_why.rates(found.tallies)}
    lines = {n: [(s.step, s.share) for s in kaplan_meier([t.onset if t.failed else t.step for t in ts],
                                                          [t.failed for t in ts])] for n, ts in there.items()}
    if any(lines.values()):
        last = max(max(t.step, t.onset) for ts in there.values() for t in ts)
        figures[f"{prefix}_survival"] = plot_why.survival({n: p for n, p in lines.items() if p}, last)
    return figures


def arm_captions(found: Found, figures: Mapping[str, Any], prefix: str, paper: str = "") -> str:
    captions = {"curves": f"Loss of each run{paper}; dashed: a run that fails.",
                "rates": "Share of the runs that fail, with 95 % intervals.",
                "survival": "Share of the runs that have not failed, over the steps; arms that never do are left out."}
    return "\n".join(figure(f"{prefix}_{n}", text) for n, text in captions.items() if f"{prefix}_{n}" in figures)


def columns(run: Run, *names: str) -> dict[str, np.ndarray]:
    rows = run.metrics
    return {name: np.array([row[name] for row in rows]) for name in names}


# ---- claims ---------------------------------------------------------------------------------------

def said(t: Tally) -> str:
    onset = f", median from step {t.onset:.0f}" if math.isfinite(t.onset) else ""
    return f"{t.arm} {t.verdict} ({t.failures} of {t.runs} runs failed{onset})"


def outcome_claims(found: Found, figure: str) -> list[Claim]:
    """The paper's word on each arm that it has one on, against the verdict."""
    if len(found.tallies) < 2:
        return []
    base, reference, *others = found.tallies
    claims = [_pair_claim(base, reference)] if figure == "2, 7" else []
    fails, trains = base.verdict == FAILS, reference.verdict == TRAINS
    for t in others:
        if not t.paper:
            continue
        # A failure shows something where fp32 attention trains; a run that trains, where low precision fails, too.
        vacuous = not trains or not fails and TRAINS in (t.paper, t.verdict)
        nothing = "nothing to cure was shown" if t.paper == TRAINS else "no failure of low precision was shown"
        claims.append(Claim(
            figure, f"{t.arm}: {t.paper}", said(t),
            UNCLEAR if vacuous or t.verdict == UNDECIDED else VERDICTS[0] if t.verdict == t.paper else VERDICTS[2],
            f"{said(base)} and {said(reference)}: {nothing}" if vacuous else t.note))
    return claims


def _pair_claim(base: Tally, reference: Tally) -> Claim:
    unclear = UNDECIDED in (base.verdict, reference.verdict)
    return Claim("2", "low-precision attention fails where attention in fp32 trains, on the same batches",
                 f"{said(base)}; {said(reference)}",
                 UNCLEAR if unclear else verdict([(base.verdict, reference.verdict) == (FAILS, TRAINS)]),
                 f"of {base.pairs} seeds that both have {base.only_this} fail in low precision alone, "
                 f"{base.only_other} in fp32 alone")


def audit_claims(a: Audited) -> list[Claim]:
    """Claims 1 to 3 of the paper on a failing run."""
    layer, head = a.terms[0].layer, a.terms[0].head
    mine = [r for r in a.delta if (r.layer, r.head) == (layer, head)]
    whole = [r for r in a.delta if (r.layer, r.head) == (layer, -1)]
    claims = [Claim(
        "5, 12", "the errors of δ are positive on the mean, at every step before the failure",
        f"layer {layer}, head {head}: " + "; ".join(f"step {r.step}: mean {r.mean:+.2e} ± {r.se:.1e}, "
                                                    f"{r.positive:.0%} positive" for r in mine),
        verdict(r.z >= SURE for r in mine),
        "all heads of the layer: Σ " + ", ".join(f"{r.sum:+.1e}" for r in whole)),
        Claim("5", "and they make W_Q grow",
              "what δ's low precision adds to −uᵀ·dW_Q·v, by ‖dW_Q‖: " + ", ".join(f"{r.growth:+.2e}" for r in whole),
              verdict(r.growth > 0 for r in whole),
              f"W_Q's largest singular value in layer {layer}: " + ", ".join(f"{r.sigma:.3g}" for r in whole)),
        Claim("4", "the terms (PK)[T]ᵀX[T] have one direction, over tokens and over steps",
              "mean |cosine| of the most wrong tokens: " + ", ".join(f"step {t.step} {t.cosine:.2f}" for t in a.terms)
              + (f"; of two states {min(abs(x.cosine) for x in a.likeness):.2f} to "
                 f"{max(abs(x.cosine) for x in a.likeness):.2f}" if a.likeness else ""),
              verdict([*(t.cosine >= ALIKE for t in a.terms), *(abs(x.cosine) >= ALIKE for x in a.likeness)]),
              "effective rank of " + ", ".join(f"{t.tokens} terms {t.rank:.1f}" for t in a.terms[-1:]))]
    return [*claims, _spectral_claim(a)]


def _spectral_claim(a: Audited) -> Claim:
    last = a.states[-1] + 1
    sigma = {r.layer: r.sigma for r in a.delta if r.head < 0 and r.step == last}
    middle = float(np.median(list(sigma.values())))
    top = max(sigma, key=lambda layer: sigma[layer])
    return Claim("3, 11", "before the failure W_Q of one layer, the second, has an outlying spectral norm",
                 f"step {last}: " + ", ".join(f"L{i} {s:.3g}" for i, s in sigma.items()),
                 verdict([sigma[top] >= SPIKE * middle, top == 1]),
                 f"largest in layer {top} (layers count from 0), {sigma[top] / middle:.2g} times the median")


def touched_claim(run: Run, name: str, onset: int) -> Claim:
    """Figure 13: how many rows have ties, in low precision without a fix; onset: of its failure, -1 where it trains."""
    paper = "rows with tied maxima become more before the failure"
    rows = [r for r in run.metrics if onset < 0 or r["step"] < onset]
    if len(rows) < 2:
        return Claim("13", paper, f"{name}: {len(rows)} logged steps before step {onset}", UNCLEAR, "it fails too soon")
    steps, share = [r["step"] for r in rows], [r["ties"] / r["rows"] for r in rows]
    trend = tau(steps, share)
    measured = (f"{name}: {share[0]:.2%} of the rows at step {steps[0]:.0f}, {share[-1]:.2%} at step {steps[-1]:.0f}, "
                f"tau {trend:+.2f}")
    if onset < 0:
        return Claim("13", paper, measured, UNCLEAR, "this run does not fail")
    return Claim("13", paper, measured, verdict([trend >= TREND]),
                 "of all layers and heads in a step; scores rounded to few bits are equal more often as they grow")


def bias_claim(rows: Sequence[Bias], precision: str) -> Claim:
    """Claim 3: two keys or more at P̄ = 1, V negative, a small rest of the same sign."""
    mine = [b for b in rows if b.precision == precision and b.x == "o_bar" and 0 < b.rest <= 1e-4]
    two, one = [b for b in mine if b.ties >= 2], [b for b in mine if b.ties == 1]
    return Claim("6, claim 3", "two keys or more at P̄ = 1 and negative V make the error of Ō negative, one key does not",
                 f"mean error in ulp, {precision}, rest up to 1e-4: " + ", ".join(
                     f"{n} keys {np.mean([b.mean for b in two if b.ties == n]):+.3f}"
                     for n in sorted({b.ties for b in two}))
                 + f"; one key {np.mean([b.mean for b in one]):+.3f}",
                 verdict([*(b.mean <= -SURE * b.se for b in two), *(b.mean > -SURE * b.se for b in one)]),
                 "ties that the rest of the row turns away from zero (`cuflash audit --monte-carlo`)")


def limits_claim(rows: Sequence[Limits]) -> Claim:
    mine = [r for r in rows if r.fix.startswith("qiu") and r.side == "above 0"]
    lost = [r for r in mine if math.isfinite(r.nan)]
    return Claim("App. C", "β too large underflows, too near 1 rounds back to 1",
                 ("NaN from a tied maximum of " + ", ".join(f"{r.nan:.3g} ({r.fix})" for r in lost)) if lost else
                 "no NaN at any tied maximum",
                 verdict([bool(lost), any(r.inert > 0.1 for r in mine)]),
                 "a largest |r_m| at which nothing changes: "
                 + ", ".join(f"{r.inert:.2g} ({r.fix})" for r in mine[:3]))


# ---- whole reports --------------------------------------------------------------------------------

Report = tuple[list[Claim], str, "dict[str, Figure]"]


def arms_report(study: Study, found: Found, prefix: str, claims: list[Claim],
                alone: Sequence[Timing] | None = None, more: str = "") -> Report:
    """Of a study that is arms and nothing else: isolate, sweep, cures."""
    figures = arm_figures(found, study.folder, prefix)
    times = None if alone is None else {t.arm: t.ms for t in alone}
    body = [setting(resolve(study.common), study.criterion, study), *([RULES] if claims else []), "## Arms",
            *found.notes, arms_table(found.tallies, times), arm_captions(found, figures, prefix), more,
            left(study.left)]
    return claims, "\n\n".join(filter(None, body)) + "\n", figures


def why_report(study: Study, w: Why) -> Report:
    from cuflash import plot, plot_why
    from cuflash.dump import read
    base = w.trainings.arms[0].name
    figures = arm_figures(w.trainings, study.folder, "figure_2_7")
    claims = outcome_claims(w.trainings, "2, 7")
    body = [setting(resolve(study.common), study.criterion, study), RULES, *w.notes,
            "## One sum (§ 3.3)", f"```\n{w.example}\n```", "## Trainings (figures 2 and 7)",
            arms_table(w.trainings.tallies), arm_captions(w.trainings, figures, "figure_2_7", " (figures 2 and 7)")]
    firsts = {a.name: Run(study.folder / ts[0].folder) for a in w.trainings.arms if (ts := w.trainings.of(a.name))}
    if firsts:
        names = ("step", "loss", "ties", "changed", "rows")
        figures["figure_13"] = plot_why.touched({n: columns(r, *names) for n, r in firsts.items()})
        body.append(figure("figure_13", "Rows of attention with tied maxima, and those the fix changes, beside the "
                                        "loss; the first seed of each arm (figure 13)."))
    if mine := w.trainings.of(base):
        trial = next((t for t in mine if t.failed), mine[0])
        claims.append(touched_claim(Run(study.folder / trial.folder), f"{base}, seed {trial.seed}", trial.onset))
    if w.isolated is not None and w.isolated.tallies:
        figures |= arm_figures(w.isolated, study.folder, "isolation")
        claims += outcome_claims(w.isolated, "§ 3.2")
        body += ["## Isolation (§ 3.2)", *w.isolated.notes, arms_table(w.isolated.tallies),
                 arm_captions(w.isolated, figures, "isolation")]
    if w.audited is not None:
        a = w.audited
        claims += audit_claims(a)
        layers, p = Run(a.run).layers, a.place
        figures |= {
            **({"figure_3_11": plot.spectral(layers.steps, layers)} if len(layers) else {}), "figure_5": plot_why.delta_sums(a.delta),
            "figure_4": plot_why.terms(a.shown), "figure_5_12": _error_maps(study.folder, p.layer, p.head, p.sample),
            "figure_6": plot.row(read(study.folder / "row.h5"), query=p.query, feature=p.feature, layer=p.layer,
                                 sample=p.sample, head=p.head)}
        body += [
            f"## A run that fails: {a.run.relative_to(study.folder)}, from step {a.onset}",
            f"States of steps {', '.join(map(str, a.states))}.",
            figure("figure_3_11", "Spectral norm of each weight over the steps, of W_Q by head (figures 3 and 11).")
            if "figure_3_11" in figures else "The run has measured no spectral norms (`spectral_every`), figures 3 and 11.",
            figure("figure_5", "δ's error summed over the tokens of a state, and over the states (figure 5a)."),
            figure("figure_5_12", "δ's error by token, O's and dO by feature (figures 5 and 12)."),
            figure("figure_4", "PK, X and their rank-1 term at the token with the largest error (figure 4)."),
            figure("figure_6", "A row of P̄, a column of V, and the running error of Ō (figure 6)."),
            table(("step", "cosine", "effective rank", "of"), [(t.step, f"{t.cosine:.3f}", f"{t.rank:.2f}", t.tokens)
                                                              for t in a.terms])]
    if w.bias:
        claims += [bias_claim(w.bias, w.bias[0].precision), limits_claim(w.limits)]
        figures["bias"] = plot.bias(w.bias)
        body += ["## Bias and limits (§ 3.3, § 4, appendix C)",
                 figure("bias", "Mean error of Ō and O against the rest of the row, by the number of keys at P̄ = 1."),
                 f"Two tied keys at a row maximum, {w.limits[0].precision}, no training:", limits_table(w.limits)]
    if w.cures is not None and w.cures.tallies:
        body += ["## Cures, in short", arms_table(w.cures.tallies)]
    body.append(left(study.left))
    return claims, "\n\n".join(filter(None, body)) + "\n", figures


def _error_maps(folder: pathlib.Path, layer: int, head: int, sample: int) -> "Figure":
    from cuflash import plot
    from cuflash.audit_map import read_maps
    maps, _ = read_maps(folder / "errors.h5")
    return plot.error_maps(maps[layer][0], layer=layer, head=head, sample=sample)


def bisect_report(study: Study, b: Bisected) -> Report:
    from cuflash import plot_why
    lines = [f"- minimal {kind} set: " + (f"**{subset}**" if subset else f"none: {b.why.get(kind, 'not looked for')}")
             for kind, subset in (("failing", b.failing), ("saving", b.saving))]
    body = [f"The run {b.run} fails from step {b.onset}; states of steps {', '.join(map(str, b.states))}.",
            *lines, f"- runs: {b.runs}", "## Screening",
            "Each site alone, in fp32 in the run's precision and low in fp32 attention, on the same q, k, v and dO; the "
            "layer where it adds most.",
            table(("site", "layer", "growth of W_Q", "Σ δ", "one sign"),
                  [(r.site, r.layer, f"{r.growth:+.2e}", f"{r.delta:+.1e}", f"{r.agree:.0%}") for r in b.ranked]),
            figure("screening", "What each site alone adds."), "## Sets that were tried",
            study.criterion.text[0].upper() + study.criterion.text[1:] + ". Forks of the first state, each on batches "
            "of its own; `failing`: these sites low and the rest of attention fp32, `saving`: these in fp32.",
            table(("looked for", "set", "verdict", "failed"), [(d.kind, d.set, f"**{d.verdict}**",
                                                                f"{d.failures}/{d.runs}") for d in b.decisions]),
            left(study.left)]
    text = "\n".join(body[:4]) + "\n\n" + "\n\n".join(filter(None, body[4:])) + "\n"
    return [], text, {"screening": plot_why.screening(b.ranked)}


# ---- for the reproduce block ----------------------------------------------------------------------

def precisions(common: Mapping[str, Any], arms: Iterable[Arm]) -> dict[str, Precision]:
    return {a.name: resolve({k: v for k, v in merged(common, a.options).items() if k != "fork"}).resolved_precision()
            for a in arms}


def data_sha256(folder: pathlib.Path, found: Iterable[Found]) -> dict[str, str]:
    """Of what the runs were trained on.

    Raises:
        ValueError: runs of one folder have seen different data of one name.
    """
    shas: dict[str, str] = {}
    for t in (t for f in found for t in f.trials):
        data = Run(folder / t.folder).config["data"]
        if shas.setdefault(data["name"], data["sha256"]) != data["sha256"]:
            raise ValueError(f"{folder / t.folder} was trained on other data of the name {data['name']}: SHA-256 "
                             f"{data['sha256'][:12]}, others {shas[data['name']][:12]}")
    return shas
