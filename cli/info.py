"""`cuflash info`: device, versions, what can run here and why not."""
import textwrap

import click


@click.command()
def info() -> None:
    """Device, versions, what can run here and why not."""
    from cuflash.environment import info as found
    for line in str(found()).splitlines():
        click.echo("\n".join(textwrap.wrap(line, 100, subsequent_indent=" " * 13, drop_whitespace=True,
                                           replace_whitespace=False, break_on_hyphens=False)) or "")
