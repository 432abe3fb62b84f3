"""Memory of a step on a CPU: kept for the next one.

A step makes and drops thousands of arrays. glibc gives memory that is freed at the top of its heap back to
the system, which then hands it out again page by page: in a step of nano 700 page faults and 2 of 20 ms.
"""
import ctypes
import sys

# Options of mallopt, and the bytes that they are set to.
_TRIM_THRESHOLD, KEPT = -1, 1 << 28
_MMAP_THRESHOLD, LARGEST = -3, 1 << 25  # as high as glibc lets it be set: larger arrays are mapped by themselves


def keep_freed() -> bool:
    """Has the process keep up to 256 MiB of memory that it has freed; False where its C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(_TRIM_THRESHOLD, KEPT) == 1 == mallopt(_MMAP_THRESHOLD, LARGEST)
