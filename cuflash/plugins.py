"""Loads a user's class from a file: `my.py:MyFix`, `my.py:MyFix:cap=80,beta=2`."""
import hashlib
import importlib.util
import pathlib
from typing import Any


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


def load_class(path: str, name: str, base: type) -> Any:
    """The class or instance `name` in the Python file `path`, checked to be (of) a subclass of `base`."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"{path!r}: no such file (given as {path}:{name})")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(f"cuflash_user_{file.stem}_{digest}", file)
    assert spec and spec.loader  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if found is None:
        have = [n for n, v in vars(module).items() if isinstance(v, base) or isinstance(v, type) and issubclass(v, base)]
        raise ValueError(f"{path!r} has no {name!r}; it has: {', '.join(have) or f'no {base.__name__}'}")
    if not (isinstance(found, base) or isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path}:{name} is not a cuflash.{base.__name__}")
    return found
