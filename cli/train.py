"""`cuflash train`."""
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import click

from cuflash.cli.main import INTERRUPTED, UserError, user_errors
from cuflash.cli.outputs import OUT_FOLDER

MANY = {"multiple": True}
FLAG = {"is_flag": True, "default": None}
# Option, type, what it is. Defaults come from the model's preset (cuflash/model/config.py).
OPTIONS: list[tuple[str, Any, str]] = [
    ("--data", str, "pydoc, stdlib, synthetic:words|bytes[,seed=…,size=…,repeat=…], a text file, a folder of it, or "
                    ".bin tokens of nanoGPT or llm.c.  [default: pydoc, the language reference of Python]"),
    ("--model", str, "nano, mini, study, gpt2, or a TOML file of n_layer … bias.  [default: nano]"),
    ("--n-layer", int, "Blocks."),
    ("--n-head", int, "Attention heads; divides n-embd."),
    ("--n-embd", int, "Width."),
    ("--block-size", int, "Context length in tokens."),
    ("--qk-norm", FLAG, "LayerNorm of each head's q and k."),
    ("--batch-size", int, "Sequences in a micro-batch."),
    ("--grad-accum", int, "Micro-batches in a step.  [default: 1]"),
    ("--steps", int, "Steps of training."),
    ("--lr", float, "Highest learning rate."),
    ("--min-lr", float, "Learning rate at the end of the cosine.  [default: lr/10]"),
    ("--warmup-steps", int, "Steps of linear warm-up."),
    ("--lr-decay-steps", int, "Step where the cosine ends.  [default: steps]"),
    ("--schedule", str, "After warm-up: cosine or constant."),
    ("--weight-decay", float, "AdamW's, on matrices."),
    ("--beta1", float, "AdamW's.  [default: 0.9]"),
    ("--beta2", float, "AdamW's."),
    ("--grad-clip", float, "Largest gradient norm; 0 never clips.  [default: 1]"),
    ("--seed", int, "Of weights and stochastic rounding.  [default: 1]"),
    ("--data-seed", int, "Of batches, a function of it and the step.  [default: 1]"),
    ("--precision", str, "fp32, fp64, bf16, bf16-fa2, fp16-fa2, bf16-stream, all-FORMAT, or a TOML file.  "
                         "[default: bf16-fa2]"),
    ("--round", MANY, "[fwd/|bwd/][L1/][H0,6-8/][MODULE/]SITE=FORMAT[:MODE]; repeatable, later wins."),
    ("--set", MANY, "A switch: delta_from=p_dp, tile=128,128, accumulator=hopper, …; repeatable."),
    ("--fix", str, "Of attention's row maximum: off, on, qiu-b2, qiu-b7, capped[:cap=…], FILE.py:NAME.  "
                   "[default: off]"),
    ("--algorithm", str, "flash or plain."),
    ("--loss-scale", str, "dynamic, or a power of two that the loss is multiplied by for the gradients.  "
                          "[default: dynamic where a gradient is fp16, else 1]"),
    ("--device", str, "auto, cpu or gpu.  [default: auto]"),
    ("--init", str, "Weights to begin with: GPT-2's as FILE.safetensors, or of RUN, RUN@STEP, a checkpoint."),
    ("--fork", str, "RUN@STEP: a new run that continues this checkpoint with the run's options and its batches; "
                    "flags change them. --precision also sets --round, --set, --algorithm, --loss-scale anew."),
    ("--eval-every", int, "Steps between losses on the validation text; 0 at the end alone.  [default: 0]"),
    ("--checkpoint-every", int, "Steps between checkpoints; 0 writes one at the end.  [default: 0]"),
    ("--keep", int, "Checkpoints kept, the last ones; 0 keeps all.  [default: 3]"),
    ("--log-every", int, "Steps between lines of the log and of metrics.csv.  [default: 20]"),
    ("--spectral-every", int, "Steps between spectral norms of the weights, in layers.h5; 0 never.  "
                              "[default: log-every]"),
    ("--watch", str, "Measure the roundings of these sites at every step, as attn or attn.pv,linear.y; the most "
                     "biased ones are logged, all go to layers.h5. Watching attn makes a step on a CPU about "
                     "three times as long."),
    ("--dump-every", int, "Steps between dumps of intermediates in dumps/; 0 never.  [default: 0]"),
    ("--dump-sites", str, "Sites of a dump: all, or names and prefixes with commas between.  [default: attn]"),
]


def _options(command: Any) -> Any:
    for name, kind, text in reversed(OPTIONS):
        command = click.option(name, help=text, **(kind if isinstance(kind, dict) else {"type": kind}))(command)
    return command


@click.command()
@_options
@click.option("--out", type=OUT_FOLDER, help="Run folder.  [default: runs/MODEL-PRECISION-FIX]")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its last checkpoint.")
@click.option("--config", type=str, help="TOML of these options, as a run's config.toml; flags override it.")
@click.option("--dry-run", is_flag=True, help="Print parameters, memory, FLOPs and time, and train nothing.")
def train(out: str | None, resume: bool, config: str | None, dry_run: bool, **flags: Any) -> None:
    """Train a GPT, every rounding as chosen.

    With no option: a small GPT on the language reference that Python carries, about a minute on two
    CPU cores, and a few lines of text from it at the end.

    A line of the log: the step; the loss in nats a token, in brackets its z-score, how many standard
    deviations it lies above the mean of the last 128 lines; the norm of the gradient before clipping;
    the learning rate; time and tokens a second; ties, the share of attention's rows whose maximum two
    or more keys have; val, the loss on the validation text. The first line says the accumulator, how dot
    products add: library is BLAS, whose bits depend on the machine; the others are defined to the bit.

    Ctrl-C writes a checkpoint and ends with exit code 130.

    \b
    cuflash train
    cuflash train --precision bf16 --fix on --steps 400 --out runs/cured
    cuflash train --precision bf16-fa2 --round attn.o=fp32 --round L1/attn.p=bf16:sr --watch attn
    cuflash train --resume --out runs/cured --steps 800
    cuflash train --model gpt2 --data train.bin --dry-run
    """
    from cuflash.model import session

    given = {name: value for name, value in flags.items() if value not in (None, ())}
    with user_errors():
        options = session.options(config, given)
        if "dump_sites" in given and not options.dump_every and not resume:
            raise ValueError("--dump-sites says what a dump has; say when there is one: --dump-every 100")
        if dry_run:
            for line in session.dry_run(options):
                click.echo(line)
            return
        run = session.resume(out, given, config) if resume else session.start(out, options, sys.argv[1:])
    progress = _progress(run.trainer.state.step, run.config.steps)
    with run, _stop_on_ctrl_c() as stopped, progress as (say, advance):
        try:
            run.train(say, advance, lambda: bool(stopped))
        except session.NonFinite as e:
            raise UserError(str(e)) from e
        except OSError as e:
            raise UserError(f"{e}; --resume --out {run.folder.path} continues from its last one") from e
    incomplete = bool(stopped) and run.trainer.state.step < run.config.steps
    click.echo(run.closing(incomplete))
    if incomplete:
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def _stop_on_ctrl_c() -> Iterator[list[int]]:
    """The first Ctrl-C asks the loop to end after its step with a checkpoint; a second one interrupts."""
    stopped: list[int] = []

    def ask(number: int, frame: Any) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, before)
        click.echo("\nstopping after this step; once more to stop at once", err=True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(step: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """(say, advance): in a terminal lines above a bar with the time left, in a pipe plain lines."""
    if not sys.stdout.isatty():
        yield (lambda text: print(text, flush=True)), None
        return
    from tqdm import tqdm
    options = {"unit": "step", "dynamic_ncols": True, "leave": False, "file": sys.stdout}
    with tqdm(total=steps, initial=step, **options) as bar:
        yield bar.write, lambda at: bar.update(at - bar.n)
