"""`cuflash explain`: one rounding, one sum or one dot product, shown bit by bit."""
import click

from cuflash.cli.main import user_errors
from cuflash.explain import explain as explained


# A number that starts with a minus sign is no option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("terms", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--format", default="bf16", show_default=True, help="fp32, tf32, bf16, fp16, fp8_e4m3, fp8_e5m2 or eXmY."
)
@click.option("--mode", default="rne", show_default=True, help="rne, rz, rna, rd, ru, sr, or FILE.py:NAME.")
@click.option("--accumulator", help="Of products: hopper, ampere, sequential, exact.  [default: hopper]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of mode sr.")
def explain(terms: tuple[str, ...], format: str, mode: str, accumulator: str | None, seed: int) -> None:
    """One rounding, one sum or one dot product, shown bit by bit; with no TERMS, the paper's example.

    \b
    cuflash explain 1.2345 --format bf16 --mode rne
    cuflash explain 0xC0968717                 # bits: of the format, or 8 digits of fp32
    cuflash explain -2.40711546 - 2.296875
    cuflash explain '1.5*2.25' '3e-5*1' --accumulator hopper
    """
    for term in terms:
        if term.startswith("--"):
            raise click.NoSuchOption(term.partition("=")[0], ctx=click.get_current_context(),
                                     possibilities=["--format", "--mode", "--accumulator", "--seed"])
    with user_errors():
        text = explained(" ".join(terms), format=format, mode=mode, accumulator=accumulator, seed=seed)
    click.echo(text)
