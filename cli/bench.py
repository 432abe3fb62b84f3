"""cuflash bench: speed of the kernels with the roofline, beside torch where it is installed."""
import datetime
import importlib.util
import platform
from types import ModuleType
from typing import TYPE_CHECKING

import click

from cuflash.cli.main import Group, UserError, user_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuflash.bench import Row, Timer
    from cuflash.precision import Precision

_DEFAULTS = {"none": ("bf16-fa2", "bf16"), "torch": ("bf16-fa2", "bf16"), "paper": ("bf16",)}  # precisions


@click.group(cls=Group)
def bench() -> None:
    """Speed of the kernels on this machine's GPU, beside other programs in the same run."""


@bench.command()
@click.option("--against", type=click.Choice(["torch", "paper", "none"]), default="none", show_default=True,
              help="Also time torch's flash and cuDNN attention; or attention as arXiv 2510.04212 has it, one torch "
                   "operation after another, on that paper's shape.")
@click.option("--precision", "precisions", multiple=True,
              help="A precision to time; repeatable. EXP after a slash: bf16-fa2/mufu.  [default: bf16-fa2 and bf16; "
                   "against paper bf16]")
@click.option("--fix", default="off", show_default=True, help="Fix for the row maximum.")
@click.option("--row", "chosen", multiple=True, type=int, help="Only this row of the table, from 0; repeatable.")
@click.option("--repeats", default=20, show_default=True, help="Timed calls of each; the median counts.")
def attention(against: str, precisions: tuple[str, ...], fix: str, chosen: tuple[int, ...], repeats: int) -> None:
    """Forward and backward over the shapes of docs/performance.md, in TFLOP/s; a Markdown table.

    Against paper: milliseconds of forward and backward together, and how many times as fast as the paper's.

    \b
    cuflash bench attention --against torch
    cuflash bench attention --against paper
    cuflash bench attention --precision bf16-fa2/mufu --row 0
    """
    from cuflash import bench as b
    from cuflash.kernels import gpu_reason
    reason = gpu_reason()
    if reason:
        raise UserError(f"cuflash bench needs a GPU: {reason}")
    if against != "none" and importlib.util.find_spec("torch") is None:
        raise UserError(f"--against {against}: torch is not installed here: pip install torch, built for CUDA")
    with user_errors():
        if against == "paper" and chosen:
            raise ValueError(f"--row {chosen[0]}: --against paper has one shape, that of the paper; drop --row")
        if not all(0 <= i < len(b.ROWS) for i in chosen):
            raise ValueError(f"--row {chosen}: valid are 0 to {len(b.ROWS) - 1}")
        own = {text: _precision(text) for text in precisions or _DEFAULTS[against]}
    timer = b.Timer(repeats)
    if against == "paper":
        _against_paper(b, own, fix, timer)
        return
    programs = {text: _own(b, p, fix) for text, p in own.items()}
    if against == "torch":
        programs["torch flash"] = lambda row, timer: b.torch_attention(row, "FLASH_ATTENTION", timer)
        programs["torch cuDNN"] = lambda row, timer: b.torch_attention(row, "CUDNN_ATTENTION", timer)
    product, copy = b.ceilings(timer)
    click.echo(f"{_machine(timer)}; bf16 8192³ product {product / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s")
    click.echo("TFLOP/s forward / backward (share of the roofline)\n")
    _head(["shape", *programs])
    for row, times in b.compare(tuple(b.ROWS[i] for i in chosen) or b.ROWS, programs, timer):
        roof = min(product, row.flops() / row.bytes() * copy)
        cells = [" / ".join(f"{work * row.flops() / t / 1e12:.0f} ({work * row.flops() / t / roof:.0%})"
                            for work, t in zip((1, 2.5), pair)) for pair in times.values()]
        click.echo(f"| {row} | " + " | ".join(cells) + " |")


def _precision(text: str) -> "Precision":
    from cuflash.precision import as_precision
    name, _, exp = text.partition("/")
    return as_precision(name).replace(exp=exp) if exp else as_precision(name)


def _own(b: ModuleType, precision: "Precision", fix: str) -> "Callable[[Row, Timer], tuple[float, float]]":
    return lambda row, timer: b.own(row, precision, timer, fix)


def _against_paper(b: ModuleType, own: "dict[str, Precision]", fix: str, timer: "Timer") -> None:
    click.echo(f"{_machine(timer)}\nms forward and backward (times as fast as the paper's)\n")
    _head(["shape", "the paper's, eager torch", *own])
    theirs = b.paper_both(b.PAPER_SHAPE, timer)
    ours = [b.own_both(b.PAPER_SHAPE, p, timer, fix) for p in own.values()]
    click.echo(f"| {b.PAPER_SHAPE} | {theirs * 1e3:.2f} | "
               + " | ".join(f"{t * 1e3:.2f} ({theirs / t:.1f} ×)" for t in ours) + " |")


def _machine(timer: "Timer") -> str:
    cupy = timer.cupy
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    return (f"{device}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, "
            f"Python {platform.python_version()}, {datetime.date.today()}")


def _head(columns: list[str]) -> None:
    click.echo("| " + " | ".join(columns) + " |")
    click.echo("|---" * len(columns) + "|")
