"""cuflash bench: speed of the kernels with the roofline, beside torch where it is installed."""
import datetime
import importlib.util
import platform

import click

from cuflash.cli.main import UserError, user_errors


@click.group()
def bench() -> None:
    """Speed of the kernels on this machine's GPU, beside other programs in the same run."""


@bench.command()
@click.option("--against", type=click.Choice(["torch", "none"]), default="none", show_default=True,
              help="Also time torch's flash and cuDNN attention.")
@click.option("--precision", "precisions", multiple=True, default=("bf16-fa2", "bf16"), show_default=True,
              help="A precision to time; repeatable. EXP after a slash: bf16-fa2/mufu.")
@click.option("--fix", default="off", show_default=True, help="Fix for the row maximum.")
@click.option("--row", "chosen", multiple=True, type=int, help="Only this row of the table, from 0; repeatable.")
@click.option("--repeats", default=20, show_default=True, help="Timed calls of each; the median counts.")
def attention(against: str, precisions: tuple[str, ...], fix: str, chosen: tuple[int, ...], repeats: int) -> None:
    """Forward and backward over the shapes of docs/performance.md, in TFLOP/s; a Markdown table.

    \b
    cuflash bench attention --against torch
    cuflash bench attention --precision bf16-fa2/mufu --row 0
    """
    from cuflash import bench as b
    from cuflash.kernels import gpu_reason, import_cupy
    from cuflash.precision import as_precision
    reason = gpu_reason()
    if reason:
        raise UserError(f"cuflash bench needs a GPU: {reason}")
    if against == "torch" and importlib.util.find_spec("torch") is None:
        raise UserError("--against torch: torch is not installed here")
    with user_errors():
        rows = [b.ROWS[i] for i in chosen] if all(0 <= i < len(b.ROWS) for i in chosen) else None
        if rows is None:
            raise ValueError(f"--row {chosen}: valid are 0 to {len(b.ROWS) - 1}")
        programs = {}
        for text in precisions:
            name, _, exp = text.partition("/")
            p = as_precision(name)
            programs[text] = _own(b, p.replace(exp=exp) if exp else p, fix)
    if against == "torch":
        programs["torch flash"] = lambda row, timer: b.torch_attention(row, "FLASH_ATTENTION", timer)
        programs["torch cuDNN"] = lambda row, timer: b.torch_attention(row, "CUDNN_ATTENTION", timer)
    cupy, timer = import_cupy(), b.Timer(repeats)
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    product, copy = b.ceilings(timer)
    click.echo(f"{device}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, "
               f"Python {platform.python_version()}, {datetime.date.today()}; "
               f"bf16 8192³ product {product / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s")
    click.echo("TFLOP/s forward / backward (share of the roofline)\n")
    click.echo("| shape | " + " | ".join(programs) + " |")
    click.echo("|---" * (len(programs) + 1) + "|")
    for row, times in b.compare(tuple(rows or b.ROWS), programs, timer):
        roof = min(product, row.flops() / row.bytes() * copy)
        cells = [" / ".join(f"{work * row.flops() / t / 1e12:.0f} ({work * row.flops() / t / roof:.0%})"
                            for work, t in zip((1, 2.5), pair)) for pair in times.values()]
        click.echo(f"| {row} | " + " | ".join(cells) + " |")


def _own(b, precision, fix):  # noqa: ANN001, ANN202
    return lambda row, timer: b.own(row, precision, timer, fix)
