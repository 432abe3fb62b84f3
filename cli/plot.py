"""`cuflash plot`: figures of runs, dumps, differences and audits."""
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cuflash.cli.main import user_errors
from cuflash.cli.outputs import OUT_FILE
from cuflash.errors import unknown
from cuflash.model.run import Run, run_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "curves": "runs: loss, gradient norm, ties",
    "spectral": "a run: spectral norms of its weights by layer, of W_Q by head",
    "heat": "a dump: maps of S and P̄ (or --sites)",
    "row": "a dump: a row of P̄ beside V[:, i], the running error of Ō",
    "histograms": "two dumps: errors at each of --sites",
    "diff": "two dumps, or cuflash diff's --json: every site that differs",
    "errors": "an audit's -o file: errors of δ and O by token and feature",
    "bias": "an audit's Monte Carlo (--json): bias against ties and rest",
}


TAKES = {
    "curves": (), "spectral": (), "bias": (), "heat": ("sites", "layer", "sample", "head"),
    "row": ("layer", "sample", "head", "query", "feature"), "histograms": ("sites", "layer"),
    "diff": ("sites", "layer"), "errors": ("layer", "sample", "head", "token", "precision"),
}


@click.command(epilog="Kinds: " + "; ".join(f"{kind}, {text}" for kind, text in KINDS.items()) + ".")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option("--kind", metavar="KIND", help="What to draw; by default the first kind that fits the sources.")
@click.option("-o", "--out", required=True, type=OUT_FILE,
              help="A .png, .svg or .pdf file.")
@click.option("--sites", help="Of dumps: names with commas between.")
@click.option("--layer", type=click.IntRange(min=0), help="Of a dump or an audit.  [default: the first; of a diff all]")
@click.option("--sample", type=click.IntRange(min=0), help="[default: the first]")
@click.option("--head", type=click.IntRange(min=0),
              help="[default: the first; of an audit the one with the largest error]")
@click.option("--query", type=click.IntRange(min=0), help="The row of `row`.  [default: the last]")
@click.option("--feature", type=click.IntRange(min=0), default=0, show_default=True,
              help="The column of V of `row`.")
@click.option("--token", type=click.IntRange(min=0),
              help="Of an audit.  [default: the one with the largest error]")
@click.option("--precision", help="Of an audit of several.  [default: the first]")
@click.option("--dpi", type=click.IntRange(min=50), default=200, show_default=True, help="Of a PNG.")
@click.pass_context
def plot(ctx: click.Context, sources: tuple[str, ...], kind: str | None, out: str, dpi: int, **options: Any) -> None:
    """Draw a run or several, a dump, two dumps, or an audit.

    SOURCE is a run folder (of RUN@STEP up to that step), a dump, the -o file of an audit, or what --json of a diff or
    a Monte Carlo wrote.

    \b
    cuflash plot runs/nano-bf16-off runs/nano-bf16-qiu-b7 -o curves.pdf
    cuflash plot bf16.h5 --kind row --layer 1 --head 0 --query 40 -o row.png
    cuflash plot bf16.h5 fp32.h5 --sites attn.s,attn.o,attn.dq -o errors.svg
    cuflash plot errors.h5 -o audit.pdf
    """
    with user_errors():
        from cuflash.plot import SUFFIXES, save
        if os.path.splitext(out)[1].lower() not in SUFFIXES:
            raise ValueError(f"-o {out}: a plot is written as one of {', '.join(SUFFIXES)}")
        if kind is not None and kind not in KINDS:
            raise unknown("--kind", kind, KINDS)
        what = {_what(s) for s in sources}
        if len(what) > 1:
            raise ValueError(f"{', '.join(sources)} are of several sorts: {', '.join(sorted(what))}")
        fitting = _fitting(what.pop(), len(sources))
        if kind is None:
            kind = next(iter(fitting))
        if kind not in fitting:
            raise ValueError(
                f"--kind {kind} is for {KINDS[kind].partition(':')[0]}; these sources give "
                f"{', '.join(fitting)}"
            )
        given = [n for n in options if ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE]
        if extra := [f"--{n}" for n in given if n not in TAKES[kind]]:
            takes = ", ".join(f"--{n}" for n in TAKES[kind]) or "none of these options"
            raise ValueError(f"{', '.join(extra)}: a plot of kind {kind} takes {takes}")
        figure = fitting[kind](sources, options)
        save(figure, out, dpi)
    if note := figure.get_suptitle():
        click.echo(f"note: {note}")
    click.echo(out)


def _what(source: str) -> str:
    if run_step(source):
        return "run"
    if not os.path.exists(source):
        raise ValueError(f"{source}: no such file or run folder")
    if source.endswith(".json"):
        return _what_json(source)
    import h5py
    if not h5py.is_hdf5(source):
        more = f"; diff's --json is drawn, its --csv is not: {_DIFF_JSON}" if source.endswith(".csv") else ""
        raise ValueError(f"{source}: not a run folder, an HDF5 or a JSON file of cuflash{more}")
    try:
        with h5py.File(source, "r") as f:
            format = str(f.attrs.get("format", ""))
    except OSError as e:
        raise ValueError(f"{source}: damaged or cut short ({e})") from e
    for name in ("dump", "audit"):
        if format.startswith(f"cuflash {name}"):
            return name
    raise ValueError(f"{source}: an HDF5 file, but no dump and no audit" + (f" ({format})" if format else ""))


_DIFF_JSON = "cuflash diff A B --json diff.json"
_AUDIT_OUT = "cuflash audit … -o errors.h5, then cuflash plot errors.h5"


def _what_json(source: str) -> str:
    found = _json(source)
    if "sites" in found and "only_a" in found:
        return "diff"
    if "bias" in found:
        return "bias"
    if "audits" in found or "layers" in found:
        raise ValueError(f"{source} is what --json of an audit wrote; its -o file is drawn: {_AUDIT_OUT}")
    if "weights" in found:
        raise ValueError(f"{source} is the diff of two runs' weights, which is not drawn; that of two dumps is: "
                         f"{_DIFF_JSON}")
    raise ValueError(f"{source} is not the JSON of cuflash diff ({_DIFF_JSON}) or of cuflash audit --monte-carlo")


def _fitting(what: str, count: int) -> dict[str, Callable[[tuple[str, ...], dict[str, Any]], "Figure"]]:
    """The kinds that these sources can be drawn as, the default first."""
    found = {
        ("run", True): {"curves": _curves, "spectral": _spectral},
        ("run", False): {"curves": _curves},
        ("dump", True): {"heat": _heat, "row": _row},
        ("dump", False): {"histograms": _histograms, "diff": _diff},
        ("audit", True): {"errors": _errors},
        ("bias", True): {"bias": _bias},
        ("diff", True): {"diff": _diff_json},
    }.get((what, count == 1))
    if found is None or what == "dump" and count > 2:
        raise ValueError(f"{count} sources of this sort ({what}) do not go into one plot")
    return found


def _curves(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    names = [os.path.normpath(s) for s in sources]
    if len({os.path.basename(n) for n in names}) == len(names):
        names = [os.path.basename(n) for n in names]
    metrics = {}
    for name, source in zip(names, sources):
        run, step = _run(source)
        rows = run.metrics
        if not rows:
            raise ValueError(f"{source} has no row in its metrics.csv yet")
        metrics[name] = [row for row in rows if row["step"] <= step]
        _check_step(source, step, [row["step"] for row in rows])
    return plot.runs(metrics)


def _spectral(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    run, step = _run(sources[0])
    layers = run.layers
    _check_step(sources[0], step, layers.steps)
    there = layers.steps <= step
    return plot.spectral(layers.steps[there], {name: layers[name][there] for name in layers})


def _run(source: str) -> tuple[Run, float]:
    """A run and the step up to which it is drawn."""
    found = run_step(source)
    assert found is not None  # as _what has it
    return found[0], math.inf if found[1] is None else found[1]


def _check_step(source: str, step: float, logged: Sequence[float]) -> None:
    if len(logged) and not logged[0] <= step <= (math.inf if step == math.inf else logged[-1]):
        raise ValueError(f"{source}: the run has logged steps {logged[0]:g} to {logged[-1]:g}")


def _heat(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.dump import read
    dump = read(sources[0])
    there = {e.site for e in dump.entries}
    sites = options["sites"].split(",") if options["sites"] else [s for s in ("attn.s", "attn.p") if s in there]
    if not sites:
        raise ValueError(f"{dump.path} has neither attn.s nor attn.p, which are drawn by default: name others with "
                         "axes query and key by --sites, or dump these too, as by cuflash dump --sites attn")
    return plot.heat_maps(dump, sites=sites, layer=_layer(dump, options), sample=options["sample"],
                          head=options["head"])


def _row(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.dump import read
    dump = read(sources[0])
    missing = [s for s in ("attn.p", "attn.v") if all(e.site != s for e in dump.entries)]
    if missing:
        raise ValueError(f"--kind row draws a row of attn.p and a column of attn.v, and {dump.path} has no "
                         f"{' and no '.join(missing)}: dump both, as by cuflash dump --sites attn")
    layer = _layer(dump, options)
    e = dump.entry("attn.p", layer=layer)
    query = options["query"] if options["query"] is not None else (e.rows or range(e.shape[-2]))[-1]
    return plot.row(dump, query=query, feature=options["feature"], layer=layer, sample=options["sample"],
                    head=options["head"])


def _histograms(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.dump import read
    a, b = map(read, sources)
    layer = _layer(a, options)
    default = [
        s for s in ("attn.s", "attn.p", "attn.pv", "attn.o_acc", "attn.o", "attn.delta_prod", "attn.ds",
                    "attn.dq") if all(any(e.site == s for e in d.entries) for d in (a, b))
    ]
    return plot.histograms(a, b, options["sites"].split(",") if options["sites"] else default, layer=layer)


def _diff(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.diff import diff
    return plot.differences(diff(*sources, _patterns(options)))


def _patterns(options: dict[str, Any]) -> list[str]:
    """--sites and --layer as patterns of names."""
    names = options["sites"].split(",") if options["sites"] else []
    if options["layer"] is not None:
        names = [f"*/L{options['layer']:02d}/{n}" for n in names or ["*"]]
    return names


def _diff_json(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.diff import Diff, matches
    try:
        found = Diff.from_dict(_json(sources[0]))
        if names := _patterns(options):
            found = dataclasses.replace(found, sites=[s for s in found.sites if matches(s.name, names)],
                                        **{part: [n for n in getattr(found, part) if matches(n, names)]
                                           for part in ("only_a", "only_b")})
        return plot.differences(found)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{sources[0]} is not the JSON of cuflash diff ({e})") from e


def _json(source: str) -> dict[str, Any]:
    try:
        with open(source, encoding="utf-8") as f:
            found = json.load(f)
    except ValueError as e:
        raise ValueError(f"{source} is not JSON: {e}") from e
    return found if isinstance(found, dict) else {}


def _errors(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.audit_map import read_maps
    maps, _ = read_maps(sources[0])
    layer = next(iter(maps)) if options["layer"] is None else options["layer"]
    if layer not in maps:
        raise ValueError(f"--layer {layer}: {sources[0]} has {', '.join(map(str, maps))}")
    precision = options["precision"] or maps[layer][0].precision
    found = [m for m in maps[layer] if m.precision == precision]
    if not found:
        raise unknown("--precision", precision, [m.precision for m in maps[layer]])
    return plot.error_maps(found[0], layer=layer, sample=options["sample"], head=options["head"],
                           token=options["token"])


def _bias(sources: tuple[str, ...], options: dict[str, Any]) -> "Figure":
    from cuflash import plot
    from cuflash.monte_carlo import Bias
    try:
        rows = [Bias(**row) for row in _json(sources[0])["bias"]]
    except (KeyError, TypeError) as e:
        raise ValueError(f"{sources[0]} is not the JSON of cuflash audit --monte-carlo ({e})") from e
    return plot.bias(rows)


def _layer(dump: Any, options: dict[str, Any]) -> int | None:
    """The chosen layer, or the first one of the dump; None where --sites names layers itself."""
    if options["layer"] is None and any(re.search(r"(^|/)L\d+/", s) for s in (options["sites"] or "").split(",")):
        return None
    return options["layer"] if options["layer"] is not None else next(
        (e.layer for e in dump.entries if e.layer is not None), None)
