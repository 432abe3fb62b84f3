"""Every option that names something to write: refused before any work, in one line, with the same words."""
import json
import os
import pathlib
import stat
import threading

import click
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.cli.outputs import OUT_FILE, OUT_FOLDER, OUT_HDF5, OUT_TEXT, OutFile, OutFolder, written
from cuflash.dump import recording
from cuflash.whole_file import whole_file
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
            assert not writes or option.type in (OUT_FILE, OUT_TEXT, OUT_HDF5, OUT_FOLDER), (name, option.opts)


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


@pytest.mark.parametrize("command", ["dump", "audit"])
def test_a_name_that_says_another_format_than_hdf5_is_refused(command):
    found = CliRunner().invoke(main, [command, "source", "-o", "there/x.npz"])
    assert found.exit_code == 2 and "what is written is HDF5, not .npz: name it as x.h5" in found.output


# ---- what is no regular file --------------------------------------------------------------------

def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, ahead = tmp_path / "there" / "x", tmp_path / "link", tmp_path / "ahead"
    target.write_text("old")
    link.symlink_to(target)
    ahead.symlink_to(tmp_path / "there" / "new")
    for path in (link, ahead):
        assert OUT_FILE.convert(str(path), None, None) == str(path)
        with whole_file(path) as partial:
            assert partial.parent == target.parent
            partial.write_text("new")
        assert path.is_symlink() and path.read_text() == "new"
    assert target.read_text() == "new" and sorted(p.name for p in target.parent.iterdir()) == ["new", "x"]


def test_a_link_to_itself_is_refused_and_stays(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    for kind in (OUT_FILE, OUT_TEXT):
        with pytest.raises(click.BadParameter, match="cannot write .*a: Too many levels of symbolic links"):
            kind.convert(str(tmp_path / "a"), None, None)
    with pytest.raises(OSError, match="cannot write .*a: "), whole_file(tmp_path / "a"):
        pytest.fail("nothing is written")
    assert (tmp_path / "a").is_symlink()


def test_a_pipe_is_no_place_for_a_whole_file_and_stays(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(click.BadParameter, match=f"cannot write {path}: it is a pipe"):
            OUT_FILE.convert(str(path), None, None)
        with pytest.raises(OSError, match=f"cannot write {path}: it is a pipe"), whole_file(path):
            pytest.fail("nothing is written")
        with pytest.raises(OSError, match=f"cannot write {path}: it is a pipe"), recording(path):
            pytest.fail("nothing is recorded")
    assert stat.S_ISFIFO(os.lstat(pipe).st_mode) and link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_text_is_written_to_a_pipe_as_it_lies(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    assert OUT_TEXT.convert(str(pipe), None, None) == str(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with written(str(pipe)) as f:
        f.write("1,2\n")
    reader.join()
    assert read == ["1,2\n"] and stat.S_ISFIFO(os.lstat(pipe).st_mode)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_text_on_stdout_takes_the_place_of_the_report(name):
    found = CliRunner().invoke(main, ["audit", "--monte-carlo", "--precision", "bf16", "--json", name])
    assert found.exit_code == 0 and json.loads(found.stdout)["bias"]
