"""Memory of a step: on a CPU kept for the next one, and what is said where there is too little.

A step makes and drops thousands of arrays. glibc gives memory that is freed at the top of its heap back to
the system, which then hands it out again page by page: in a step of nano 700 page faults and 2 of 20 ms.
"""
import ctypes
import re
import sys

from cuflash import kernels
from cuflash.launch import storage
from cuflash.model.gpt import GPTConfig
from cuflash.precision import Precision

# Options of mallopt, and the bytes that they are set to.
_TRIM_THRESHOLD, KEPT = -1, 1 << 28
_MMAP_THRESHOLD, LARGEST = -3, 1 << 25  # as high as glibc lets it be set: larger arrays are mapped by themselves


def keep_freed() -> bool:
    """Has the process keep up to 256 MiB of memory that it has freed; False where its C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(_TRIM_THRESHOLD, KEPT) == 1 == mallopt(_MMAP_THRESHOLD, LARGEST)


class TooLittle(MemoryError):
    """Memory that was not asked for, as it would not be there."""


def shortage(error: MemoryError) -> str:
    """One line about memory that NumPy or CuPy did not get: how much that was and, of a GPU, how much there is."""
    if isinstance(error, TooLittle):
        return str(error)
    if not type(error).__module__.startswith("cupy"):
        return f"too little memory: {error}" if str(error) else "too little memory"
    asked, held = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", str(error))[:2])
    free, total = kernels.import_cupy().cuda.runtime.memGetInfo()
    return (f"too little GPU memory: {in_bytes(asked)} more needed beside the {in_bytes(held)} that this process has; "
            f"the GPU has {in_bytes(free)} free of {in_bytes(total)}")


def gpu_bytes(config: GPTConfig, precision: Precision, batch_size: int) -> int:
    """What training takes of a GPU at the least: weights, gradients, moments; what forward keeps for backward.

    On an H200 GPT-2 124M at batch 32 × 1024 in bf16 took 15.3 GiB; this gives 15.0.
    """
    def size(site: str) -> int:
        return storage(precision.sites_for()[site].format).itemsize

    operands = 6 * size("linear.x") + 7 * size("linear.y") + size("attn.o")  # of C each: h, o, h, gelu; qkv, f; o
    token = config.n_layer * config.n_embd * (2 * 4 + operands) + config.vocab_size * size("logits")
    return 16 * config.n_params() + batch_size * config.block_size * token


def check_gpu(config: GPTConfig, precision: Precision, batch_size: int) -> None:
    """TooLittle where training cannot fit into what is free of the current GPU; nothing was allocated yet."""
    cupy = kernels.import_cupy()
    free, total = cupy.cuda.runtime.memGetInfo()
    free += cupy.get_default_memory_pool().free_bytes()  # of trainings before this one
    needed = gpu_bytes(config, precision, batch_size)
    if needed > free:
        raise TooLittle(f"too little GPU memory: training needs at least {in_bytes(needed)}; the GPU has {in_bytes(free)} "
                        f"free of {in_bytes(total)}")


def in_bytes(n: float) -> str:
    """`1.5 GiB`."""
    return f"{n / 2**30:.3g} GiB" if n >= 2**30 else f"{n / 2**20:.3g} MiB"
