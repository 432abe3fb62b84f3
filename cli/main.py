"""The `cuflash` command: a click group that imports a command's module only when it is called."""
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import click

from cuflash import __version__

# name: (module:function, the line of `cuflash --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("cuflash.cli.train:train", "Train a GPT, every rounding as chosen."),
    "sample": ("cuflash.cli.sample:sample", "Write text from a run's checkpoint."),
    "eval": ("cuflash.cli.eval:eval", "Loss of a checkpoint in nats and bits per byte, under any precision."),
    "export": ("cuflash.cli.export:export", "A run's weights as GPT-2 safetensors."),
    "dump": ("cuflash.cli.dump:dump", "Every chosen intermediate of one forward and backward pass, in HDF5."),
    "diff": ("cuflash.cli.diff:diff", "How two dumps, two runs or any two HDF5 files differ."),
    "plot": ("cuflash.cli.plot:plot", "Figures of runs, dumps, differences and audits."),
    "audit": ("cuflash.cli.audit:audit", "Which roundings of attention are biased, on captured q, k, v, dO."),
    "study": ("cuflash.cli.study:study", "The papers' studies: tables, figures, a report."),
    "sites": ("cuflash.cli.sites:sites", "The rounding sites and their formats under a precision."),
    "explain": ("cuflash.cli.explain:explain", "One rounding or one sum, shown bit by bit."),
    "bench": ("cuflash.cli.bench:bench", "Speed of the kernels, beside torch where it is installed."),
    "info": ("cuflash.cli.info:info", "Device, versions, what can run here and why not."),
}


# Options that make a command need less memory.
LESS_MEMORY = {
    "--batch-size": "a smaller --batch-size",
    "--grad-accum": "with as much more --grad-accum it trains the same",
    "--block-size": "a shorter --block-size",
    "--dry-run": "--dry-run says what a step takes",
}

INTERRUPTED = 130  # exit code after Ctrl-C, as a shell gives it

# What click 8.2 raises to show the help of a group that is called without a command.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


class LazyGroup(click.Group):
    """Lists COMMANDS without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), function)

    def resolve_command(self, ctx: click.Context, args: list[str]):  # noqa: ANN201 (click's own type)
        if args and args[0] not in COMMANDS:
            from cuflash.errors import unknown
            raise click.UsageError(str(unknown("command", args[0], COMMANDS)), ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """A mistake in a command's arguments is one line, and so is too little memory; Ctrl-C is no mistake."""
        try:
            return super().invoke(ctx)
        except _HELP:
            raise
        except KeyboardInterrupt as e:
            click.echo(err=True)
            raise click.exceptions.Exit(INTERRUPTED) from e
        except MemoryError as e:
            from cuflash.model.memory import shortage
            raise UserError(shortage(e) + self._with_less(ctx)) from e
        except click.UsageError as e:
            command = e.ctx.command_path if e.ctx else ctx.command_path
            raise UserError(f"{' '.join(e.format_message().split()).rstrip('.')} (see {command} --help)") from e

    def _with_less(self, ctx: click.Context) -> str:
        """What makes the command that was called need less memory, of the options that it has."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        has = {name for parameter in command.params for name in parameter.opts} if command else set()
        ways = [text for name, text in LESS_MEMORY.items() if name in has]
        return "; try " + ", ".join(ways) if ways else ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


class Group(click.Group):
    """A group whose help shows the whole first sentence of each command, over several lines where it is long."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000))
                                for name, command in sorted(self.commands.items())])


class UserError(click.ClickException):
    """A mistake of the user's: its message alone, exit code 2."""

    exit_code = 2


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Around a command's set-up, where ValueError, TypeError and OSError speak of what the user gave."""
    try:
        yield
    except BrokenPipeError:  # the reader of stdout has gone, as head does: no mistake, click ends quietly
        raise
    except (ValueError, TypeError, OSError) as e:
        raise UserError(str(e)) from e


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cuflash")
def main() -> None:
    """Flash attention in which every rounding step is explicit, switchable and measured."""


if __name__ == "__main__":
    main()
