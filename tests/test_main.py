"""The command group: quick, and plain about a word it does not know."""
import importlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from cuflash import __version__
from cuflash.cli.main import COMMANDS, main, user_errors


def test_help_lists_the_commands_and_imports_none_of_them():
    code = (
        "import sys; from click.testing import CliRunner; from cuflash.cli.main import main; "
        "print(CliRunner().invoke(main, ['--help']).output); "
        "print([m for m in sys.modules if m in ('numpy', 'h5py', 'cupy') or m.startswith('cuflash.model')])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in output and line in output for name, (_, line) in COMMANDS.items())
    assert output.rstrip().endswith("[]")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_there(name):
    module, _, function = COMMANDS[name][0].partition(":")
    assert isinstance(getattr(importlib.import_module(module), function), click.Command)
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0 and f"{name} [OPTIONS]" in result.output


def test_version_and_unknown_words():
    assert __version__ in CliRunner().invoke(main, ["--version"]).output
    result = CliRunner().invoke(main, ["trian"])
    assert result.exit_code == 2 and "unknown command 'trian': did you mean 'train'?" in result.output


def test_a_users_mistake_is_a_message_a_programs_is_not():
    for mistake in (ValueError("x is 3"), TypeError("x is 3"), OSError(28, "x is 3")):
        with pytest.raises(click.ClickException, match="x is 3") as e, user_errors():
            raise mistake
        assert e.value.exit_code == 2
    with pytest.raises(ZeroDivisionError), user_errors():
        1 / 0
