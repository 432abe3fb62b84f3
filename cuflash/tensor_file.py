"""Named arrays from a safetensors, npz or HDF5 file, told apart by content; and into a safetensors file.

The safetensors format is read by hand (8 bytes of header length, JSON, raw bytes), so that bf16 loads
without torch. A file that is foreign, truncated or damaged gives a ValueError that says what is wrong.
"""
import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.whole_file import whole_file

_HDF5 = b"\x89HDF\r\n\x1a\n"
_MAX_HEADER = 100 << 20  # the limit of the safetensors format
_SAFETENSORS = {name: np.dtype(dtype) for name, dtype in {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}.items()}


def read_tensors(path: str | os.PathLike, required: tuple[str, ...],
                 optional: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The arrays of these names; those of `optional` where the file has them.

    Arrays of a safetensors file are maps of it, read as they are used. A bf16 dataset of HDF5 comes as
    fp32 of the same values; npz stores bf16 as 2-byte void, which is read as bf16.

    Raises:
        ValueError: the file is none of these formats or is damaged; a required name is missing.
        OSError: it cannot be opened.
    """
    path = Path(path)
    with open(path, "rb") as f:
        start = f.read(16)
    read = _npz if start[:2] == b"PK" else _hdf5 if start[:8] == _HDF5 else _safetensors
    return read(path, required, optional)


def safetensors_names(path: str | os.PathLike) -> tuple[list[str], dict[str, str]]:
    """The names of a safetensors file's arrays, and its metadata.

    Raises:
        ValueError: the file is no safetensors file or is damaged.
        OSError: it cannot be opened.
    """
    entries, _, _ = _header(Path(path))
    metadata = entries.pop("__metadata__", {})
    return list(entries), metadata if isinstance(metadata, dict) else {}


def write_safetensors(path: str | os.PathLike, arrays: Mapping[str, np.ndarray],
                      metadata: Mapping[str, str]) -> None:
    """Writes arrays, in C order and in their dtypes, one after the other.

    Raises:
        OSError: as `whole_file`.
    """
    names = {dtype: name for name, dtype in _SAFETENSORS.items()}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, x in arrays.items():
        entries[name] = {"dtype": names[x.dtype], "shape": x.shape, "data_offsets": (end, end + x.nbytes)}
        end += x.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with whole_file(path) as partial, open(partial, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header)
        for x in arrays.values():
            f.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _wanted(path: Path, names: list[str], required: tuple[str, ...], optional: tuple[str, ...]) -> list[str]:
    missing = [n for n in required if n not in names]
    if missing:
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        also = f" and may have {', '.join(optional)}" if optional else ""
        raise ValueError(f"{path} has no {', '.join(missing)}: it must have {', '.join(required)}{also}; "
                         f"it has {shown or 'nothing'}")
    return [*required, *(n for n in optional if n in names)]


def _safetensors(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, np.ndarray]:
    entries, start, size = _header(path)
    entries.pop("__metadata__", None)
    return {name: _map(path, name, entries[name], start, size)
            for name in _wanted(path, list(entries), required, optional)}


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """What the header says of each array, where the arrays begin, the size of the file."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        start = f.read(1)
        if size < 10 or length > _MAX_HEADER or start != b"{":
            raise ValueError(f"{path} is not a safetensors, npz or HDF5 file")
        if 8 + length > size:
            raise ValueError(
                f"{path} is truncated: its safetensors header takes {length} bytes, the file has {size - 8}"
            )
        header = start + f.read(length - 1)
    try:
        entries = json.loads(header)
    except ValueError as e:
        raise ValueError(f"{path}: the safetensors header is not JSON ({e})") from None
    return entries, 8 + length, size


def _map(path: Path, name: str, entry: Any, start: int, size: int) -> np.ndarray:
    def natural(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)

    known = entry if isinstance(entry, dict) else {}
    shape: Any = known.get("shape")
    offsets: Any = known.get("data_offsets")
    if not (natural(shape) and natural(offsets) and len(offsets) == 2):
        raise ValueError(f"{path}: the safetensors header does not describe {name!r}: it says {entry!r:.200}")
    if entry.get("dtype") not in _SAFETENSORS:
        raise ValueError(
            f"{path}: {name!r} has dtype {entry.get('dtype')!r}; valid: {', '.join(_SAFETENSORS)}"
        )
    dtype, (begin, end) = _SAFETENSORS[entry["dtype"]], offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path}: {name!r} has shape {shape} of {entry['dtype']} in {end - begin} bytes; "
                         f"it takes {math.prod(shape) * dtype.itemsize}")
    if start + end > size:
        raise ValueError(f"{path} is truncated: {name!r} ends at byte {start + end}, the file at {size}")
    if begin == end:
        return np.zeros(shape, dtype)
    return np.memmap(path, np.uint8, "r", start + begin, (end - begin,)).view(dtype).reshape(shape)


def _npz(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("not an npz file")
            arrays = {name: file[name] for name in _wanted(path, list(file), required, optional)}
    except (zipfile.BadZipFile, zlib.error, EOFError) as e:
        raise ValueError(f"{path} is a damaged npz file: {e}") from None
    bf16 = np.dtype("V2")
    return {n: a.view(ml_dtypes.bfloat16) if a.dtype == bf16 else a for n, a in arrays.items()}


def _hdf5(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, np.ndarray]:
    import h5py

    def datasets(group: h5py.Group) -> list[str]:
        names: list[str] = []
        group.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        return names

    try:
        with h5py.File(path, "r") as file:
            return {name: file[name][...] for name in _wanted(path, datasets(file), required, optional)}
    except OSError as e:
        raise ValueError(f"{path} is a damaged HDF5 file: {e}") from None
