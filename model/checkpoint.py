"""Checkpoints: one HDF5 file with weights, AdamW's moments and what a resume needs.

Batches and random words are functions of the step, so no generator's state is kept.
"""
import io
import json
import pathlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cuflash import NUMERICS_VERSION
from cuflash.model.gpt import GPTConfig, Params
from cuflash.model.loss_scale import LossScale
from cuflash.model.run import write_whole
from cuflash.precision import Precision

FORMAT = "cuflash checkpoint 1"


@dataclass
class State:
    """Everything that training changes. `losses` and `norms` are the last logged ones, for z-scores."""

    step: int
    params: Params
    m: Params
    v: Params
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scale: LossScale = field(default_factory=LossScale)

    @classmethod
    def new(cls, params: Params, precision: Precision) -> "State":
        """Before the first step."""
        moments = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
        return cls(0, params, *moments).cast(precision)

    def cast(self, precision: Precision) -> "State":
        """In the dtype that a precision computes in."""
        dtype = np.float64 if precision.is_fp64 else np.float32
        arrays = ({n: x.astype(dtype) for n, x in part.items()} for part in (self.params, self.m, self.v))
        return replace(self, **dict(zip(("params", "m", "v"), arrays)))


@dataclass(frozen=True)
class Header:
    """What a checkpoint says of itself."""

    model: GPTConfig
    precision: str  # TOML
    fix: str
    seed: int
    data: str       # its SHA-256
    tokens: str     # "bytes" or "tokens"
    numerics_version: int = NUMERICS_VERSION


def save(path: pathlib.Path, state: State, header: Header) -> None:
    """Writes the file beside its name and renames it; each dataset carries a checksum.

    It is made in memory first: HDF5 cannot close a file that its disk has no room for.
    """
    import h5py

    image = io.BytesIO()
    with h5py.File(image, "w") as f:
        f.attrs["format"] = FORMAT
        f.attrs["header"] = json.dumps(asdict(header))
        f.attrs["step"] = state.step
        f.attrs["loss_scale"] = json.dumps(asdict(state.scale))
        for group, arrays in (("params", state.params), ("m", state.m), ("v", state.v)):
            for name, array in arrays.items():
                f.create_dataset(
                    f"{group}/{name}",
                    data=array if isinstance(array, np.ndarray) else array.get(),
                    fletcher32=True,
                )
        f["losses"], f["norms"] = np.array(state.losses), np.array(state.norms)
    write_whole(path, lambda partial: partial.write_bytes(image.getbuffer()))


def load(path: pathlib.Path, *, optimizer: bool = True) -> tuple[State, Header]:
    """Reads a checkpoint; `optimizer=False` leaves the moments out.

    Raises:
        ValueError: not a checkpoint of this program, damaged, cut short, of another numerics version,
            or with other parameters than its model has.
    """
    import h5py
    if not path.is_file():
        raise ValueError(f"checkpoint {path}: no such file")
    try:
        with h5py.File(path, "r") as f:
            if f.attrs.get("format") != FORMAT:
                raise ValueError(f"an HDF5 file, but not {FORMAT!r}")
            fields: dict[str, Any] = json.loads(f.attrs["header"])
            header = Header(**(fields | {"model": GPTConfig(**fields["model"])}))
            if header.numerics_version != NUMERICS_VERSION:
                raise ValueError(
                    f"written under numerics version {header.numerics_version}, this is {NUMERICS_VERSION}; "
                    "its bits cannot be continued"
                )
            state = State(int(f.attrs["step"]), {}, {}, {}, f["losses"][:].tolist(), f["norms"][:].tolist(),
                          LossScale(**json.loads(f.attrs["loss_scale"])))
            for group in ("params", "m", "v") if optimizer else ("params",):
                for name, shape in header.model.shapes().items():
                    array = getattr(state, group)[name] = f[f"{group}/{name}"][:]
                    if array.shape != shape:
                        raise ValueError(f"{group}/{name} has shape {array.shape}, its model says {shape}")
    except (OSError, KeyError) as e:
        raise ValueError(f"checkpoint {path}: damaged, cut short or not HDF5 ({e})") from e
    except (ValueError, TypeError) as e:  # TypeError: a header with other fields
        raise ValueError(f"checkpoint {path}: {e}") from e
    return state, header


def loss_scale(path: pathlib.Path) -> float:
    """The loss scale that the step after a checkpoint begins with."""
    import h5py
    with h5py.File(path, "r") as f:
        return LossScale(**json.loads(f.attrs["loss_scale"])).value
