"""The command group: quick, and plain about a word it does not know."""
import importlib
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from cuflash import __version__
from cuflash.cli.main import COMMANDS, INTERRUPTED, main, user_errors


def commands() -> list[tuple[str, click.Command]]:
    """Every command with its words, those of groups too."""
    found = [(name, main.get_command(None, name)) for name in COMMANDS]
    return [(f"{name} {sub}" if sub else name, command) for name, c in found
            for sub, command in (c.commands.items() if isinstance(c, click.Group) else [("", c)])]


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


@pytest.mark.parametrize("group", ["study", "bench"])
def test_a_group_says_its_commands_in_whole_sentences(group):
    lines = CliRunner().invoke(main, [group, "--help"]).output.partition("Commands:\n")[2]
    assert lines.count("\n") > 1 and "..." not in lines


def test_version_and_unknown_words():
    assert __version__ in CliRunner().invoke(main, ["--version"]).output
    result = CliRunner().invoke(main, ["trian"])
    assert result.exit_code == 2 and "unknown command 'trian': did you mean 'train'?" in result.output


@pytest.mark.parametrize("arguments, words", [
    (["audit", "nofile.npz"], "nofile.npz: no such file or run folder"), (["sample"], "Missing argument 'RUN'"),
    (["train", "--steps", "x"], "'--steps': 'x' is not a valid integer"), (["info", "--chekc"], "'--check'"),
    (["trian"], "did you mean 'train'?"), (["bench", "attention", "--against", "jax"], "'--against'"),
])
def test_every_mistake_is_one_line_and_exit_code_2(arguments, words):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and words in result.output
    assert result.output.startswith("Error: ") and len(result.output.splitlines()) == 1


def test_ctrl_c_is_quiet_and_130(monkeypatch):
    def interrupt(*a):
        raise KeyboardInterrupt

    monkeypatch.setattr("cuflash.environment.info", interrupt)
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == INTERRUPTED == 130 and not result.output.strip()


def test_help_has_examples_that_parse():
    """Each command shows two or more of itself, with options that it has."""
    for name, command in commands():
        text = CliRunner().invoke(main, [*name.split(), "-h"]).output
        examples = [line.strip() for line in text.splitlines() if line.startswith(f"  cuflash {name}")]
        assert len(examples) >= 2, name
        assert max(map(len, text.splitlines())) <= 100, name
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for line in examples:
            used = {w for w in shlex.split(line, comments=True) if re.match(r"--?[a-z]", w)}
            assert used <= known, (line, used - known)


@pytest.mark.skipif(sys.platform == "win32", reason="closed pipes are another error there")
def test_a_reader_that_leaves_is_no_mistake():
    code = "from cuflash.cli.main import main; main(['diff', *__import__('sys').argv[1:], '--all'])"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "many.h5")
        with h5py.File(file, "w") as f:
            for i in range(2000):
                f[f"a{i}"] = np.zeros(1)
        process = subprocess.Popen([sys.executable, "-c", code, file, file], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(timeout=60) == 1


def test_install_hints_name_an_extra_of_the_project():
    root = pathlib.Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for folder in ("cuflash", "model", "cli", "docs"):
        for file in (f for f in (root / folder).rglob("*") if f.suffix in (".py", ".md")):
            text = file.read_text(encoding="utf-8")
            assert "install 'cuflash[" not in text, file  # no index has it, and a clone none of that name
            for names in re.findall(r"\binstall\(('\w+'(?:, '\w+')*)\)", text.replace('"', "'")):
                assert set(re.findall(r"\w+", names)) <= set(extras), file


def test_a_users_mistake_is_a_message_a_programs_is_not():
    for mistake in (ValueError("x is 3"), TypeError("x is 3"), OSError(28, "x is 3")):
        with pytest.raises(click.ClickException, match="x is 3") as e, user_errors():
            raise mistake
        assert e.value.exit_code == 2
    with pytest.raises(ZeroDivisionError), user_errors():
        1 / 0
