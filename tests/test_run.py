import errno
import math
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from cuflash.model.run import Metrics, Run, next_free, to_toml, write_whole
from tests.test_cli import run as command

CONFIG = {
    "steps": 3,
    "lr": 1e-3,
    "bias": False,
    "name": 'a "b"\\\n',
    "list": ["x", "y"],
    "train": {"a b": 1, "sub": {"attn.s": "fp32"}},
}


def test_toml_reads_back():
    assert tomllib.loads(to_toml(CONFIG)) == CONFIG


def test_a_run_is_made_once(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    assert run.config == CONFIG and Run(tmp_path / "r").config == CONFIG
    with pytest.raises(
        ValueError, match="holds a run already; --resume continues it, another --out starts anew"
    ):
        Run.create(tmp_path / "r", CONFIG)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file, not a folder"):
        Run.create(tmp_path / "file", CONFIG)
    with pytest.raises(ValueError, match="is not a run folder: it has no config.toml"):
        Run(tmp_path)


def test_names_that_are_free(tmp_path):
    assert next_free(tmp_path, "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert next_free(tmp_path, "a") == tmp_path / "a-3"


def test_checkpoints_by_step_and_the_last_kept(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    for step in (5, 40, 300):
        run.checkpoint_path(step).touch()
    (tmp_path / "checkpoints" / "step_00000999.h5.partial").touch()
    assert [step for step, _ in run.checkpoints()] == [5, 40, 300]
    run.keep_last(0)
    assert len(run.checkpoints()) == 3
    run.keep_last(2)
    assert [step for step, _ in run.checkpoints()] == [40, 300]


def test_a_second_process_is_refused_while_one_writes(tmp_path):
    run = Run.create(tmp_path, CONFIG)
    code = (
        "import sys; from cuflash.model.run import Run\n"
        "with Run(sys.argv[1]).lock(): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="is in use: another process is writing to it"):
            run.lock()
    finally:
        other.kill()  # the lock ends with its process
        other.communicate(timeout=30)
    with run.lock():
        pass


def test_metrics_grow_by_lines_and_resume_after_a_step(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = Metrics(path, ["step", "loss", "val_loss"])
    for step in (10, 20, 30):
        metrics.write({"step": step, "loss": step / 3})
    metrics.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b"40,1.2e-")  # torn
    Run.create(tmp_path, CONFIG)
    assert [row["step"] for row in Run(tmp_path).metrics] == [10, 20, 30]
    metrics = Metrics(path, ["step", "loss", "val_loss"], after=20)
    metrics.write({"step": 30, "loss": 10.0})
    metrics.close()
    assert path.read_bytes() == whole
    rows = Run(tmp_path).metrics
    assert (
        [row["step"] for row in rows] == [10, 20, 30]
        and rows[0]["loss"] == 10 / 3
        and math.isnan(rows[0]["val_loss"])
    )
    with pytest.raises(ValueError, match="its columns are not those of this version"):
        Metrics(path, ["step"], after=20)


def test_a_line_for_which_the_disk_has_no_room_is_told(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv", ["step", "loss"])
    metrics.close()

    class Full:
        name = "metrics.csv"

        def write(self, line):
            return len(line) - 3  # as write(2) on a disk that becomes full
    metrics._file = Full()
    with pytest.raises(OSError, match="cannot write metrics.csv: No space left"):
        metrics.write({"step": 10, "loss": 1.0})


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "x"
    write_whole(path, lambda partial: partial.write_text("old"))

    def fail(partial: pathlib.Path) -> None:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="cannot write .*x: No space left on device"):
        write_whole(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_run_says_what_it_holds(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    assert repr(run) == f"<Run {tmp_path / 'r'}: checkpoints none>"
    for step in (7, 8, 9, 20):
        run.checkpoint_path(step).touch()
    (tmp_path / "r" / "dumps").mkdir()
    run.dump_path(8).touch()
    assert repr(run) == f"<Run {tmp_path / 'r'}: checkpoints 7-9, 20; dumps 8>"


USERS = """
import numpy as np
from cuflash import Fix, Mode

away = Mode("away", up=lambda fraction, rest, odd, negative, word: np.ones_like(rest), cuda="true")


class Shift(Fix):
    name = "shift"
    parameters = {"by": 1.0}

    def rule(self, r_m, ties):
        return r_m + self.by
"""


@pytest.mark.parametrize("own", [("--fix", "my.py:Shift:by=2"), ("--round", "attn.p=bf16:my.py:away")])
def test_a_run_whose_users_file_is_not_here_says_what_to_do(tmp_path, monkeypatch, own):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cuflash.model.session.SAMPLE_TOKENS", 5)
    tiny = ("--n-layer", "1", "--n-head", "1", "--n-embd", "8", "--block-size", "8", "--batch-size", "2", "--steps", "2",
            "--data", "synthetic:words,size=5000", "--device", "cpu", "--precision", "bf16")
    pathlib.Path("my.py").write_text(USERS)
    command("train", *tiny, *own, "--out", "r")
    pathlib.Path("my.py").unlink()
    kept = pathlib.Path("r", "plugins", "my.py")
    message = f" was trained with my.py, which is not here: copy {kept} to my.py, or call cuflash in the folder"
    file = str(Run("r").checkpoint_path(2))
    for source, arguments in (("r", ["sample", "r"]), ("r@2", ["eval", "r@2"]), ("r", ["dump", "r", "-o", "x.h5"]),
                              (file, ["audit", file, "--data", "pydoc"]), ("r", ["export", "r", "-o", "x.safetensors"]),
                              ("r", ["train", "--resume", "--out", "r", "--steps", "3"]),
                              ("r@2", ["train", "--fork", "r@2", "--steps", "3", "--out", "f"])):
        assert f"Error: {source}{message}" in command(*arguments, code=2), arguments
    pathlib.Path("my.py").write_bytes(kept.read_bytes())
    assert command("sample", "r", "--tokens", "2")
