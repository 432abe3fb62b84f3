"""`cuflash eval`."""
import math

import click

from cuflash.cli.main import user_errors
from cuflash.cli.progress import Progress


@click.command()
@click.argument("run")
@click.option("--step", type=int, help="Checkpoint of this step.  [default: the last]")
@click.option("--data", help="As of train.  [default: the run's]")
@click.option("--split", default="val", show_default=True, help="Part of the data: val or train.")
@click.option("--blocks", type=click.IntRange(1), help="Blocks of the text, from its beginning.  [default: all]")
@click.option("--batch-size", type=click.IntRange(1), help="Blocks at once.  [default: the run's, or 8]")
@click.option("--precision", multiple=True,
              help="Name or TOML file, repeatable: differences to the first one are shown.  [default: the run's]")
@click.option("--round", "rounds", multiple=True, help="As of train, in each precision; repeatable.")
@click.option("--set", "settings", multiple=True, help="As of train, in each precision; repeatable.")
@click.option("--fix", help="As of train.  [default: the run's]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or gpu.")
@click.option("--bytes-per-token", type=click.FloatRange(0, min_open=True),
              help="Of the text, where tokens are no bytes: gives bits per byte.")
def eval(run: str, step: int | None, data: str | None, split: str, blocks: int | None,  # noqa: A001 (its name)
         batch_size: int | None, precision: tuple[str, ...], rounds: tuple[str, ...], settings: tuple[str, ...],
         fix: str | None, device: str, bytes_per_token: float | None) -> None:
    """Loss of RUN (a run folder, RUN@STEP, a checkpoint, GPT-2 as FILE.safetensors) in nats and bits per byte.

    Each block of the text counts by itself, so its first tokens have little context. ± is a standard error, of
    differences too, which are taken batch by batch.

    \b
    cuflash eval runs/nano --precision fp32 --precision bf16 --precision bf16-fa2
    cuflash eval runs/nano --step 800 --blocks 64 --round attn.o=fp32
    cuflash eval gpt2.safetensors --data val.bin --blocks 16 --bytes-per-token 4.5
    """
    from cuflash.errors import unknown
    from cuflash.fixes import as_fix
    from cuflash.model import data as texts
    from cuflash.model.config import resolve
    from cuflash.model.evaluate import SPLITS, evaluate
    from cuflash.model.evaluate import blocks as blocks_of
    from cuflash.model.gpu import placed
    from cuflash.model.run import run_of
    from cuflash.model.sample import load_model
    from cuflash.precision import as_precision

    with user_errors():
        if split not in SPLITS:
            raise unknown("--split", split, SPLITS)
        model, header, at = load_model(run, step)
        if folder := run_of(run):
            config = resolve(folder.config["train"])
            data, batch_size = data or config.data, batch_size or config.batch_size
        if data is None:
            raise ValueError(f"RUN {run}: is no run folder, so it says nothing of data: name some with --data")
        loaded = texts.load(data)
        loaded.check(header.model.vocab_size, header.model.block_size)
        bases = map(as_precision, precision) if precision else [model.precision]
        precisions = [p.set(*settings).round(*rounds) for p in bases]
        fixed = as_fix(header.fix if fix is None else fix)
        params = [placed(header.model, model.params, p, fixed, device) for p in precisions]
    text = blocks_of(loaded, split, header.model.block_size, blocks)
    click.echo(f"step {at} of {run} | {loaded.name}, {split}: {len(text):,} blocks of {header.model.block_size}")
    if loaded.kind == "bytes":
        bytes_per_token = 1.0
    unit = "bits/token" if bytes_per_token is None else "bits/byte"
    width = max(len(p.name) for p in precisions)
    columns = f"{'precision':{width}}  {'nats/token':>18}  {unit:>10}"
    click.echo(columns + (f"  {'to the first':>22}" if len(precisions) > 1 else ""))
    done = []
    for p, given in zip(precisions, params):
        with Progress(len(text), "block") as progress:
            found = evaluate(header, given, p, fixed, text, batch_size or 8, progress.advance)
        line = f"{p.name:{width}}  {_plus_minus(found.loss, found.se()):>18}"
        line += f"  {found.loss / math.log(2) / (bytes_per_token or 1):10.4f}"
        if done:
            line += f"  {_plus_minus(found.loss - done[0].loss, found.se(done[0]), '+.6f'):>22}"
        done.append(found)
        click.echo(line)


def _plus_minus(value: float, se: float, form: str = ".4f") -> str:
    return f"{value:{form}}" + ("" if math.isnan(se) else f" ± {se:{form.lstrip('+')}}")
