"""Every option that names something to write: refused before any work, in one line, with the same words."""
import pathlib

import click
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.cli.outputs import OUT_FILE, OUT_FOLDER, OutFile, OutFolder
from tests.test_main import commands


def output_options() -> list[tuple[str, click.Option]]:
    return [(name, option) for name, command in commands() for option in command.params
            if isinstance(option, click.Option) and isinstance(option.type, (OutFile, OutFolder))]


def test_every_command_that_writes_checks_first():
    found = {(name, option.opts[-1]) for name, option in output_options()}
    assert found >= {("train", "--out"), ("dump", "--out"), ("audit", "--out"), ("audit", "--json"), ("diff", "--csv"),
                     ("diff", "--json"), ("plot", "--out"), ("export", "--out")}
    for name, command in commands():
        for option in command.params:
            writes = {"-o", "--out", "--csv", "--json"} & set(option.opts)
            assert not writes or option.type in (OUT_FILE, OUT_FOLDER), (name, option.opts)


@pytest.mark.parametrize("name, option", output_options())
def test_what_cannot_be_written_is_one_line_before_any_work(tmp_path, monkeypatch, name, option):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    arguments = [p for p in dict(commands())[name].params if isinstance(p, click.Argument)]
    flag = option.opts[-1]
    wanted = "file/x" if option.type is OUT_FOLDER else "nowhere/x"
    # No source is there either: nothing else is looked at before the outputs.
    result = CliRunner().invoke(main, [*name.split(), flag, wanted, *(["source"] * bool(arguments))])
    assert result.exit_code == 2
    assert f"'{flag}': cannot write {wanted}: " in result.output and len(result.output.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_nothing_is_left_behind_and_nothing_is_touched(tmp_path):
    there, partial = tmp_path / "there.h5", tmp_path / "there.h5.partial"
    there.write_bytes(b"old")
    assert OUT_FILE.convert(str(there), None, None) == str(there)
    assert OUT_FOLDER.convert(str(tmp_path / "new" / "run"), None, None) == str(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == [there] and there.read_bytes() == b"old"
    partial.write_bytes(b"another process writes this")
    OUT_FILE.convert(str(there), None, None)
    assert partial.read_bytes() == b"another process writes this"
    with pytest.raises(click.BadParameter, match="it is a folder"):
        OUT_FILE.convert(str(tmp_path), None, None)
