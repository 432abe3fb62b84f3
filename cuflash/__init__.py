"""Flash attention in which every rounding step is explicit, switchable and measured.

The array type picks the machine: NumPy arrays run the bit-true reference, CuPy arrays run the
CUDA kernels. Nothing here imports CuPy or h5py before they are used.
"""
import importlib as _importlib
import os as _os
from typing import Any as _Any

# In a source tree (PYTHONPATH=. or an editable install) model/, cli/ and cuda/ lie beside this
# folder, not in it; an installed wheel has them inside.
if not _os.path.isdir(_os.path.join(_os.path.dirname(__file__), "model")):
    __path__.append(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))

__version__ = "0.1.0"
NUMERICS_VERSION = 1  # rises when any bits change

# Public names and their modules, imported when first asked for.
_PUBLIC = {
    "Precision": "precision", "Fix": "fixes", "Mode": "formats", "Key": "philox",
    "round_to": "formats", "dot": "accumulators",
    "info": "environment", "Run": "model.run",
}
__all__ = ["NUMERICS_VERSION", "__version__", *_PUBLIC]


def __getattr__(name: str) -> _Any:
    if name in _PUBLIC:
        return getattr(_importlib.import_module(f"cuflash.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'cuflash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
