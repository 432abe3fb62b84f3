"""Files that are whole or absent: written beside their name, flushed to the disk, renamed."""
import contextlib
import os
import pathlib
from collections.abc import Iterator


def beside(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where a file is written before it takes the name `path`."""
    path = pathlib.Path(path)
    return path.with_name(path.name + ".partial")


def publish(path: str | os.PathLike[str]) -> None:
    """The file beside `path` takes that name, once it is on the disk."""
    with open(beside(path), "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside(path), path)


def cannot_write(path: str | os.PathLike[str], e: OSError) -> OSError:
    """The system's error, its message naming `path`."""
    return OSError(e.errno, f"cannot write {path}: {e.strerror or e}")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives the path to write to; after the block that file takes the name `path`.

    Raises:
        OSError: as the system gave it, its message naming `path`; nothing is left behind, and a file that
            had this name before is whole.
    """
    try:
        yield beside(path)
        publish(path)
    except BaseException as e:
        beside(path).unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise cannot_write(path, e) from e
        raise
