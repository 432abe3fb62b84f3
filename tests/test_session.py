"""What surrounds training: options from a file, units, where a run comes from."""
import subprocess

import pytest

from cuflash import __version__
from cuflash.model import session
from cuflash.model.memory import in_bytes


def test_a_config_files_mistakes_name_the_file(tmp_path):
    file = tmp_path / "bad.toml"
    for text, message in (('steps = "a"', "option steps must be int, got 'a'"), ("steps = 0", "--steps is 0; valid"),
                          ('precision = "bf61"', "unknown precision 'bf61'")):
        file.write_text(text)
        with pytest.raises(ValueError) as e:
            session.options(str(file), {})
        assert str(e.value).startswith(f"--config {file}: {message}")
    file.write_text("steps = 5")
    with pytest.raises(ValueError, match="^--lr is -1.0; valid"):  # a flag's own mistake
        session.options(str(file), {"lr": -1.0})
    assert session.options(str(file), {"lr": 0.5}).steps == 5


def test_units_follow_the_size():
    assert [in_bytes(n) for n in (3 << 20, 512 << 20, 3 << 30)] == ["3 MiB", "512 MiB", "3 GiB"]
    assert [session._seconds(s) for s in (0.0035, 0.5, 36.2, 150, 4e4, 4e5)] == [
        "3.5 ms", "500 ms", "36 s", "2.5 min", "11 h", "4.6 days"]


def test_the_commit_of_an_installed_copy_is_that_of_the_clone_it_runs_in(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(session, "__file__", str(tmp_path.parent / "installed.py"))
    monkeypatch.chdir(tmp_path)
    assert session._git_commit() == f"none: cuflash {__version__} as installed"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project")
    assert session._git_commit() == f"none: cuflash {__version__} as installed"
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "cuflash"\nversion = "{__version__}"\n')
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    assert session._git_commit() == head and len(head) == 40
