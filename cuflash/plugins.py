"""Loads a user's class from a file: `my.py:MyFix`, `my.py:MyFix:cap=80,beta=2`."""
import contextlib
import hashlib
import importlib.util
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any


class MissingFile(ValueError):
    """There is no such file of the user's; `path` is how it was named."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: no such file")
        self.path = path


def parse_parameters(text: str) -> dict[str, float]:
    """`cap=80,beta=2` -> {"cap": 80.0, "beta": 2.0}."""
    parameters = {}
    for item in text.split(","):
        name, eq, value = item.partition("=")
        try:
            parameters[name.strip()] = float(value)
        except ValueError:
            eq = ""
        if not eq or not name.strip():
            raise ValueError(f"parameter {item!r}: write NAME=NUMBER, several separated by commas")
    return parameters


def file_digest(path: str) -> str:
    """SHA-256 of a file; MissingFile if there is none."""
    if not pathlib.Path(path).is_file():
        raise MissingFile(path)
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def load_class(path: str, name: str, base: type) -> Any:
    """The class or instance `name` in the Python file `path`, checked to be (of) a subclass of `base`."""
    if not name:
        raise ValueError(f"{path!r}: write FILE.py:NAME, the name of a cuflash.{base.__name__} in it")
    file, digest = pathlib.Path(path), file_digest(path)[:16]
    spec = importlib.util.spec_from_file_location(f"cuflash_user_{file.stem}_{digest}", file)
    assert spec and spec.loader  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    with blame(path):
        spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if found is None:
        have = [n for n, v in vars(module).items() if _is(v, base) and v is not base]
        raise ValueError(f"{path!r} has no {name!r}; it has: {', '.join(have) or f'no {base.__name__}'}")
    if not _is(found, base):
        raise ValueError(f"{path}:{name} is not a cuflash.{base.__name__}")
    return found


def _is(x: Any, base: type) -> bool:
    return isinstance(x, base) or isinstance(x, type) and issubclass(x, base)


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Around a user's code: whatever it raises becomes a ValueError that names `what`, the error and the line."""
    try:
        yield
    except Exception as e:  # the user's code may raise anything; it is passed on, as a mistake of the user's
        if isinstance(e, SyntaxError):
            where = f" (line {e.lineno})"
        else:
            frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename.endswith(".py")]
            where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ValueError(f"{what}: {type(e).__name__}: {e}{where}") from e
