"""A run's folder: config.toml, metrics.csv, checkpoints/, and the lock of the process that writes it.

Whole files are written beside their name and renamed; metrics.csv grows by whole lines, one write
each. So a kill at any moment leaves nothing torn.
"""
import contextlib
import csv
import errno
import io
import math
import os
import pathlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cuflash.errors import ranges
from cuflash.plugins import MissingFile
from cuflash.whole_file import whole_file

if TYPE_CHECKING:
    from cuflash.dump import Dump
    from cuflash.model.layers import Layers

CONFIG = "config.toml"
METRICS = "metrics.csv"
CHECKPOINT = re.compile(r"step_(\d{8})\.h5")


class Run:
    """An existing run folder.

    Raises:
        ValueError: not a run folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        if not (self.path / CONFIG).is_file():
            raise ValueError(f"{self.path} is not a run folder: it has no {CONFIG}")

    def __repr__(self) -> str:
        dumps = self.dumps()
        return (f"<Run {self.path}: checkpoints {ranges(step for step, _ in self.checkpoints())}"
                + (f"; dumps {ranges(dumps)}>" if dumps else ">"))

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: dict[str, Any]) -> "Run":
        """Makes the folder and its config.toml; a ValueError where it holds a run already."""
        path = pathlib.Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out {path}: is a file, not a folder")
        if (path / CONFIG).exists():
            raise ValueError(
                f"--out {path}: holds a run already; --resume continues it, another --out starts anew")
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_whole(path / CONFIG, lambda partial: partial.write_text(to_toml(config), encoding="utf-8"))
        return cls(path)

    @property
    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{self.path / CONFIG} is damaged: {e}") from e

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each a dict of its columns; NaN where nothing was measured. A last line that was
        cut off is none."""
        text = (self.path / METRICS).read_text(encoding="utf-8")
        lines = text[:text.rfind("\n") + 1].splitlines()
        try:
            return [{k: float(v) if v else math.nan for k, v in row.items()} for row in csv.DictReader(lines)]
        except (ValueError, TypeError) as e:  # TypeError: a row with more columns than the header
            raise ValueError(f"{self.path / METRICS} is damaged: {e}") from e

    def checkpoints(self) -> list[tuple[int, pathlib.Path]]:
        """(step, file), steps ascending."""
        found = ((CHECKPOINT.fullmatch(f.name), f) for f in (self.path / "checkpoints").glob("*.h5"))
        return sorted((int(match[1]), f) for match, f in found if match)

    @property
    def layers(self) -> "Layers":
        """Spectral norms and site statistics over the steps: `run.layers["spectral/L01/q"]`, `.steps`."""
        from cuflash.model.layers import LAYERS, Layers
        if not (self.path / LAYERS).is_file():
            raise ValueError(f"{self.path} has no {LAYERS} yet: it is written with each checkpoint")
        return Layers.load(self.path / LAYERS)

    def dump_path(self, step: int) -> pathlib.Path:
        return self.path / "dumps" / f"step_{step:08d}.h5"

    def dumps(self) -> list[int]:
        """Steps of the dumps, ascending."""
        return sorted(int(m[1]) for f in (self.path / "dumps").glob("*.h5") if (m := CHECKPOINT.fullmatch(f.name)))

    def dump(self, step: int) -> "Dump":
        """The dump of a step: `run.dump(100).read("attn.p", layer=1)`."""
        from cuflash.dump import read
        if not self.dump_path(step).is_file():
            raise ValueError(f"{self.path} has no dump of step {step}; it has {ranges(self.dumps())}: "
                             "cuflash train --dump-every writes them, cuflash dump one of any checkpoint")
        return read(self.dump_path(step))

    def checkpoint_path(self, step: int) -> pathlib.Path:
        return self.path / "checkpoints" / f"step_{step:08d}.h5"

    def keep_last(self, count: int) -> None:
        """Removes all but the last `count` checkpoints; 0 keeps all."""
        for _, path in self.checkpoints()[:-count] if count else []:
            path.unlink()

    def lock(self) -> "Lock":
        """Held by the process that writes the run; a ValueError where another holds it."""
        return Lock(self.path)


class Lock:
    """An advisory lock on a folder, which the system drops when its process ends, however it ends."""

    def __init__(self, path: pathlib.Path, what: str = "run folder") -> None:
        self._file = open(path / ".lock", "w")  # noqa: SIM115 (open as long as the lock is held)
        try:
            if sys.platform == "win32":
                import msvcrt
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._file.close()
            raise ValueError(f"{what} {path} is in use: another process is writing to it") from e

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        self._file.close()


class Metrics:
    """Appends rows to metrics.csv. On resume, rows after the checkpoint's step (and a torn last line) go."""

    def __init__(self, path: pathlib.Path, columns: list[str], *, after: int | None = None) -> None:
        self.columns = columns
        kept = [columns]
        if after is not None and path.exists():
            with open(path, newline="", encoding="utf-8") as f:
                lines = f.read().split("\r\n")[:-1]
            rows = list(csv.reader(lines))
            if not rows or rows[0] != columns:
                raise ValueError(f"{path}: its columns are not those of this version; it cannot be continued")
            kept += [row for row in rows[1:] if int(row[0]) <= after]
        text = io.StringIO()
        csv.writer(text).writerows(kept)
        write_whole(path, lambda partial: partial.write_text(text.getvalue(), encoding="utf-8", newline=""))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)

    def write(self, row: dict[str, float | int | str]) -> None:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="").writerow(row)
        line = text.getvalue().encode()
        try:
            if self._file.write(line) < len(line):  # the disk had room for a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise OSError(e.errno, f"cannot write {self._file.name}: {e.strerror}") from e

    def close(self) -> None:
        self._file.close()


def checkpoint_of(source: str | os.PathLike[str], argument: str = "RUN",
                  step: int | None = None) -> pathlib.Path:
    """The file of RUN (its last checkpoint), RUN@STEP, or a checkpoint's own path.

    step: instead of the last, where the source names none.

    Raises:
        ValueError: there is none; the message names the argument.
    """
    named, asked = f"{argument} {source}", f"--step {step}"
    name, at, digits = str(source).rpartition("@")
    if at and digits.isdecimal() and not pathlib.Path(source).exists():
        source, step, asked = name, int(digits), named
    path = pathlib.Path(source)
    if not path.exists():
        raise ValueError(f"{named}: no such file or run folder")
    if path.is_file():
        return path
    found = dict(Run(path).checkpoints())
    if not found:
        raise ValueError(f"{named}: has no checkpoint yet")
    if step is not None and step not in found:
        raise ValueError(f"{asked}: no such checkpoint in {path}; it has {ranges(found)}")
    return found[max(found) if step is None else step]


def run_step(source: str | os.PathLike[str]) -> tuple[Run, int | None] | None:
    """The run, and the step if it is given, that RUN or RUN@STEP names; None for a file (a checkpoint, weights).

    Raises:
        ValueError: a folder that is no run.
    """
    name, _, digits = str(source).rpartition("@")
    if os.path.exists(source) or not digits.isdecimal():
        return (Run(source), None) if os.path.isdir(source) else None
    return (Run(name), int(digits)) if os.path.isdir(name) else None


def run_of(source: str | os.PathLike[str]) -> Run | None:
    """The run that RUN or RUN@STEP names; None for a file."""
    found = run_step(source)
    return found and found[0]


@contextlib.contextmanager
def of_users_files(source: str | os.PathLike[str], folder: pathlib.Path) -> Iterator[None]:
    """Around what loads the fix and rounding modes of a run: a ValueError that says which run wants which file."""
    try:
        yield
    except MissingFile as e:
        kept = folder / "plugins" / pathlib.Path(e.path).name
        copy = f"copy {kept} to {e.path}, or " if kept.is_file() else ""
        raise ValueError(f"{source} was trained with {e.path}, which is not here: {copy}call cuflash in the folder "
                         "that it was trained in") from e


def write_whole(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Calls write(partial), flushes that file to the disk and renames it to path.

    Raises:
        OSError: as the system gave it, its message naming `path`; nothing is left behind.
    """
    with whole_file(path) as partial:
        write(partial)


def next_free(parent: pathlib.Path, stem: str) -> pathlib.Path:
    """parent/stem, or with -2, -3, … the first that does not exist."""
    path, n = parent / stem, 1
    while path.exists():
        n += 1
        path = parent / f"{stem}-{n}"
    return path


def to_toml(data: dict[str, Any]) -> str:
    """A dict of scalars, lists of scalars and dicts of such, as TOML."""
    lines: list[str] = []

    def table(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if not isinstance(value, dict):
                lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
        for key, value in values.items():
            if isinstance(value, dict):
                name = prefix + _toml_key(key)
                lines.extend(["", f"[{name}]"])
                table(name + ".", value)

    table("", data)
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04X}", escaped) + '"'
