"""`cuflash export`."""
import click

from cuflash.cli.main import user_errors
from cuflash.cli.outputs import OUT_FILE


@click.command()
@click.argument("run")
@click.option("--step", type=int, help="Checkpoint of this step.  [default: the last]")
@click.option("-o", "--out", "output", type=OUT_FILE, required=True, help="FILE.safetensors to write.")
def export(run: str, step: int | None, output: str) -> None:
    """Write the weights of RUN (a run folder, RUN@STEP or a checkpoint file) as GPT-2 safetensors.

    fp32, with the names of Hugging Face and its (in, out) weights. cuflash train --init reads them back.

    \b
    cuflash export runs/nano -o nano.safetensors
    cuflash export runs/nano --step 800 -o nano-800.safetensors
    """
    from cuflash.model.sample import load_model
    from cuflash.model.weights import write
    with user_errors():
        if not output.endswith(".safetensors"):
            raise ValueError(f"-o {output}: the name must end in .safetensors")
        model, header, at = load_model(run, step)
        write(output, header.model, model.params)
    click.echo(f"{header.model.n_params():,} parameters of step {at} in {output}")
