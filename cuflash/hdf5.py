"""Number formats as HDF5 types, exact reads of them, and compressed chunks written by several cores.

HDF5 has no name for bf16, but a float type is a list of bit fields, so that every HDF5 reader prints
numbers and the bits are exact. HDF5's own conversions to and from such types are slow, and round ties
away from zero, so nothing is ever converted: values go in and out as they lie.
"""
import functools
import io
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from cuflash.formats import as_format

if TYPE_CHECKING:
    import h5py

# Formats stored in their own HDF5 float type: exponent and mantissa bits. fp8_e4m3 is not IEEE (HDF5 would
# read its 256 to 448 as Inf and NaN), so it is uint8 with an attribute `format`.
_FLOATS = {"bf16": (8, 7), "fp8_e5m2": (5, 2)}
_DTYPES = {"fp32": np.float32, "fp16": np.float16, "fp64": np.float64, "bf16": ml_dtypes.bfloat16,
           "fp8_e5m2": ml_dtypes.float8_e5m2, "fp8_e4m3": ml_dtypes.float8_e4m3fn}


def stored_dtype(format: str) -> np.dtype:
    """The dtype that values of a format are written and read in: their own, or fp32 where HDF5 has none."""
    if format not in _DTYPES:
        as_format(format)
    return np.dtype(_DTYPES.get(format, np.float32))


@functools.cache
def _float_type(format: str) -> Any:
    """The HDF5 type of a short float: sign, exponent, mantissa from the top bit down."""
    from h5py import h5t
    exponent, mantissa = _FLOATS[format]
    bits = 1 + exponent + mantissa
    t = h5t.IEEE_F32LE.copy()
    t.set_fields(bits - 1, mantissa, exponent, 0, mantissa)
    t.set_size(bits // 8)
    t.set_ebias((1 << exponent - 1) - 1)
    return t


def _file_type(dtype: np.dtype) -> Any:
    from h5py import h5t
    for format in _FLOATS:
        if dtype == _DTYPES[format]:
            return _float_type(format)
    return h5t.py_create(np.dtype(np.uint8) if dtype == ml_dtypes.float8_e4m3fn else dtype.newbyteorder("<"))


def dtype_of(dataset: "h5py.Dataset") -> np.dtype:
    """The dtype of a dataset's values: bf16 and fp8 as ml_dtypes', anything else as h5py has it."""
    from h5py import h5t
    t = dataset.id.get_type()
    if isinstance(t, h5t.TypeFloatID):
        for format, (exponent, mantissa) in _FLOATS.items():
            bits = 1 + exponent + mantissa
            if t.get_size() * 8 == bits and t.get_fields() == (bits - 1, mantissa, exponent, 0, mantissa):
                return np.dtype(_DTYPES[format])
    if dataset.dtype == np.uint8 and dataset.attrs.get("format") == "fp8_e4m3":
        return np.dtype(ml_dtypes.float8_e4m3fn)
    return dataset.dtype


def read_array(dataset: "h5py.Dataset", where: Sequence[slice] = ()) -> np.ndarray:
    """The values of a dataset, bit for bit, in `dtype_of` it; `where` narrows its leading axes."""
    from h5py import h5s
    dtype = dtype_of(dataset)
    if dtype == dataset.dtype:  # NumPy has the type
        return np.asarray(dataset[tuple(where)])
    ranges = [range(*s.indices(n)) for s, n in zip(where, dataset.shape)]
    ranges += [range(n) for n in dataset.shape[len(ranges):]]
    out = np.empty([len(r) for r in ranges], f"u{dtype.itemsize}")
    if out.size:
        memory = space = h5s.ALL
        if where:
            memory, space = h5s.create_simple(out.shape), dataset.id.get_space()
            space.select_hyperslab(tuple(r.start for r in ranges), out.shape, tuple(r.step for r in ranges))
        dataset.id.read(memory, space, out, mtype=dataset.id.get_type())
    return out.view(dtype)


def blocks(shape: Sequence[int], size: int) -> Iterator[tuple[slice, ...]]:
    """Slices of the leading axes that cut an array into parts of about `size` elements, in order."""
    inner = 1
    axis = len(shape)
    while axis and inner * shape[axis - 1] <= size:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield ()
        return
    step = max(1, size // max(inner, 1))
    for outer in np.ndindex(*shape[:axis - 1]):
        for i in range(0, shape[axis - 1], step):
            yield (*(slice(o, o + 1) for o in outer), slice(i, min(i + step, shape[axis - 1])))


# ---- writing ------------------------------------------------------------------------------------

class Sink(io.RawIOBase):
    """A file that HDF5 writes to, which survives a full disk.

    HDF5 cannot close a file that its disk has no room for. So the first failed write is kept in `error`,
    and that and all later data go nowhere; the writer looks at `error` and gives up.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (closed by close)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while self.error is None and done < len(view):
            try:
                done += self._file.write(view[done:])
            except OSError as e:
                self.error = e
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        if self.error is not None:
            return 0
        return self._file.truncate(size)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def create_dataset(group: "h5py.Group", name: str, dtype: np.dtype, shape: Sequence[int],
                   chunk: Sequence[int], growing: int = 0, fill: float = 0.0) -> "h5py.Dataset":
    """An empty dataset, chunked, shuffled and deflated; its first `growing` axes have no limit.

    What is never written reads as `fill`.
    """
    import h5py
    from h5py import h5d, h5p, h5s
    create = h5p.create(h5p.DATASET_CREATE)
    create.set_chunk(tuple(chunk))
    create.set_shuffle()
    create.set_deflate(1)
    create.set_fill_value(_fill(fill, dtype))
    space = h5s.create_simple(tuple(shape), (h5s.UNLIMITED,) * growing + tuple(shape[growing:]))
    link = h5p.create(h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    return h5py.Dataset(h5d.create(group.id, name.encode(), _file_type(dtype), space, create, link))


def _fill(value: float, dtype: np.dtype) -> np.ndarray:
    """A fill value in a dtype that HDF5 takes: 0, −448 and ±Inf are exact in any."""
    if dtype == ml_dtypes.float8_e4m3fn:
        return np.array(value, dtype).view(np.uint8)
    return np.array(value, np.float32)


class ChunkWriter:
    """Deflates chunks on all cores and writes them from the caller's thread, in the order given.

    zlib's run-length strategy packs float bits tighter than its default one, twice as fast.
    """

    def __init__(self, sink: Sink) -> None:
        workers = min(
            16,
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        self._sink = sink
        self._pool = ThreadPoolExecutor(workers)
        self._most = 3 * workers
        self._pending: deque[tuple[h5py.Dataset, tuple[int, ...], Future[bytes]]] = deque()

    def write(self, dataset: "h5py.Dataset", start: Sequence[int], chunk: np.ndarray) -> None:
        """Takes a full chunk that begins at `start`; the array must not change any more."""
        self._pending.append((dataset, tuple(start), self._pool.submit(_deflated, chunk)))
        while len(self._pending) > self._most:
            self._write_one()

    def finish(self) -> None:
        """Writes what is left.

        Raises:
            OSError: a write failed, now or before.
        """
        while self._pending:
            self._write_one()
        self.check()

    def check(self) -> None:
        if self._sink.error is not None:
            raise self._sink.error

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _write_one(self) -> None:
        dataset, start, data = self._pending.popleft()
        dataset.id.write_direct_chunk(start, data.result())
        self.check()


def _deflated(chunk: np.ndarray) -> bytes:
    """A chunk through HDF5's filters shuffle and deflate."""
    data = np.ascontiguousarray(chunk).view(np.uint8)
    shuffled = np.ascontiguousarray(data.reshape(-1, chunk.dtype.itemsize).T)
    deflate = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflate.compress(shuffled) + deflate.flush()
