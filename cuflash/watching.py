"""A watch for all calls inside a `with` block, without passing it to each."""
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuflash.sites import Watch

_WATCHES: ContextVar[tuple["Watch", ...]] = ContextVar("watches", default=())


@contextlib.contextmanager
def watching(watch: "Watch") -> Iterator[None]:
    """Every attention call and training step inside the block shows its roundings to `watch`, too."""
    token = _WATCHES.set((*_WATCHES.get(), watch))
    try:
        yield
    finally:
        _WATCHES.reset(token)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside the block the watches of the blocks around it see nothing."""
    token = _WATCHES.set(())
    try:
        yield
    finally:
        _WATCHES.reset(token)


def watched(watch: "Watch | None") -> "Watch | None":
    """The watch of a call: the given one together with those of the blocks around it; None if none."""
    watches = _WATCHES.get() if watch is None else (*_WATCHES.get(), watch)
    if len(watches) < 2:
        return watches[0] if watches else None

    return _All(watches)


class _All:
    """Several watches as one."""

    def __init__(self, watches: tuple["Watch", ...]) -> None:
        self._watches = watches

    def __call__(self, *args: Any) -> None:
        for each in self._watches:
            each(*args)

    def wants(self, *place: Any) -> bool:
        return any(wants(each, *place) for each in self._watches)


class Only:
    """A watch of some places: a GPU shows it no others, a CPU all. `wants` is called as the function below."""

    def __init__(self, watch: "Watch", wants: Callable[[str, int, str, str, int], bool]) -> None:
        self._watch, self.wants = watch, wants

    def __call__(self, *args: Any) -> None:
        self._watch(*args)


def wants(watch: "Watch", direction: str, layer: int, module: str, site: str, sample: int) -> bool:
    """Whether a watch looks at the values of a place. One that has no method `wants` looks at all."""
    asked = getattr(watch, "wants", None)
    return asked is None or asked(direction, layer, module, site, sample)
