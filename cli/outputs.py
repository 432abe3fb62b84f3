"""Types of options that name what a command writes: checked as it is typed, before any work."""
import os
import pathlib
import tempfile
from typing import Any

import click

from cuflash.whole_file import beside


class OutFile(click.ParamType):
    """A file that can be written, found out by writing an empty one beside it."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = pathlib.Path(value)
        if path.is_dir():
            self.fail(_cannot_write(value, "it is a folder"), param, ctx)
        partial = beside(path)
        try:
            new = not partial.exists()
            with open(partial, "ab"):
                pass
            if new:
                partial.unlink()
        except OSError as e:
            self.fail(_cannot_write(value, _reason(path.parent, e)), param, ctx)
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


OUT_FILE, OUT_FOLDER = OutFile(), OutFolder()


def _cannot_write(path: Any, reason: str) -> str:
    return f"cannot write {path}: {reason}"


def _reason(folder: pathlib.Path, e: OSError) -> str:
    return (e.strerror or str(e)) if folder.is_dir() else f"no such folder as {folder}"
