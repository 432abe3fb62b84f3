"""`cuflash study why | isolate | bisect | sweep | cures`: why low-precision training fails (arXiv 2510.04212)."""
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from cuflash.cli.main import INTERRUPTED, user_errors
from cuflash.cli.numbers import numbers
from cuflash.cli.outputs import OUT_FOLDER

if TYPE_CHECKING:
    from cuflash.model.run import Run
    from cuflash.model.study_failures import Found
    from cuflash.model.trials import Arm, Study

FOLDER = "study-why"
# Options of a training over the scale's.
TRAINING: list[tuple[str, type, str]] = [
    ("data", str, "As in cuflash train."), ("lr", float, "Learning rate."), ("steps", int, "Of each training."),
    ("n-layer", int, "Blocks."), ("n-head", int, "Attention heads."), ("n-embd", int, "Width."),
    ("block-size", int, "Context length."), ("batch-size", int, "Sequences in a micro-batch."),
    ("grad-accum", int, "Micro-batches in a step."), ("warmup-steps", int, "Steps of linear warm-up."),
    ("beta2", float, "AdamW's."), ("fork", str, "RUN@STEP: every training continues this checkpoint."),
    ("init", str, "Weights that every training begins with."),
]


def _trials(command: Any) -> Any:
    """Options of every study that trains; passed on as `given`, a dict."""
    options = [
        click.option("--scale", default="minutes", show_default=True,
                     help="minutes, on one GPU, or paper: GPT-2 124M, whose cost is printed first."),
        *(click.option(f"--{name}", type=kind, help=f"{text}  [default: the scale's]")
          for name, kind, text in TRAINING),
        click.option("--option", "texts", multiple=True, metavar="NAME=VALUE",
                     help="Any other option of cuflash train, as weight_decay=0.1; repeatable."),
        click.option("--precision", default="bf16", show_default=True, help="The low precision."),
        click.option("--seeds", default="1-7", show_default=True, metavar="LIST",
                     help="Of weights and batches; an arm takes one after the other until its verdict is clear."),
        click.option("--least", type=click.IntRange(min=0), default=0, show_default=True,
                     help="Runs of an arm even where fewer decide."),
        click.option("--fail", "criterion", default="", metavar="TEXT",
                     help="When a run has failed: the mean of rows=N logged losses margin=NATS above its least so far, or "
                          "never at learned=NATS.  [default: the scale's; margin=0.5,rows=3 where options of the "
                          "training are given]"),
        click.option("--run-on", is_flag=True, help="A run that has failed goes on to its last step."),
        click.option("--jobs", type=click.IntRange(min=0), default=1, show_default=True,
                     help="Runs at once, each in a process; 0: in this one."),
        click.option("--budget", type=click.FloatRange(min=0), metavar="SECONDS",
                     help="Then stop, with checkpoints and a report of what is there; the same command goes on."),
        click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True,
                     help="Where trainings run."),
        click.option("--yes", is_flag=True, help="Begin at --scale paper, too."),
        click.option("--ms", type=click.FloatRange(min=0, min_open=True),
                     help="Of a step, for the cost that is printed."),
        click.option("-o", "--out", default=FOLDER, show_default=True, type=OUT_FOLDER,
                     help="The studies' folder; runs that are there are taken, or go on."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


ARM = click.option("--arm", "own", multiple=True, metavar="'NAME: OPTIONS'",
                   help="One more, in the options of cuflash train, as 'p_dp: --set delta_from=p_dp'; repeatable.")
LAYER = click.option("--layer", type=click.IntRange(min=0), help="Where low precision does its harm.  [default: 1]")
HEADS = click.option("--heads", metavar="LIST",
                     help="Of that layer, for the row of chosen heads.  [default: those with the largest W_Q]")
SAMPLES = click.option("--samples", type=click.IntRange(min=1), default=2, show_default=True,
                       help="Of a batch, that are looked at in saved states.")


class _Begun:
    """A study that has been set up from the command line, and how its report is written."""

    def __init__(self, options: dict[str, Any], arms: Callable[["dict[str, Any]"], int] | None = None,
                 announced: bool = True) -> None:
        from cuflash.cli.study import _check_matplotlib
        from cuflash.model.study_scales import SCALES, options_of
        from cuflash.model.trials import Study
        from cuflash.model.verdict import Criterion
        _check_matplotlib()
        given = {name.replace("-", "_"): options.pop(name.replace("-", "_")) for name, _, _ in TRAINING}
        self.scale_name = options["scale"]
        common = options_of(self.scale_name, {n: v for n, v in given.items() if v is not None}, options["texts"])
        common["device"] = options["device"]
        common = {name: value for name, value in common.items() if value != ""}
        self.scale, self.folder = SCALES[self.scale_name], pathlib.Path(options["out"])
        as_it_is = not options["texts"] and all(value is None for value in given.values())
        criterion = Criterion.parse(options["criterion"], self.scale.criterion if as_it_is else None)
        self.device = options["device"]
        seeds = numbers("--seeds", options["seeds"]) or []
        if self.scale_name == "paper" and arms is not None:
            _cost(common, arms(common) * len(seeds), options["ms"], options["yes"])
        elif announced and arms is not None:
            _announce(common, arms(common), len(seeds))
        self.study: Study = Study(
            self.folder, common, seeds=seeds, criterion=criterion, least=options["least"], jobs=options["jobs"],
            budget=math.inf if options["budget"] is None else options["budget"], stop_early=not options["run_on"])

    def write(self, where: str, title: str, report: Any, tables: Mapping[str, Sequence[Any]],
              found: "Sequence[Found]", run: "Run | None" = None) -> None:
        """The report, then what is left; ends with exit code 130 after Ctrl-C.

        found: the studies whose data and precisions the report names; or the one `run` that it is about.
        """
        from cuflash.cli.study import _write
        from cuflash.model import why_report
        from cuflash.model.config import resolve
        from cuflash.report import as_row
        claims, body, figures = report
        data = why_report.data_sha256(self.folder, found)
        precisions = why_report.precisions(self.study.common, (a for f in found for a in f.arms))
        if run is not None:
            data = {run.config["data"]["name"]: run.config["data"]["sha256"]}
            precisions = {"the run's": resolve(run.config["train"]).resolved_precision()}
        rows = {name: [as_row(r, ("rate",) if name == "arms" else ()) for r in some] for name, some in tables.items()}
        _write(str(self.folder / where), title, claims, body, figures, rows, data, precisions, self.device)
        for line in dict.fromkeys(why_report.said(t) for f in found for t in f.tallies):
            click.echo(line)
        for line in self.study.left:
            click.echo(f"left: {line}")
        if self.study.over and not self.study.interrupted and self.study.left:
            click.echo("the budget is spent; the same command goes on")
        if self.study.interrupted:
            sys.exit(INTERRUPTED)


def _announce(common: dict[str, Any], arms: int, seeds: int) -> None:
    """How many runs there may be, and where: a GPU's work of minutes is days of a CPU's."""
    from cuflash.model import session
    c = session.options(None, common)
    click.echo(f"up to {arms * seeds} runs ({arms} arms, {seeds} seed{'s' * (seeds != 1)}) of {c.steps:,} steps of "
               f"{c.batch_size * c.grad_accum * c.block_size:,} tokens, on the {'GPU' if session.use_gpu(c) else 'CPU'}")


def _cost(common: dict[str, Any], runs: int, ms: float | None, yes: bool) -> None:
    """Prints what a study at the paper's scale takes; ends unless --yes."""
    from cuflash.model import session
    from cuflash.model.study_failures import expected_ms
    from cuflash.model.study_scales import cost
    config = session.options(None, common)
    known, how = (ms, "as given by --ms") if ms else expected_ms(config)
    for line in cost(config, known, runs):
        click.echo(line)
    click.echo(f"time of a step: {how}")
    if not yes:
        click.echo("--yes begins; --budget SECONDS does it in sittings")
        sys.exit(0)


def _scale(begun: _Begun, layer: int | None, heads: str | None) -> Any:
    import dataclasses
    changed: dict[str, Any] = {} if layer is None else {"layer": layer}
    if heads is not None:
        changed["heads"] = tuple(numbers("--heads", heads) or ())
    return dataclasses.replace(begun.scale, **changed)


def _isolation(common: dict[str, Any], precision: str, scale: str, layer: int | None) -> "list[Arm]":
    """The table's arms before heads have been chosen; a ValueError where the model has no such layer."""
    from cuflash.model import study_arms
    from cuflash.model.config import resolve
    from cuflash.model.study_scales import SCALES
    config = resolve({k: v for k, v in common.items() if k != "fork"})
    return study_arms.isolation(precision, n_layer=config.n_layer, heads=(0,),
                                layer=SCALES[scale].layer if layer is None else layer)


def _own(texts: Sequence[str], precision: str | None = None) -> "list[Arm]":
    """The user's arms, in this precision where they name none."""
    import dataclasses

    from cuflash.model.trials import Arm
    arms = [Arm.parse(text) for text in texts]
    return arms if precision is None else [dataclasses.replace(a, options={"precision": precision} | a.options)
                                           for a in arms]


def _tables(found: "Found") -> dict[str, Sequence[Any]]:
    return {"arms": found.tallies, "runs": found.trials}


@click.command()
@_trials
@LAYER
@HEADS
@ARM
def isolate(precision: str, layer: int | None, heads: str | None, own: tuple[str, ...], **options: Any) -> None:
    """Low precision in parts of attention alone: the paper's isolation table (section 3.2).

    A run is a folder; the same command takes what is there and goes on with what is not.

    \b
    cuflash study isolate --jobs 3
    cuflash study isolate --budget 1200 --arm 'm fp32: --round attn.m=fp32'
    cuflash study isolate --steps 60 --n-layer 2 --n-embd 48 --block-size 64 --batch-size 8 -o tiny
    """
    from cuflash.model import study_failures, why_report
    with user_errors():
        begun = _Begun(options, lambda c: len(_isolation(c, precision, options["scale"], layer)) + len(own))
        scale, arms = _scale(begun, layer, heads), _own(own, precision)
        with begun.study as study:
            found = study_failures.isolate(study, precision, scale, arms)
        report = why_report.arms_report(study, found, "isolation", why_report.outcome_claims(found, "§ 3.2"))
        begun.write("isolate", "Low precision in parts of attention", report, _tables(found), [found])


@click.command()
@_trials
@click.option("--what", default="beta,epsilon,gamma,offset,unconditional,bits,lr", show_default=True, metavar="LIST",
              help="What is swept.")
@ARM
def sweep(precision: str, what: str, own: tuple[str, ...], **options: Any) -> None:
    """Parameters of the fix, mantissa bits, learning rates, one by one (section 4 and appendix C).

    Where P̄ rounds back to 1 and where NaN begins is measured without training, for each β and γ.

    \b
    cuflash study sweep --what bits --jobs 3
    cuflash study sweep --what beta,gamma --budget 1200
    """
    from cuflash.model import study_arms, study_failures, why_report
    with user_errors():
        begun = _Begun(options, lambda c: len(study_arms.sweep(precision, c["lr"], what.split(","))) + len(own))
        arms = [*study_arms.sweep(precision, begun.study.common["lr"], what.split(",")), *_own(own, precision)]
        limits = study_failures.limit_table(precision)
        with begun.study as study:
            found = study_failures.decide(study, arms)
        more = "## Where a fix stops working\n\nTwo tied keys, no training.\n\n" + why_report.limits_table(limits)
        report = why_report.arms_report(study, found, "sweep", [], more=more)
        begun.write("sweep", "Parameters of the fix, bits and rates", report, _tables(found) | {"limits": limits},
                    [found])


@click.command()
@_trials
@click.option("--precisions", help="Several low precisions, with commas between, instead of --precision.")
@click.option("--lrs", help="Learning rates, with commas between.  [default: the scale's]")
@click.option("--cure", "own", multiple=True, metavar="'NAME: OPTIONS'",
              help="Your own, in the options of cuflash train, as 'mine: --fix my.py:MyFix'; repeatable.")
@click.option("--only-own", is_flag=True, help="Beside it low precision and fp32 attention alone.")
@click.option("--time-steps", type=click.IntRange(min=0), default=20, show_default=True,
              help="Steps of each arm that are timed with nothing else running; 0: none.")
def cures(precision: str, precisions: str | None, lrs: str | None, own: tuple[str, ...], only_own: bool,
          time_steps: int, **options: Any) -> None:
    """Which cure brings the failure rate to that of fp32 attention, and at what cost.

    \b
    cuflash study cures --jobs 3
    cuflash study cures --lrs 3e-3,5e-3 --precisions bf16,bf16-fa2 --budget 1500
    cuflash study cures --only-own --cure 'mine: --fix my.py:MyFix' --cure 'O: --round attn.o=bf16:sr'
    """
    from cuflash.model import study_arms, study_failures, why_report
    with user_errors():
        names = precisions.split(",") if precisions else [precision]
        arms = study_arms.cures_of(names, _floats("--lrs", lrs), _own(own))
        if options["fork"] or options["init"]:  # given weights are of a model without it
            arms = [a for a in arms if not a.options.get("qk_norm")]
        if only_own:
            mine = {study_arms.ALL_FP32, *(a.name for a in _own(own))}
            arms = [a for a in arms if not a.low or study_arms.cure_of(a.name) in mine]
        begun = _Begun(options, lambda c: len(arms))
        with begun.study as study:
            found = study_failures.decide(study, arms)
            timed = study_failures.timings(study, arms, time_steps) if time_steps else None
        ranking = why_report.cure_ranking(found, {t.arm: t.ms for t in timed or ()})
        report = why_report.arms_report(study, found, "cures", [], timed, why_report.ranking_table(ranking))
        begun.write("cures", "Cures and what they cost", report, _tables(found) 
                    | {"timing": timed or [], "ranking": ranking}, [found])
        for r in ranking:
            time = f", {r.cost:.3f} of the time" if math.isfinite(r.cost) else ""
            click.echo(f"{r.cure}: trains in {r.trains} of {r.settings}{time}")


@click.command()
@_trials
@click.option("--run", "source", type=click.Path(exists=True, file_okay=False),
              help="A run that failed.  [default: the first one of --precision that does]")
@click.option("--onset", type=click.IntRange(min=1), metavar="STEP",
              help="Where the failure of --run shows.  [default: where the criterion has it]")
@click.option("--states", type=click.IntRange(min=1), default=3, show_default=True,
              help="Checkpoints before the failure that are screened; forks begin at the first of them.")
@SAMPLES
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Sites that are tried alone.")
@click.option("--horizon", type=click.IntRange(min=0), default=0, show_default=True,
              help="Steps of a fork; 0: twice as many as from its state to the failure, and two of the criterion's "
                   "means more.")
@click.option("--kind", type=click.Choice(["failing", "saving", "both"]), default="both", show_default=True,
              help="The set that is looked for.")
def bisect(precision: str, source: str | None, onset: int | None, states: int, samples: int, top: int, horizon: int,
           kind: str, **options: Any) -> None:
    """The smallest set of roundings that makes training fail, and the smallest whose fp32 saves it.

    Every site alone is tried on states saved before the failure, without training; forks of one state, each on
    batches of its own (--seeds), confirm the top few; then whatever is not needed is taken away: sites, layers,
    heads.

    \b
    cuflash study bisect --jobs 3
    cuflash study bisect --run study-why/runs/bf16/seed-1 --top 5 --kind failing
    """
    from cuflash.model import study_failures, why_report
    from cuflash.model.bisect import FAILING, SAVING
    from cuflash.model.run import Run
    with user_errors():
        if onset is not None and source is None:
            raise ValueError(f"--onset {onset} is of a run: name it with --run")
        begun = _Begun(options, lambda c: 30, announced=False)  # its forks are another run's
        out = begun.folder / "bisect"
        if source is not None:
            begun.study.common = {"device": begun.device}
        with begun.study as study:
            run, onset = _failed(study, precision, source, onset)
            if run is None:
                for line in study.left:
                    click.echo(f"left: {line}")
                click.echo("no run has failed yet; the same command goes on")
                sys.exit(INTERRUPTED if study.interrupted else 0)
            kinds = (FAILING, SAVING) if kind == "both" else (kind,)
            found = study_failures.bisect(study, Run(run), onset, out, states=states, samples=samples, top=top,
                                          horizon=horizon, kinds=kinds)
        report = why_report.bisect_report(study, found)
        begun.write("bisect", "Which roundings make training fail", report, {
            "screen": found.screened, "ranking": found.ranked, "decisions": found.decisions}, [],
                    Run(run))
        for name, subset in (("failing", found.failing), ("saving", found.saving)):
            if name in kinds:
                click.echo(f"minimal {name} set: {subset or f'none, {found.why.get(name)}'}")
        click.echo(f"{found.runs} runs of forks")


def _failed(study: "Study", precision: str, source: str | None,
            given: int | None = None) -> tuple[pathlib.Path | None, int]:
    """The run to bisect, and where its failure shows."""
    from cuflash.model.config import resolve
    from cuflash.model.run import Run
    from cuflash.model.runner import outcome
    from cuflash.model.study_failures import failing_run
    if source is not None:
        found = outcome(source, study.criterion, resolve(Run(source).config["train"]).steps)
        if found.onset < 0 and given is None:
            raise ValueError(f"--run {source} has not failed: {study.criterion.text}; where its loss became NaN after "
                             f"step {found.step}, --onset {found.step + 1} says so")
        return pathlib.Path(source), given or found.onset
    trial = failing_run(study, precision)
    if trial is None:
        if not study.over:
            raise ValueError(f"no run of {precision} fails on seeds {', '.join(map(str, study.seeds))}: there is "
                             "nothing to bisect")
        return None, -1
    return study.folder / trial.folder, trial.onset


@click.command()
@_trials
@LAYER
@HEADS
@click.option("--states", type=click.IntRange(min=1), default=6, show_default=True,
              help="Checkpoints before a failure that are looked at.")
@SAMPLES
@click.option("--phases", default="trainings,isolate,delta,monte-carlo,cures", show_default=True, metavar="LIST",
              help="What is done; trainings always are.")
def why(precision: str, layer: int | None, heads: str | None, states: int, samples: int, phases: str,
        **options: Any) -> None:
    """The paper's figures from end to end: trainings, isolation, the bias of delta, its cause, cures.

    \b
    cuflash study why --jobs 3 --budget 1500
    cuflash study why --scale paper --data fineweb/train.bin --budget 36000 --yes
    cuflash study why --phases trainings,delta -o quick
    """
    from cuflash.errors import unknown
    from cuflash.model import study_arms, study_why, why_report
    with user_errors():
        chosen = phases.split(",")
        for name in chosen:
            if name not in study_why.PHASES:
                raise unknown("--phases", name, study_why.PHASES)

        def arms(common: dict[str, Any]) -> int:
            rows = _isolation(common, precision, options["scale"], layer)
            some = [*study_why.trainings(precision), *(rows if "isolate" in chosen else []),
                    *(study_arms.cures(precision, short=True) if "cures" in chosen else [])]
            return len({a.folder for a in some})
        begun = _Begun(options, arms)
        scale = _scale(begun, layer, heads)
        with begun.study as study:
            w = study_why.why(study, begun.scale_name, scale, precision, states=states, samples=samples, phases=chosen)
        tables: dict[str, Sequence[Any]] = {
            "arms": _first_of(w.every, "tallies", "arm"), "runs": _first_of(w.every, "trials", "folder"),
            "bias": w.bias, "limits": w.limits}
        if w.audited is not None:
            tables |= {"delta": w.audited.delta, "terms": w.audited.terms, "likeness": w.audited.likeness}
        begun.write("", "Why low-precision training fails", why_report.why_report(study, w), tables, w.every)


def _first_of(found: "Sequence[Found]", what: str, key: str) -> list[Any]:
    """Rows of several studies, each once."""
    rows: dict[str, Any] = {}
    for f in found:
        for row in getattr(f, what):
            rows.setdefault(getattr(row, key), row)
    return list(rows.values())


def _floats(option: str, text: str | None) -> list[float]:
    try:
        return [float(word) for word in text.split(",")] if text else []
    except ValueError as e:
        raise ValueError(f"{option} {text!r}: write numbers with commas between") from e


COMMANDS = (why, isolate, bisect, sweep, cures)
