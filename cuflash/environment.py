"""`cuflash.info()`: versions, the device or why there is none, and what can run here."""
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass

from cuflash import NUMERICS_VERSION, __version__, kernels
from cuflash.accumulators import ACCUMULATORS

# Compute capabilities of the tensor cores that the accumulators are models of.
_TENSOR_CORES = {"hopper": (90,), "ampere": (80, 86, 89)}
_PACKAGES = ("numpy", "ml_dtypes", "click", "h5py", "tqdm", "matplotlib", "torch")
_CUPY = ("cupy", "cupy-cuda13x", "cupy-cuda12x")


@dataclass(frozen=True)
class Device:
    """The current GPU: compute capability times ten (90 for 9.0), bytes of memory, multiprocessors."""

    name: str
    capability: int
    memory: int
    multiprocessors: int


@dataclass(frozen=True)
class Info:
    """What `cuflash.info()` found; its text is what `cuflash info` prints.

    Attributes:
        versions: of cuflash, Python and the packages that are installed.
        device: the GPU that kernels run on, None where they cannot; `device_reason` then says why not
            and what to install.
        compiler_reason: why kernels cannot be compiled (which needs no GPU), None where they can.
        accumulators: for each, where it runs: on `cpu` always; on the GPU `yes` or the reason why not.
    """

    versions: dict[str, str]
    numerics_version: int
    cpu: str
    device: Device | None
    device_reason: str | None
    compiler_reason: str | None
    accumulators: dict[str, dict[str, str]]

    def __str__(self) -> str:
        missing = "not installed"
        rows = [
            ("cuflash", f"{self.versions['cuflash']}, numerics version {self.numerics_version}"),
            ("python", self.versions["python"]),
            ("packages", ", ".join(f"{n} {self.versions[n]}" for n in _PACKAGES if n in self.versions)),
            ("cupy", self.versions.get("cupy", missing)),
            ("cpu", self.cpu),
        ]
        if self.device is None:
            rows.append(("gpu", f"none: {self.device_reason}"))
        else:
            d = self.device
            rows.append(("gpu", f"{d.name}, compute capability {d.capability / 10}, "
                                f"{d.memory / 2**30:.0f} GiB, {d.multiprocessors} multiprocessors"))
        same = "for the same reason" if self.compiler_reason == self.device_reason else self.compiler_reason
        rows.append(("kernels", "NVRTC compiles them here" if self.compiler_reason is None
                     else f"cannot be compiled: {same}"))
        rows.append(("", ""))
        rows += [("accumulator", f"{'cpu':<5} gpu")]
        rows += [(name, f"{where['cpu']:<5} {where['gpu']}") for name, where in self.accumulators.items()]
        return "\n".join(f"{label:<12} {text}".rstrip() for label, text in rows)


def info() -> Info:
    """Versions, device, and what can run here; never raises for want of a GPU."""
    reason = kernels.gpu_reason()
    device = None if reason else _device()
    gpu = {name: "no GPU" if device is None else _on_gpu(name, device.capability) for name in ACCUMULATORS}
    return Info(_versions(), NUMERICS_VERSION, _cpu(), device, reason, kernels.nvrtc_reason(),
                {name: {"cpu": "yes", "gpu": gpu[name]} for name in ACCUMULATORS})


def _on_gpu(accumulator: str, capability: int) -> str:
    if accumulator == "sequential":
        return "yes"
    if accumulator == "library":
        return "yes, outside attention"
    if accumulator == "exact":
        return "no: a yardstick of the CPU reference"
    found = f"this device is {capability / 10}"
    if capability in _TENSOR_CORES[accumulator]:
        return "yes"
    if accumulator == "hopper" and capability in (100, 103, 120):
        return f"not checked on compute capability {capability / 10}"
    valid = " or ".join(str(c / 10) for c in _TENSOR_CORES[accumulator])
    return f"no: it needs compute capability {valid}, {found}"


def _device() -> Device:
    runtime = kernels.import_cupy().cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return Device(properties["name"].decode(), 10 * properties["major"] + properties["minor"],
                  properties["totalGlobalMem"], properties["multiProcessorCount"])


def _versions() -> dict[str, str]:
    found = {"cuflash": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    for package in _CUPY:
        try:
            found["cupy"] = f"{importlib.metadata.version(package)} ({package})"
            break
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _cpu() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores"
