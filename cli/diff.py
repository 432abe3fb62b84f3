"""`cuflash diff A B`: two dumps site by site, two runs weight by weight, any two HDF5 files."""
import csv
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import click

from cuflash.cli.main import user_errors
from cuflash.cli.outputs import OUT_TEXT, check_one_on_stdout, written
from cuflash.diff import Diff, SiteDiff, diff as compare, plain
from cuflash.errors import ranges
from cuflash.model.run import CHECKPOINT, checkpoint_of, run_step
from cuflash.weight_diff import WeightDiff, diff_weights

SORTS = {
    "order": lambda s: s.order,
    "signed": lambda s: -abs(_or_zero(s.z)),
    "ulp": lambda s: -_or_zero(s.mean_ulp),
    "abs": lambda s: -_or_zero(s.max_abs),
    "equal": lambda s: s.equal,
    "cosine": lambda s: _or_zero(s.cosine),
}


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option(
    "--sites", "--site", "names", multiple=True, metavar="NAMES",
    help="Only these, with commas between: a site, a prefix as attn or fwd/L01, a pattern as '*/L0[01]/attn.*'; "
         "repeatable.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="order", show_default=True,
              help="Order of the lines: of execution, by signed mean error in standard errors, …")
@click.option("--all", "everything", is_flag=True, help="List what does not differ, too.")
@click.option("--step", type=click.IntRange(min=0),
              help="Of two runs: this step's checkpoints.  [default: the last that both have]")
@click.option("--csv", "csv_file", type=OUT_TEXT,
              help="Write every line's numbers here; - is stdout, in place of the table.")
@click.option("--json", "json_file", type=OUT_TEXT, help="The same as JSON.")
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, names: tuple[str, ...], sort: str, everything: bool,
         step: int | None, csv_file: str | None, json_file: str | None) -> None:
    """How two files differ: dumps site by site, runs weight by weight, any HDF5 files dataset by dataset.

    A and B are dumps, runs (RUN@STEP, or RUN and --step), or HDF5 files with datasets of the same names. Differences
    are A − B. The exit code is 0 where all bits are the same, 1 where they differ, 2 for a mistake.

    \b
    cuflash diff bf16.h5 fp32.h5
    cuflash diff bf16.h5 fp32.h5 --sites fwd/L01,attn.o --sort signed --csv sites.csv
    cuflash diff runs/nano-bf16-off runs/nano-bf16-qiu-b7 --step 800
    cuflash diff runs/nano-bf16-off@400 runs/nano-bf16-off@800
    """
    with user_errors():
        names = tuple(name for text in names for name in text.split(","))
        quiet = check_one_on_stdout(csv=csv_file, json=json_file)
        of_runs = [run_step(x) for x in (a, b)]
        if (of_runs[0] is None) != (of_runs[1] is None):
            raise ValueError(f"{a} and {b} are a file and a run: give two dumps, or two runs as RUN or RUN@STEP")
        if of_runs[0] is not None:
            if names or sort != "order":
                raise ValueError(f"{'--sites' if names else '--sort'} is for dumps; runs are compared weight by weight")
            steps, files = _checkpoints(a, b, step)
            weights = diff_weights(*files)
            rows: list[Any] = weights
            data: dict[str, Any] = {
                "a": a, "b": b, "step": steps[0] if len(set(steps)) == 1 else steps,
                "weights": [plain(_row(w)) for w in weights]
            }
            at = " and ".join(map(str, dict.fromkeys(steps)))
            lines, differs = _weights(weights, at, everything), any(w.differs for w in weights)
        else:
            if step is not None:
                raise ValueError(f"--step {step}: {a} is a file; steps are of runs")
            found = compare(a, b, names)
            found.sites.sort(key=SORTS[sort])
            rows, data = found.sites, found.to_dict()
            lines, differs = _sites(found, everything), found.differs
        for line in () if quiet else lines:
            click.echo(line)
        if csv_file:
            _write_csv(csv_file, rows)
        if json_file:
            with written(json_file) as f:
                f.write(json.dumps(data, indent=1) + "\n")
    ctx.exit(int(differs))


def _checkpoints(a: str, b: str, step: int | None) -> tuple[list[int], list[pathlib.Path]]:
    """Steps and files: those that RUN@STEP names, else --step's, else the last that both have."""
    runs = [run_step(x) for x in (a, b)]
    named = [s for r in runs if r and (s := r[1]) is not None]
    if named and step is not None:
        whose = a if runs[0] and runs[0][1] is not None else b
        raise ValueError(f"--step {step}: {whose} names its step; drop one of them")
    kept = [dict(r[0].checkpoints()) for r in runs if r]
    common = kept[0].keys() & kept[1].keys()
    if not named and step is None:
        if not common:
            raise ValueError(f"{a} and {b} have no checkpoint of one step ({ranges(kept[0])} and {ranges(kept[1])}): "
                             "name them as RUN@STEP")
        step = max(common)
    files = [checkpoint_of(x, step=step) for x in (a, b)]
    return [int(found[1]) for f in files if (found := CHECKPOINT.fullmatch(f.name))], files


# ---- the report ---------------------------------------------------------------------------------

def _sites(found: Diff, everything: bool) -> Iterable[str]:
    yield from (f"note: {n}" for n in found.notes)
    first = found.first
    if first is None:
        count = sum(s.values for s in found.sites)
        yield f"{count:,} values at {len(found.sites)} sites, all of them the same bits"
    else:
        yield f"first difference: {first.name}{_where(first)}"
    for path, names in ((found.a, found.only_a), (found.b, found.only_b)):
        if names:
            yield f"only in {path}: {_short(names)}"
    shown = [s for s in found.sites if s.differs or everything]
    if not shown:
        return
    width = max(20, *(len(s.name) for s in shown))
    formats = ["/".join(dict.fromkeys(s.formats)) for s in shown]
    wide = max(6, *map(len, formats))
    yield ""
    yield (f"  {'A − B':<{width}} {'format':<{wide}} {'equal':>7} {'max abs':>8} {'max ulp':>8} {'mean':>8}"
           f"  {'signed mean ulp':>20} {'z':>6}  {'1 − cos':>7}")
    for s, format in zip(shown, formats):
        if s.shapes is not None:
            yield f"  {s.name:<{width}} {format:<{wide}} shapes {s.shapes[0]} and {s.shapes[1]}"
            continue
        bad = f"  {s.nonfinite:,} not finite" if s.nonfinite else ""
        yield (f"  {s.name:<{width}} {format:<{wide}} {_share(s.equal):>7} {s.max_abs:>8.1e} {_ulp(s.max_ulp):>8} "
               f"{_ulp(s.mean_ulp):>8}  {_signed(s.signed_ulp):>10} ± {s.se:<7.1g} {_z(s):>6}"
               f"  {1 - s.cosine:>7.0e}{bad}")
    same = [s.name for s in found.sites if not s.differs]
    if same and not everything:
        yield ""
        yield f"the same bits at {len(same)} others: {_short(same)}"


def _where(s: SiteDiff) -> str:
    if s.first is None:
        return f", shapes {s.shapes[0]} and {s.shapes[1]}" if s.shapes else ""
    return f" [{', '.join(map(str, s.first))}]: {s.a:.9g} in {s.formats[0]}, {s.b:.9g} in {s.formats[1]}"


def _weights(weights: list[WeightDiff], step: str, everything: bool) -> Iterable[str]:
    same = [w.name for w in weights if not w.differs]
    shown = weights if everything else [w for w in weights if w.differs]
    if len(same) == len(weights):
        yield f"weights at step {step}: {math.prod(weights[-1].shape):,} numbers, all of them the same bits"
    if not shown:
        return
    width = max(len(w.name) for w in shown)
    yield f"weights at step {step}, A − B"
    yield f"  {'':<{width}} {'equal':>7} {'max abs':>10} {'mean abs':>10} {'Wasserstein-1':>14}"
    for w in shown:
        yield (f"  {w.name:<{width}} {_share(w.equal):>7} {w.max_abs:>10.3e} {w.mean_abs:>10.3e} "
               f"{w.wasserstein:>14.3e}")
    if same and not everything:
        yield f"the same bits in {len(same)} others: {_short(same)}"


def _short(names: list[str]) -> str:
    names = [n.removeprefix("attn.") for n in names]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _share(share: float) -> str:
    """Never rounded up to 100 %."""
    return "100%" if share == 1 else f"{math.floor(share * 1e4) / 100:.2f}%"


def _signed(x: float) -> str:
    return f"{x:+.4f}" if abs(x) < 1e3 else f"{x:+.3g}"


def _ulp(x: float) -> str:
    return f"{x:.3g}" if x < 1e5 else f"{x:.1e}"


def _z(s: SiteDiff) -> str:
    if not s.se > 0:  # errors that are all alike, or one of them: no measure of chance
        return "–"
    z = s.z
    return f"{z:+.1f}" if abs(z) < 100 else f"{z:+.0f}" if abs(z) < 1e5 else f"{z:+.0e}"


def _or_zero(x: float) -> float:
    return x if x == x else 0.0


def _row(x: Any) -> dict[str, Any]:
    return dataclasses.asdict(x) | ({"z": x.z} if isinstance(x, SiteDiff) else {})


def _write_csv(path: str, rows: list[Any]) -> None:
    with written(path) as f:
        table = [_row(r) for r in rows]
        writer = csv.DictWriter(f, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
