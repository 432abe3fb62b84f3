"""`cuflash sample`."""
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
    """Write text from the last checkpoint of RUN (a run folder or a checkpoint file), in its precision."""
    from cuflash.model.sample import decode, encode, generate, load_model
    with user_errors():
        model, header, _ = load_model(run, step)
        start = encode(prompt, header.tokens, header.model.vocab_size)
        written = list(generate(model, start, tokens, temperature=temperature, top_k=top_k, seed=seed))
    click.echo(decode(start + written, header.tokens))
