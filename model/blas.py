"""How many threads BLAS uses: one where matrices are small.

Threads of OpenBLAS wait for each other by spinning. With small matrices that gains little where the
cores are idle (nano: 21 ms a step with two threads, 25 with one; mini: 2.1 s, 2.2) and loses much where
they are not (nano 200 ms; mini 4 to 32 s).
"""
import ctypes
import os

import numpy as np

SMALL = 192  # width of the model
# Of NumPy's own wheels, then of other builds.
_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads64_",
          "openblas_{}_num_threads")


def one_thread_if_small(n_embd: int) -> None:
    """Sets one thread for a model of this width, unless OPENBLAS_NUM_THREADS or OMP_NUM_THREADS say how many."""
    if n_embd <= SMALL and not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys():
        setter = _function("set")
        if setter:
            setter(1)


def threads() -> int | str:
    """How many it uses now; "unknown" for a BLAS other than OpenBLAS."""
    getter = _function("get")
    return getter() if getter else "unknown"


def _function(verb: str) -> "ctypes._CFuncPtr | None":
    """OpenBLAS's setter or getter, looked up in the library that NumPy has loaded; None in another BLAS."""
    library = ctypes.CDLL(np._core._multiarray_umath.__file__)
    return next((getattr(library, name.format(verb)) for name in _NAMES if hasattr(library, name.format(verb))), None)
