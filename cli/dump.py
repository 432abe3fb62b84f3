"""`cuflash dump`: every chosen intermediate of one forward and backward pass of a model."""
import click

from cuflash.cli.main import user_errors
from cuflash.cli.numbers import numbers
from cuflash.cli.outputs import OUT_HDF5


@click.command()
@click.argument("run", metavar="RUN|WEIGHTS")
@click.option("--step", type=click.IntRange(min=0),
              help="Checkpoint of this step; the pass is that of the next.  [default: the last]")
@click.option("--data", help="Text or tokens, as for train.  [default: the run's]")
@click.option("--data-seed", type=click.IntRange(min=0), help="Of the batch.  [default: the run's]")
@click.option("--batch-size", type=click.IntRange(min=1),
              help="Samples of the step, at once.  [default: the run's micro-batches; of a file 1]")
@click.option("--sites", default="attn", show_default=True,
              help="all, or names and prefixes with commas between: attn.p, attn, fwd/attn.s, c_fc/linear.y.")
@click.option("--layers", metavar="LIST", help="Only these layers, as 0,2-3.")
@click.option("--heads", metavar="LIST", help="Only these query heads.")
@click.option("--batch", metavar="LIST", help="Only these samples.")
@click.option("--rows", metavar="LIST", help="Only these query rows (tokens).")
@click.option("--precision", help="Another precision than the run's.")
@click.option("--round", "rounds", multiple=True, metavar="[SCOPE/]SITE=FORMAT[:MODE]",
              help="Round a site otherwise.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
              help="Set a switch, as delta_from=p_dp.")
@click.option("--fix", help="Another fix of the row maximum than the run's.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or gpu.")
@click.option("-o", "--out", required=True, type=OUT_HDF5,
              help="The HDF5 file, replaced if it exists.")
def dump(run: str, step: int | None, data: str | None, data_seed: int | None, batch_size: int | None,
         sites: str, layers: str | None, heads: str | None, batch: str | None, rows: str | None,
         precision: str | None, rounds: tuple[str, ...], settings: tuple[str, ...], fix: str | None,
         device: str, out: str) -> None:
    """Every chosen intermediate of one forward and backward pass, in its true bits.

    Of RUN (a run folder, RUN@STEP, a checkpoint) or WEIGHTS (GPT-2 as FILE.safetensors, in precision bf16-fa2
    unless another is named). A checkpoint or WEIGHTS by themselves need --data.

    The pass is the one that training would do next: the weights of the checkpoint, the batch of the step
    after it. Another precision computes that pass from the same weights and batch otherwise, for `diff`.

    \b
    cuflash dump runs/nano-bf16-off -o bf16.h5
    cuflash dump runs/nano-bf16-off --precision fp32 -o fp32.h5
    cuflash dump runs/nano-bf16-off@800 --sites attn.s,attn.p --layers 1 --rows 0-63 -o p.h5
    cuflash dump gpt2.safetensors --data val.bin --sites attn.delta -o delta.h5
    """
    from cuflash.dump import Selection, read, recording
    from cuflash.errors import ranges
    from cuflash.model.passes import one_pass
    with user_errors():
        Selection(sites)
        chosen = {name: numbers(f"--{name}", text) for name, text in
                  (("layers", layers), ("heads", heads), ("batch", batch), ("rows", rows))}
        p = one_pass(run, step=step, data=data, data_seed=data_seed, batch_size=batch_size,
                     samples=chosen["batch"], precision=precision, rounds=rounds, settings=settings, fix=fix, device=device)
        m = p.header.model
        for name, count in (("layers", m.n_layer), ("heads", m.n_head), ("rows", m.block_size)):
            outside = [n for n in chosen[name] or () if n >= count]
            if outside:
                raise ValueError(f"--{name} {ranges(outside)}: the model has {name} 0 to {count - 1}")
        attributes = {"fix": str(p.model.fix), "data_sha256": p.data, "checkpoint": p.checkpoint}
        with recording(out, sites, **chosen, attributes=attributes):
            loss, _ = p.run()
        written = read(out)
    click.echo(
        f"{out}: {len(written)} sites of step {p.step} under {p.model.precision.describe()}, "
        f"fix {p.model.fix}, on the {'GPU' if p.model.gpu else 'CPU'}; loss {loss:.4f}")
