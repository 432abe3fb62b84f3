"""Files that are whole or absent: written beside their name, flushed to the disk, renamed."""
import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator

_KINDS = ((stat.S_ISDIR, "folder"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"), (stat.S_ISFIFO, "pipe"),
          (stat.S_ISSOCK, "socket"))


def no_file(path: str | os.PathLike[str]) -> str | None:
    """What lies at `path`, links followed, where it is no regular file: `folder`, `device`, `pipe`, `socket`.

    Raises:
        OSError: it cannot be told, as where a link leads to itself.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    return next((word for is_kind, word in _KINDS if is_kind(mode)), None)


def beside(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where a file is written before it takes the name `path`; of a link beside what it leads to."""
    path = pathlib.Path(os.path.realpath(path))
    return path.with_name(path.name + ".partial")


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """OSError where something lies at `path` that a file must not take the place of."""
    try:
        kind = no_file(path)
    except OSError as e:
        raise cannot_write(path, e) from e
    if kind:
        raise OSError(errno.EEXIST, f"cannot write {path}: it is a {kind}")


def publish(path: str | os.PathLike[str]) -> None:
    """The file beside `path` takes that name, once it is on the disk; a link stays one."""
    with open(beside(path), "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside(path), os.path.realpath(path))


def cannot_write(path: str | os.PathLike[str], e: OSError) -> OSError:
    """The system's error, its message naming `path`."""
    return OSError(e.errno, f"cannot write {path}: {e.strerror or e}")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives the path to write to; after the block that file takes the name `path`.

    Raises:
        OSError: as the system gave it, its message naming `path`; nothing is left behind, and a file that
            had this name before is whole. Also where `path` is a folder, a device or a pipe.
    """
    check_replaceable(path)
    try:
        yield beside(path)
        publish(path)
    except BaseException as e:
        beside(path).unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise cannot_write(path, e) from e
        raise
