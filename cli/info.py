"""`cuflash info`: device, versions, what can run here and why not."""
import secrets
import textwrap

import click


@click.command()
@click.option("--check", is_flag=True, help="Compare kernels and reference bit for bit on this GPU.")
@click.option("--seed", type=int, help="Of the inputs of --check; drawn and printed by default.")
def info(check: bool, seed: int | None) -> None:
    """Device, versions, what can run here and why not.

    \b
    cuflash info
    cuflash info --check
    """
    from cuflash.environment import info as found
    for line in str(found()).splitlines():
        click.echo("\n".join(textwrap.wrap(line, 100, subsequent_indent=" " * 13, drop_whitespace=True,
                                           replace_whitespace=False, break_on_hyphens=False)) or "")
    if check:
        _check(secrets.randbits(32) if seed is None else seed)


def _check(seed: int) -> None:
    from cuflash.cli.main import UserError
    from cuflash.cli.progress import Progress
    from cuflash.kernels import gpu_reason
    from cuflash.testing import OUTPUTS, check_device, device_cases
    reason = gpu_reason()
    if reason:
        raise UserError(f"info --check needs a GPU: {reason}")
    wrong, cases = [], len(device_cases("hopper"))
    with Progress(cases, "case") as progress:
        for case, names in check_device(seed):
            progress.advance()
            if names:
                wrong.append(f"{case.precision.describe()}, fix {case.fix}, {case.distribution} inputs, "
                             f"{case.heads}×{case.tq}×{case.tk}×{case.d}: {', '.join(names)}")
    if wrong:
        raise click.ClickException(f"kernel and reference differ in {len(wrong)} of {cases} cases (seed {seed}):\n"
                                   + "\n".join(wrong))
    click.echo(f"\nkernel and reference give the same bits: {cases} cases, {len(OUTPUTS)} outputs each (seed {seed})")
