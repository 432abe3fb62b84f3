"""Arrays of several shapes in one buffer on the GPU, so that one kernel takes them all."""
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.reduce import BLOCK  # each array starts at a multiple of it, so that no block of a sum has two

__all__ = ["BLOCK", "Flat"]


class Flat:
    """fp32 arrays one after the other, zeros between them.

    Attributes:
        buffer: all of it, one-dimensional.
        arrays: name -> the array, a view.
        begins: name -> its first element in the buffer.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        import cupy
        self.begins: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.begins[name] = end
            end += -(-math.prod(shape) // BLOCK) * BLOCK
        self.buffer = cupy.zeros(end, np.float32)
        self.arrays: dict[str, Any] = {}
        for name, begin in self.begins.items():
            self.arrays[name] = self.buffer[begin:begin + math.prod(shapes[name])].reshape(shapes[name])

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Flat":
        """Copies of NumPy arrays."""
        self = cls({name: a.shape for name, a in arrays.items()})
        for name, a in arrays.items():
            self.arrays[name].set(np.ascontiguousarray(a, np.float32))
        return self
