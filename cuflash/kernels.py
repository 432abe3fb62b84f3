"""CUDA sources to cubins to CuPy kernels: compiled by NVRTC, kept on disk, remembered in the process.

`compile_cubin` and `resources` need NVRTC but no GPU; `kernel` needs one. Kernels are `extern "C"`,
and what varies between compilations comes as macros (`defines`) or as headers held in memory.

CuPy's own `RawModule(code=…)` is not used: it forces `-ftz=true` and does not see an edited header.
"""
import ctypes
import functools
import hashlib
import importlib
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from cuflash.errors import install, last_line, unknown

# One rounding per operation in the order written (docs/numerics.md, section 1): no contraction, no
# flushing to zero, no approximate division or square root. -lineinfo names lines in sanitizers and profilers.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
           "-default-device", "-lineinfo")
MIN_CAPABILITY = 80  # bf16 mma.sync and cp.async

_INSTALL = install("cuda12", "cuda13") + "; cuda13 takes a driver of CUDA 13 (nvidia-smi says which one is there)"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


class KernelCompileError(RuntimeError):
    """NVRTC refused a source; the message has its log, with the offending lines and carets."""


class Resources(NamedTuple):
    """What one kernel takes, from ptxas: registers per thread, and bytes of the rest."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # static alone


# ---- GPU and CuPy

@functools.cache
def import_cupy() -> ModuleType:
    """CuPy, with `CUPY_CACHE_DIR` set where its default below HOME cannot be written, or it would not import."""
    if "CUPY_CACHE_DIR" not in os.environ:
        home = _home()
        if home is None or not _writable(home / ".cupy" / "kernel_cache"):
            os.environ["CUPY_CACHE_DIR"] = str(cache_dir() / "cupy")
    import cupy
    return cupy


@functools.cache
def gpu_reason() -> str | None:
    """None if kernels can run on the current device, else a sentence on what is missing and how to get it."""
    try:
        cupy = import_cupy()
    except ImportError as error:
        return _no_cupy(error) if _has_driver() else (
            "no NVIDIA driver is installed here, which a GPU needs; NumPy arrays and --device cpu need neither")
    runtime = cupy.cuda.runtime
    try:
        if runtime.getDeviceCount() < 1:
            return "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        found = capability(runtime.getDevice())
        runtime.free(0)  # makes the context, so that a busy or broken device says so here
    except runtime.CUDARuntimeError as error:
        return (f"the CUDA driver gives no device ({error}): check that an NVIDIA driver is installed "
                "(nvidia-smi) and what CUDA_VISIBLE_DEVICES says")
    return nvrtc_reason() or _unsupported(found)


def _has_driver() -> bool:
    """Whether the CUDA driver's library is there; without CuPy nothing else can tell."""
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _unsupported(found: int) -> str | None:
    """What is wrong with a compute capability, if anything is."""
    from cupy.cuda import nvrtc
    if found < MIN_CAPABILITY:
        return (f"compute capability {found / 10} is too old: the kernels need "
                f"{MIN_CAPABILITY / 10} (Ampere) or newer")
    if found not in nvrtc.getSupportedArchs():
        version = ".".join(map(str, nvrtc.getVersion()))
        return f"NVRTC {version} does not know compute capability {found / 10}: install a newer one; {_INSTALL}"
    return None


@functools.cache
def nvrtc_reason() -> str | None:
    """None if sources can be compiled, which needs no GPU; else a sentence on what is missing."""
    try:
        import_cupy()
    except ImportError as error:
        return _no_cupy(error)
    try:
        from cupy.cuda import nvrtc
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return f"NVRTC, the CUDA compiler library, cannot be loaded ({last_line(error)}): {_INSTALL}"
    return None


def _no_cupy(error: ImportError) -> str:
    return f"CuPy cannot be imported ({last_line(error)}): {_INSTALL}"


@functools.cache
def capability(device: int) -> int:
    """The compute capability of a device, as 90 for 9.0."""
    return int(import_cupy().cuda.Device(device).compute_capability)


def device_name() -> str:
    """Of the current device, as the driver calls it."""
    runtime = import_cupy().cuda.runtime
    return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()


def architecture(compute_capability: int) -> str:
    """The NVRTC target of a compute capability (90 for 9.0): sm_90a where wgmma needs it, sm_NN elsewhere."""
    return "sm_90a" if compute_capability == 90 else f"sm_{compute_capability}"


def newest_architecture() -> str:
    """The newest target that the installed NVRTC knows."""
    from cupy.cuda import nvrtc
    return architecture(max(nvrtc.getSupportedArchs()))


# ---- cache

def _home() -> Path | None:
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home)  # a user without an entry and without HOME


def _writable(folder: Path) -> bool:
    try:
        str(folder).encode()  # CuPy passes paths to CUDA as UTF-8
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeEncodeError):
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def cache_dir() -> Path:
    """The folder of compiled kernels: $CUFLASH_CACHE_DIR, $XDG_CACHE_HOME/cuflash or ~/.cache/cuflash.

    Where none of these can be written, a private folder among the temporary files, said once by a warning.
    """
    wanted = []
    if os.environ.get("CUFLASH_CACHE_DIR"):
        wanted.append(Path(os.environ["CUFLASH_CACHE_DIR"]))
    if os.environ.get("XDG_CACHE_HOME"):
        wanted.append(Path(os.environ["XDG_CACHE_HOME"]) / "cuflash")
    home = _home()
    if home is not None:
        wanted.append(home / ".cache" / "cuflash")
    for folder in wanted:
        if _writable(folder):
            return folder.absolute()
    shared = Path(tempfile.gettempdir()) / f"cuflash-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        stat = shared.lstat()
        private = stat.st_uid == os.getuid() and stat.st_mode & 0o170777 == 0o040700
    except OSError:
        private = False
    if not private:  # someone else's folder of that name could hold someone else's code
        shared = Path(tempfile.mkdtemp(prefix="cuflash-"))
    warnings.warn(f"compiled kernels go to {shared}: cannot write "
                  f"{' or '.join(map(str, wanted)) or 'to a home folder'}. Set CUFLASH_CACHE_DIR to a folder "
                  "that outlives a reboot.", stacklevel=2)
    return shared


# ---- compile

@functools.cache
def source_dir() -> Path:
    """The folder of the .cu and .cuh files."""
    return Path(next(iter(importlib.import_module("cuflash.cuda").__path__)))


def source_names() -> list[str]:
    """Names of the .cu files, without the suffix: what `compile_cubin` takes."""
    return sorted(path.stem for path in source_dir().glob("*.cu"))


def _read(name: str, headers: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """`name`.cu and every file it includes, by name; and what it includes from the CUDA toolkit."""
    texts: dict[str, str] = {}
    system: set[str] = set()
    pending = [f"{name}.cu"]
    while pending:
        file = pending.pop()
        if file in texts:
            continue
        if file in headers:
            texts[file] = headers[file]
        else:
            try:
                texts[file] = (source_dir() / file).read_text(encoding="utf-8")
            except FileNotFoundError:
                if file == f"{name}.cu":
                    raise unknown("kernel source", name, source_names()) from None
                raise KernelCompileError(f"{name}.cu includes {file!r}, which is neither in "
                                         f"{source_dir()} nor in headers") from None
        for local, toolkit in _INCLUDE.findall(texts[file]):
            if local:
                pending.append(local)
            else:
                system.add(toolkit)
    return texts, system


class _Program(NamedTuple):
    texts: dict[str, str]  # file name to text, the .cu first
    options: tuple[str, ...]
    key: str


def _program(name: str, arch: str, defines: Mapping[str, object], headers: Mapping[str, str]) -> _Program:
    from cupy.cuda import nvrtc
    texts, system = _read(name, headers)
    options = [f"-arch={arch}", *OPTIONS]
    for macro, value in defines.items():
        # NVRTC takes one define per option and no shell reads it, so any text passes as it is.
        options.append(f"-D{macro}={int(value) if isinstance(value, bool) else value}")
    key = hashlib.sha256(repr((name, options, nvrtc.getVersion())).encode())
    for file in sorted(texts):
        key.update(repr((file, texts[file])).encode())
    if system:
        from cuda.pathfinder import find_nvidia_header_directory
        include = find_nvidia_header_directory("cudart")
        if include is None:
            raise KernelCompileError(f"{name}.cu includes {sorted(system)}, and the CUDA headers are not "
                                     f"installed: {_INSTALL}")
        options.append(f"-I{include}")
        for file in sorted(system):
            path = Path(include) / file
            key.update(path.read_bytes() if path.is_file() else b"?")
    return _Program(texts, tuple(options), key.hexdigest()[:32])


def _nvrtc(name: str, program: _Program, *extra: str) -> tuple[bytes, str]:
    """(cubin, log) of a program."""
    from cupy.cuda import nvrtc
    included = [file for file in program.texts if file != f"{name}.cu"]
    handle = nvrtc.createProgram(program.texts[f"{name}.cu"], f"{name}.cu",
                                 tuple(program.texts[file].encode() for file in included),
                                 tuple(file.encode() for file in included))
    try:
        try:
            nvrtc.compileProgram(handle, program.options + extra)
        except nvrtc.NVRTCError as error:
            raise KernelCompileError(f"{name}.cu does not compile ({error}; options "
                                     f"{' '.join(program.options)})\n{nvrtc.getProgramLog(handle)}") from None
        # CuPy's getCUBIN leaves out the last byte, which is zero.
        return nvrtc.getCUBIN(handle) + b"\0", nvrtc.getProgramLog(handle)
    finally:
        nvrtc.destroyProgram(handle)


def compile_cubin(name: str, arch: str, defines: Mapping[str, object] = {},
                  headers: Mapping[str, str] = {}) -> Path:
    """The cubin of cuda/`name`.cu, from the cache or compiled; no GPU is needed.

    Args:
        name: the source without its suffix, one of `source_names()`.
        arch: an NVRTC target such as `sm_80` or `sm_90a`.
        defines: macros, name to value (True and False give 1 and 0).
        headers: texts that take the place of files named in `#include "…"`.

    The cache's key covers the text of every included file, the options and NVRTC's version, so an edited
    header is compiled again. Processes may do this at once: a file appears whole or not at all. One that a crash
    of the machine cut off is compiled again.

    Raises:
        KernelCompileError: with NVRTC's log.
        OSError: the cubin cannot be kept.
    """
    program = _program(name, arch, defines, headers)
    path = cache_dir() / f"{name}-{arch}-{program.key}.cubin"
    if not _is_whole(path):
        cubin, _ = _nvrtc(name, program)
        temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
        try:
            temporary.write_bytes(cubin)
            os.replace(temporary, path)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: a compiled kernel cannot be kept; make room, or set "
                          "CUFLASH_CACHE_DIR to another folder", str(path)) from None
        finally:
            temporary.unlink(missing_ok=True)  # there only where the above failed
    return path


def _is_whole(cubin: Path) -> bool:
    """Whether the file is there and reaches as far as its ELF header says."""
    try:
        with open(cubin, "rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    programs, sections, _, _, *counts = struct.unpack_from("<2QI5H", header, 32)
    program_size, program_count, section_size, section_count = counts
    return size >= max(programs + program_size * program_count, sections + section_size * section_count)


_FUNCTION = re.compile(
    r"Function properties for (?P<name>\S+)\s+.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes "
    r"spill stores, (?P<loads>\d+) bytes spill loads\s+.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)")


def resources(name: str, arch: str, defines: Mapping[str, object] = {},
              headers: Mapping[str, str] = {}) -> dict[str, Resources]:
    """What each kernel of a source takes, as ptxas reports it; arguments as for `compile_cubin`."""
    _, log = _nvrtc(name, _program(name, arch, defines, headers), "--ptxas-options=-v")
    found = {}
    for match in _FUNCTION.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["name"]] = Resources(int(match["registers"]), int(match["stack"]), int(match["stores"]),
                                         int(match["loads"]), int(shared[1]) if shared else 0)
    if not found:
        raise RuntimeError(f"no kernel found in ptxas's report on {name}.cu:\n{log}")
    return found


# ---- load

_kernels: dict[tuple, object] = {}
_modules: dict[int, Any] = {}  # by the id of a kernel in _kernels


def kernel(name: str, function: str, defines: Mapping[str, object] = {}, headers: Mapping[str, str] = {},
           *, shared: int = 0):
    """A `cupy.RawKernel` of the current device, compiled at most once per cache and loaded once per process.

    Args:
        name, defines, headers: as for `compile_cubin`.
        function: the `extern "C"` kernel.
        shared: bytes of dynamic shared memory that launches will ask for; allowed here where above 48 KiB.

    A source edited after its first use in a process is not seen until the next process.

    Raises:
        KernelCompileError, OSError: as `compile_cubin`.
        ValueError: kernels cannot run on the current device.
    """
    cupy = import_cupy()
    device = cupy.cuda.runtime.getDevice()
    key = (device, name, function, shared, tuple(defines.items()), tuple(headers.items()))
    found = _kernels.get(key)
    if found is None:
        if problem := _unsupported(capability(device)):
            raise ValueError(f"{device_name()}: {problem}. NumPy arrays run without a GPU")
        path = compile_cubin(name, architecture(capability(device)), defines, headers)
        module = _module(device, path)
        found = module.get_function(function)
        # 48 KiB are allowed unasked. The limit belongs to the loaded function: never lower another caller's.
        if shared > 48 << 10 and shared > found.max_dynamic_shared_size_bytes:
            found.max_dynamic_shared_size_bytes = shared
        _kernels[key], _modules[id(found)] = found, module
    return found


def upload(kernel: Any, symbol: str, data: bytes) -> None:
    """Queues a copy to an `extern "C"` __device__ variable of the module that `kernel` came with."""
    to = _modules[id(kernel)].get_global(symbol)
    # CUDA has read pageable memory of this size when the call returns.
    address = ctypes.cast(data, ctypes.c_void_p)
    to.copy_from_host_async(address, len(data), import_cupy().cuda.get_current_stream())


@functools.cache
def _module(device: int, path: Path):
    return import_cupy().RawModule(path=str(path))
