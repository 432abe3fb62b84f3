"""`cuflash study`: the papers' studies, each a folder with tables, figures and a report."""
import importlib.util
import pathlib
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from cuflash.cli.main import Group, user_errors
from cuflash.cli.outputs import OUT_FOLDER
from cuflash.cli.progress import Progress
from cuflash.errors import install

if TYPE_CHECKING:
    from cuflash.deviation import Activations, Options, Row

NUMBERS = {"length": "Keys, where they are not varied.", "queries": "Rows of Q that are computed.",
           "head_dim": "Head dim.", "tile": "Side of a tile, where it is not varied.",
           "draws": "Independent inputs for each number.", "seed": "Of the inputs."}
LISTS = {"formats": (str, "Of figures 3 and 4."), "inputs": (str, "normal, uniform, heavy."),
         "lengths": (int, "Of figure 5."), "tiles": (int, "Sides of figure 6's square tiles.")}


@click.group(cls=Group)
def study() -> None:
    """Studies of the papers: what they measured, measured again."""


def _microbenchmark(command: Any) -> Any:
    """Options of the microbenchmark; defaults are those of cuflash.deviation.Options."""
    from cuflash.deviation import Options
    defaults = Options()
    for name, (kind, text) in reversed(LISTS.items()):
        shown = ",".join(map(str, getattr(defaults, name)))
        command = click.option(
            f"--{name}", metavar="LIST", help=f"{text}  [default: {shown}]",
            callback=lambda ctx, param, value, kind=kind: _list(param.opts[0], value, kind))(command)
    for name, text in reversed(NUMBERS.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name),
                               show_default=True, help=text)(command)
    command = click.option("--precision", "precisions", multiple=True, default=defaults.precisions,
                           show_default=True, help="Another precision in figure 4; repeatable.")(command)
    return click.option("--accumulator", default=defaults.accumulator, show_default=True,
                        help="Of the products; all but library are bit-defined.")(command)


def _list(option: str, text: str | None, kind: type) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(word.strip()) for word in text.split(","))
    except ValueError as e:
        raise click.BadParameter(f"{text!r}: write numbers with commas between", param_hint=option) from e


@study.command()
@_microbenchmark
@click.option("--activations", type=click.Path(dir_okay=False),
              help="A dump with attn.q, attn.k and attn.v: a further input.")
@click.option("--layer", type=click.IntRange(min=0), help="Of that dump.  [default: the last]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="Where attention runs. A GPU needs --accumulator auto, sequential or its own.")
@click.option("-o", "--out", default="study-deviation", show_default=True, type=OUT_FOLDER,
              help="The study's folder.")
def deviation(out: str, activations: str | None, layer: int | None, device: str, **options: Any) -> None:
    """How far flash attention is from plain attention of a format, and both from fp64 (figures 3 to 6).

    At its defaults it takes some minutes on a CPU.

    \b
    cuflash dump RUN --precision fp32 --sites attn.q,attn.k,attn.v -o activations.h5
    cuflash study deviation --activations activations.h5
    cuflash study deviation --draws 1 --length 256 --lengths 64,256,1024 --tiles 32,64 -o quick
    """
    from cuflash.deviation import Options, read_activations
    from cuflash.deviation_report import claims, figures, sections
    from cuflash.report import as_row
    with user_errors():
        _check_matplotlib()
        o = Options(**{name: value for name, value in options.items() if value is not None})
        given = read_activations(activations, layer=layer, count=o.draws) if activations else None
        rows, seconds = _measure(o, given, device)
        _write(out, "Numeric deviation of flash attention", claims(rows), sections(rows, o, seconds),
               figures(rows), {"deviation": [as_row(r, ("ratio",)) for r in rows]}, _sources(o, given),
               _precisions(o), device)


@study.command()
@_microbenchmark
@click.option("--data", default="pydoc", show_default=True, help="As in cuflash train.")
@click.option("--model", default="nano", show_default=True, help="As in cuflash train.")
@click.option("--block-size", type=int, default=128, show_default=True, help="Context length.")
@click.option("--batch-size", type=int, default=4, show_default=True, help="Sequences in a step.")
@click.option("--steps", type=int, default=500, show_default=True, help="Of each training.")
@click.option("--lr", type=float, help="Highest learning rate.  [default: the model's]")
@click.option("--every", type=click.IntRange(min=1), default=25, show_default=True,
              help="Steps between comparisons.")
@click.option("--seeds", nargs=2, type=int, default=(1, 2), show_default=True, help="Two initialisations.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="cpu", show_default=True,
              help="Where trainings run; the microbenchmark runs on the CPU.")
@click.option("-o", "--out", default="study-stable", show_default=True, type=OUT_FOLDER,
              help="The study's folder; trainings that are there already are taken, or go on.")
def stable(out: str, every: int, seeds: tuple[int, int], data: str, model: str, block_size: int,
           batch_size: int, steps: int, lr: float | None, device: str, **options: Any) -> None:
    """The microbenchmark, and trainings in pairs (figures 3 to 8).

    Pairs differ in one thing: flash and plain attention, two seeds, low precision and fp32. At its
    defaults it takes about ten minutes on a CPU and 450 MB for checkpoints.

    \b
    cuflash study stable
    cuflash study stable --steps 100 --every 10 --draws 1 -o quick
    """
    from cuflash import deviation_report
    from cuflash.deviation import Options, read_activations
    from cuflash.model import stable_report
    from cuflash.model.study_stable import arms, compare, dump_activations, pairs, train_arms
    from cuflash.report import as_row
    runs = pathlib.Path(out) / "runs"
    with user_errors():
        _check_matplotlib()
        o = Options(**{name: value for name, value in options.items() if value is not None})
        given = {"data": data, "model": model, "block_size": block_size, "batch_size": batch_size,
                 "steps": steps, "device": device, "log_every": max(1, steps // 5)}
        if lr is not None:
            given["lr"] = lr
        chosen = pairs(seeds)
        trained = train_arms(runs, given, arms(chosen, o.tile), every=every, say=click.echo)
        drifts = compare(runs, chosen)
        sources = dump_activations(runs / trained[0].arm, pathlib.Path(out) / "activations.h5")
        activations = read_activations(pathlib.Path(out) / "activations.h5", count=o.draws)
        rows, seconds = _measure(o, activations, "cpu")
        claims = [*deviation_report.claims(rows), *stable_report.claims(drifts)]
        body = deviation_report.sections(rows, o, seconds) + "\n" + stable_report.sections(drifts, trained)
        tables = {"deviation": [as_row(r, ("ratio",)) for r in rows],
                  "drift": [as_row(d, ("relative",)) for d in drifts],
                  "trained": [as_row(t) for t in trained]}
        precisions = _precisions(o) | stable_report.precisions(runs, trained)
        _write(out, "Is flash attention stable?", claims, body,
               deviation_report.figures(rows) | stable_report.figures(drifts), tables,
               sources | _sources(o, activations), precisions, device)


def _check_matplotlib() -> None:
    """Before anything is computed, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"a study's figures need matplotlib: {install('plot')}")


def _measure(o: "Options", activations: "Activations | None", device: str) -> "tuple[list[Row], float]":
    from cuflash.deviation import run, settings
    to_device = None
    if device == "gpu":
        from cuflash.kernels import gpu_reason, import_cupy
        if reason := gpu_reason():
            raise ValueError(f"--device gpu: {reason}")
        to_device = import_cupy().asarray
    chosen, begun = settings(o, activations), time.perf_counter()
    with Progress(len(chosen), "setting") as progress:
        rows = run(chosen,
                   o,
                   activations,
                   to_device=to_device,
                   jobs=1 if to_device else None,
                   progress=progress.to)
    return rows, time.perf_counter() - begun


def _sources(o: "Options", activations: "Activations | None") -> dict[str, str]:
    """SHA-256 of what attention was given."""
    import hashlib

    from cuflash.deviation import inputs
    found = {
        f"inputs {kind}, {o.length} keys": hashlib.sha256(b"".join(
            x.tobytes() for x in inputs(kind, o.length, o))).hexdigest()
        for kind in o.inputs
    }
    return found | ({f"activations ({activations.name})": activations.sha256} if activations else {})


def _precisions(o: "Options") -> dict[str, Any]:
    from cuflash.deviation import precisions, settings
    return precisions(settings(o), o.accumulator)


def _write(out: str, title: str, claims: Any, body: str, figures: Any, tables: Any, data: dict[str, str],
           precisions: Any, device: str) -> None:
    from cuflash import report
    from cuflash.model import session
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["cuflash", *sys.argv[1:]])
    environment = session.environment() | {"device": device}
    tables = {name: rows for name, rows in (tables | {"claims": [report.as_row(c) for c in claims]}).items() if rows}
    for name, rows in tables.items():
        report.write_csv(folder / f"{name}.csv", rows)
    report.write_hdf5(folder / "study.h5", tables,
                      environment | {"command": command}
                      | {f"precision {name}": p.to_toml() for name, p in precisions.items()})
    report.write_figures(folder, figures)
    text = "\n".join([f"# {title}", "", *([report.claims_table(claims)] if claims else []), body,
                      report.reproduce(command, environment, data, precisions)])
    report.write_report(folder / "report.md", text)
    for c in claims:
        where = f"figure {c.figure}" if c.figure[0].isdigit() else c.figure
        click.echo(f"{where}: {c.paper}: {c.verdict}")
    click.echo(f"{folder / 'report.md'}")


from cuflash.cli import study_why  # after the group that it adds to

for _command in study_why.COMMANDS:
    study.add_command(_command)
