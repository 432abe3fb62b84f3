"""Types of options that name what a command writes: checked as it is typed, before any work."""
import contextlib
import errno
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

import click

from cuflash.whole_file import beside, cannot_write, no_file, whole_file

STDOUT = "-"
_OTHERS = (".npz", ".npy", ".safetensors", ".pt", ".csv", ".json", ".txt", ".png", ".svg", ".pdf")
_STREAMS = ("device", "pipe")  # what text can be written to as it lies


class OutFile(click.ParamType):
    """A file that can be written, found out by writing an empty one beside it.

    straight: text, which may go to stdout (`-`), a pipe or a device too; `written` writes it.
    hdf5: it is HDF5, so that a name that says otherwise is refused.
    """

    name = "file"

    def __init__(self, *, straight: bool = False, hdf5: bool = False) -> None:
        self.straight, self.hdf5 = straight, hdf5

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        suffix = pathlib.PurePath(value).suffix.lower()
        if self.hdf5 and suffix in _OTHERS:
            self.fail(f"{value}: what is written is HDF5, not {suffix}: name it as {pathlib.PurePath(value).stem}.h5",
                      param, ctx)
        if self.straight and value in (STDOUT, "/dev/stdout"):
            return STDOUT
        try:
            kind = no_file(value)
            if self.straight and kind in _STREAMS:
                if not os.access(value, os.W_OK):
                    self.fail(_cannot_write(value, os.strerror(errno.EACCES)), param, ctx)
                return str(value)
            if kind:
                self.fail(_cannot_write(value, f"it is a {kind}"), param, ctx)
            partial = beside(value)
            new = not partial.exists()
            with open(partial, "ab"):
                pass
            if new:
                partial.unlink()
        except OSError as e:
            self.fail(_cannot_write(value, _reason(beside(value).parent, e)), param, ctx)
        return str(value)


class OutFolder(click.ParamType):
    """A folder that can be written to, or made."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = pathlib.Path(value)
        there = next(p for p in (path, *pathlib.Path(os.path.abspath(path)).parents) if os.path.lexists(p))
        if not there.is_dir():
            self.fail(_cannot_write(value, f"{there} is no folder"), param, ctx)
        try:
            with tempfile.TemporaryDirectory(dir=there):
                pass
        except OSError as e:
            self.fail(_cannot_write(value, _reason(there, e)), param, ctx)
        return str(value)


OUT_FILE, OUT_TEXT, OUT_HDF5, OUT_FOLDER = OutFile(), OutFile(straight=True), OutFile(hdf5=True), OutFolder()


@contextlib.contextmanager
def written(path: str) -> Iterator[TextIO]:
    """The text file to write to, of an option of type OUT_TEXT: stdout, a pipe or device as it lies, else a whole file.

    Raises:
        OSError: as `whole_file`.
    """
    if path == STDOUT:
        yield sys.stdout
    elif no_file(path) in _STREAMS:
        try:
            with open(path, "w", newline="", encoding="utf-8") as f:
                yield f
        except BrokenPipeError:  # the reader has gone: no mistake
            raise
        except OSError as e:
            raise cannot_write(path, e) from e
    else:
        with whole_file(path) as partial, open(partial, "w", newline="", encoding="utf-8") as f:
            yield f


def check_one_on_stdout(**paths: str | None) -> bool:
    """Whether one of these options writes to stdout, in place of the report; a ValueError where several do."""
    there = [f"--{name}" for name, path in paths.items() if path == STDOUT]
    if len(there) > 1:
        raise ValueError(f"{' and '.join(there)} cannot both write to stdout: give one of them a file")
    return bool(there)


def _cannot_write(path: Any, reason: str) -> str:
    return f"cannot write {path}: {reason}"


def _reason(folder: pathlib.Path, e: OSError) -> str:
    return (e.strerror or str(e)) if folder.is_dir() else f"no such folder as {folder}"
