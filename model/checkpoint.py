"""Checkpoints: one HDF5 file with weights, AdamW's moments and what a resume needs.

Batches and random words are functions of the step, so no generator's state is kept.
"""
import json
import pathlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cuflash import NUMERICS_VERSION
from cuflash.model.gpt import GPTConfig, Params
from cuflash.model.run import write_whole

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
    """Writes the file beside its name and renames it; each dataset carries a checksum."""
    import h5py

    def write(partial: pathlib.Path) -> None:
        with h5py.File(partial, "w") as f:
            f.attrs["format"] = FORMAT
            f.attrs["header"] = json.dumps(asdict(header))
            f.attrs["step"] = state.step
            for group, arrays in (("params", state.params), ("m", state.m), ("v", state.v)):
                for name, array in arrays.items():
                    f.create_dataset(f"{group}/{name}", data=array, fletcher32=True)
            f["losses"], f["norms"] = np.array(state.losses), np.array(state.norms)

    write_whole(path, write)


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
                raise ValueError(f"checkpoint {path}: an HDF5 file, but not a checkpoint of cuflash ({FORMAT!r})")
            fields: dict[str, Any] = json.loads(f.attrs["header"])
            header = Header(**(fields | {"model": GPTConfig(**fields["model"])}))
            state = State(int(f.attrs["step"]), {}, {}, {}, list(f["losses"][:]), list(f["norms"][:]))
            for group in ("params", "m", "v") if optimizer else ("params",):
                arrays = {name: f[f"{group}/{name}"][:] for name in header.model.shapes()}
                setattr(state, group, arrays)
    except (OSError, KeyError) as e:
        raise ValueError(f"checkpoint {path}: damaged, cut short or not HDF5 ({e})") from e
    if header.numerics_version != NUMERICS_VERSION:
        raise ValueError(f"checkpoint {path}: written under numerics version {header.numerics_version}, this is "
                         f"{NUMERICS_VERSION}; its bits cannot be continued")
    for name, shape in header.model.shapes().items():
        if state.params[name].shape != shape:
            raise ValueError(f"checkpoint {path}: {name} has shape {state.params[name].shape}, its model says {shape}")
    return state, header
