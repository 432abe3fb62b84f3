"""`cuflash sample`."""
from itertools import chain

import click

from cuflash.cli.main import user_errors


@click.command()
@click.argument("run")
@click.option("--step", type=int, help="Checkpoint of this step.  [default: the last]")
@click.option("--prompt", default="", help="What to continue: text, or numbers where tokens are numbers.")
@click.option("--tokens", type=click.IntRange(1), default=400, show_default=True, help="How many to write.")
@click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True,
              help="0 takes the likeliest.")
@click.option("--top-k", type=click.IntRange(0), default=0, show_default=True,
              help="Draw among so many of the likeliest; 0: all.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
def sample(run: str, step: int | None, prompt: str, tokens: int, temperature: float, top_k: int,
           seed: int) -> None:
    """Write text from the last checkpoint of RUN (a run folder or a checkpoint file), in its precision.

    It appears as it is drawn. Control characters other than newline and tab are shown as \\x1b.

    \b
    cuflash sample runs/nano-bf16-fa2-off
    cuflash sample runs/nano-bf16-fa2-off --prompt "The with statement" --tokens 200 --temperature 0.5
    cuflash sample runs/nano-bf16-fa2-off --step 800 --top-k 20 --seed 7
    """
    from cuflash.model.sample import encode, generate, load_model, pieces, printable
    with user_errors():
        model, header, _ = load_model(run, step)
        start = encode(prompt, header.tokens, header.model.vocab_size)
        drawn = generate(model, start, tokens, temperature=temperature, top_k=top_k, seed=seed)
        for text in pieces(chain(start, drawn), header.tokens):
            click.echo(printable(text), nl=False)
    click.echo()
