"""`cuflash sites [PRECISION]`: the rounding sites and what a precision does at each."""
import textwrap
from collections.abc import Iterator

import click

from cuflash.cli.main import user_errors
from cuflash.precision import SWITCHES, Precision, as_precision
from cuflash.site_table import SITES

COMPARED = ("fp32", "bf16", "bf16-fa2")  # shown side by side where no precision is named
WIDTH = 100


@click.command()
@click.argument("precision", required=False)
@click.option(
    "--round",
    "rounds",
    multiple=True,
    metavar="[SCOPE/]SITE=FORMAT[:MODE]",
    help="[fwd/|bwd/][L1/][H0,6-8/][MODULE/]SITE=FORMAT[:MODE], as in train; repeatable, later wins.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help="A switch: delta_from=p_dp, tile=128,128, accumulator=hopper, …; repeatable.")
@click.option("--toml", is_flag=True, help="Print the precision as TOML, which --precision FILE.toml reads.")
@click.option("--diff", "other", metavar="OTHER", help="Show only what differs from this precision.")
def sites(
    precision: str | None, rounds: tuple[str, ...], settings: tuple[str, ...], toml: bool, other: str | None
) -> None:
    """The rounding sites, and what PRECISION (a name or a TOML file) does at each.

    With no PRECISION, fp32, bf16 and bf16-fa2 side by side.

    \b
    cuflash sites
    cuflash sites bf16-fa2 --round attn.o=fp32 --round L1/H0,6-8/attn.p=bf16:sr
    cuflash sites bf16 --diff bf16-fa2
    cuflash sites bf16 --set delta_from=p_dp --toml > mine.toml
    """
    with user_errors():
        if precision is None:
            given = [
                n
                for n, v in (("--round", rounds), ("--set", settings), ("--toml", toml), ("--diff", other))
                if v
            ]
            if given:
                raise ValueError(f"{given[0]} needs a PRECISION, as in: cuflash sites bf16-fa2 {given[0]} …")
            lines = _table([as_precision(n) for n in COMPARED], COMPARED)
        else:
            p = as_precision(precision).set(*settings).round(*rounds)
            if toml and other is not None:
                raise ValueError("--toml prints one precision, --diff compares two: give one of them")
            if toml:
                lines = iter(p.to_toml().splitlines())
            elif other is not None:
                lines = _difference(p, as_precision(other))
            else:
                lines = _table([p], (p.name,))
    for line in lines:
        click.echo(line)


def _table(precisions: list[Precision], names: tuple[str, ...]) -> Iterator[str]:
    """One line a site, then the switches; `–` marks a site that is merged away."""
    cells = [[_cell(p, s) for p in precisions] for s in SITES]
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    yield (
        f"{'site':<16}{'where':<6}{'axes':<5}"
        + "".join(f"{n:<{w + 2}}" for n, w in zip(names, widths))
        + "value"
    )
    start = 27 + sum(widths) + 2 * len(widths)
    for site, row in zip(SITES.values(), cells):
        left = f"{site.name:<16}{site.direction:<6}{site.axes:<5}" + "".join(
            f"{c:<{w + 2}}" for c, w in zip(row, widths)
        )
        yield from textwrap.wrap(
            site.value, max(WIDTH, start + 20), initial_indent=left, subsequent_indent=" " * start
        )
    yield ""
    yield "axes: q query, k key, d head dim; t token, c feature; o, i a weight's output and input features"
    yield ""
    rows = [(switch, *(_switch(p, switch) for p in precisions)) for switch in [*SWITCHES, "tile"]]
    widths = [max(map(len, column)) for column in zip(*rows, ("", *names))]
    for row in [("switch", *names), *rows]:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip()
    if any(p.overrides for p in precisions):
        yield ""
        yield "for part of the network (later wins):"
        yield from (f"  {o}" for p in precisions for o in p.overrides)
    if any(p.merged for p in precisions):
        yield ""
        yield "– merged away by order or algorithm: it does not exist on its own"


def _cell(p: Precision, site: str) -> str:
    return "–" if site in p.merged else "fp64" if p.is_fp64 else str(p.table()[site])


def _switch(p: Precision, name: str) -> str:
    if name != "tile":
        return getattr(p, name)
    return (
        "by head dim"
        if p.tile is None and p.order == "fa2"
        else p.diff(p.replace(tile=None)).get("tile", ("128,128",))[0]
    )


def _difference(p: Precision, other: Precision) -> Iterator[str]:
    changes = p.diff(other)
    if p.is_fp64 != other.is_fp64:
        changes = {"base": (p.base, other.base)} | changes
    if not changes:
        yield f"{p.name} and {other.name} are the same"
        return
    rows = [("", p.name, other.name), *((n, a or "–", b or "–") for n, (a, b) in changes.items())]
    widths = [max(len(r[i]) for r in rows) for i in range(2)]
    for name, a, b in rows:
        yield f"{name:<{widths[0]}}  {a:<{widths[1]}}  {b}".rstrip()
