"""Training on a GPU: which runs can, and where their weights, moments and gradients lie."""
import functools
import math
from typing import Any

import numpy as np
from cuflash.model.checkpoint import State
from cuflash.model.config import DEVICES, TrainConfig
from cuflash.model.gpt import GPT, GPTConfig, Params
from cuflash.model.memory import check_gpu

from cuflash import kernels
from cuflash.adamw import AdamWCuda
from cuflash.errors import install, last_line, unknown
from cuflash.fixes import Fix, as_fix
from cuflash.flat import Flat
from cuflash.grad_norm import grad_norm_cuda
from cuflash.kernel_header import device_accumulator, precision_header
from cuflash.philox import Key
from cuflash.precision import Precision


def refusal(config: TrainConfig) -> str | None:
    """Why no GPU here can train this; None if one can."""
    if reason := kernels.gpu_reason():
        return reason
    return _cannot_run(config.gpt(), config.resolved_precision(), as_fix(config.fix), ("fwd", "bwd"))


def _cannot_run(config: GPTConfig, precision: Precision, fix: Fix, directions: tuple[str, ...]) -> str | None:
    """Why the GPU cannot run a model; None if it can."""
    try:
        from cupy.cuda import cublas  # noqa: F401
    except ImportError as error:
        return f"cuBLAS cannot be loaded ({last_line(error)}): {install('cuda12', 'cuda13')}"
    try:
        device = kernels.import_cupy().cuda.runtime.getDevice()
        accumulator = device_accumulator(precision, kernels.capability(device))
        for direction in directions:  # modes and fixes without a CUDA body say so here
            precision_header(precision, config.n_embd // config.n_head, direction, accumulator, fix)
    except ValueError as error:
        return str(error)
    return None


def use_gpu(config: TrainConfig) -> bool:
    """Whether a run trains on the GPU.

    Raises:
        ValueError: it was asked for by name and cannot.
    """
    if config.device == "cpu":
        return False
    reason = refusal(config)
    if reason and config.device == "gpu":
        raise ValueError(f"--device gpu: {reason}")
    return reason is None


def placed(config: GPTConfig, params: Params, precision: Precision, fix: Fix, device: str,
           directions: tuple[str, ...] = ("fwd",)) -> Params:
    """Parameters where a pass can run, forward or `("fwd", "bwd")`: copied to the GPU, or as they are for the CPU.

    Raises:
        ValueError: no such device, or the GPU was asked for by name and cannot run it.
    """
    if device not in DEVICES:
        raise unknown("--device", device, DEVICES)
    if device == "cpu":
        return params
    reason = kernels.gpu_reason() or _cannot_run(config, precision, fix, directions)
    if reason and device == "gpu":
        raise ValueError(f"--device gpu: {reason}")
    return params if reason else Flat.of(params).arrays


# Dense bf16 FLOP/s of the tensor cores, from NVIDIA's data sheets; the first one in the device's name counts.
_PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
          "A100": 312e12, "L40S": 362e12}


@functools.cache
def peak_flops() -> float | None:
    """Of the current device, None where it is not known."""
    name = kernels.device_name()
    return next((peak for part, peak in _PEAKS.items() if f" {part}" in name), None)


class OnGpu:
    """Weights, moments and gradients in one buffer each, and a step that nothing waits for.

    Takes the arrays of `state` over: they become views of the buffers. All that changes from step to step is
    uploaded before it: tokens, the optimizer's numbers, the step's own.
    """

    def __init__(self, config: TrainConfig, state: State) -> None:
        cupy = kernels.import_cupy()
        check_gpu(config.gpt(), config.resolved_precision(), config.batch_size)
        self.cupy, self.config, self.key = cupy, config, Key(config.seed)
        self.w, self.m, self.v = (Flat.of(arrays) for arrays in (state.params, state.m, state.v))
        self.g = Flat({name: x.shape for name, x in self.w.arrays.items()})
        state.params, state.m, state.v = self.w.arrays, self.m.arrays, self.v.arrays
        self.losses, self._failed = cupy.zeros(config.grad_accum, np.float32), cupy.zeros(1, np.int32)
        self._optimizer: AdamWCuda | None = None

        tokens = (config.grad_accum, 2, config.batch_size, config.block_size)
        size = math.prod(tokens)
        self._uploaded = cupy.empty(size + 8, np.int32)
        self._tokens = self._uploaded[:size].reshape(tokens)
        self._scalars, self._step = self._uploaded[size:size + 7].view(np.float32), self._uploaded[size + 7:]
        # The host may be this many steps ahead.
        self._staging = [(_pinned(size + 8), cupy.cuda.Event(disable_timing=True)) for _ in range(3)]
        self._steps = 0

    def step(self, model: GPT, batches: list[tuple[np.ndarray, np.ndarray]], step: int, updates: int,
             lr: float, loss_scale: float) -> tuple[Any, ...]:
        """Queues a step: losses of the micro-batches, norm, counters of each one's layers; all on the GPU.

        updates: those of the optimizer, this one included. It is left out where a loss or the norm is not
        finite, now or at a step before.
        """
        c = self.config
        self.key = Key(c.seed, step)
        staged, event = self._staging[self._steps % len(self._staging)]
        event.synchronize()
        staged[:-8] = np.array(batches).reshape(-1)
        staged[-8:-1].view(np.float32)[:] = AdamWCuda.scalars(step=updates, lr=lr, beta1=c.beta1, beta2=c.beta2,
                                                              weight_decay=c.weight_decay)
        staged[-1] = step
        stream = self.cupy.cuda.get_current_stream()
        self._uploaded.set(staged, stream)
        event.record(stream)
        self._steps += 1
        return self._queue(model, loss_scale)

    def _queue(self, model: GPT, loss_scale: float) -> tuple[Any, ...]:
        c = self.config
        grads: dict[str, Any] = {}
        losses, rows = [], []
        for i in range(c.grad_accum):
            key = Key(c.seed, self.key.step, sample=i * c.batch_size)
            loss, grads, stats = model.loss_and_grads(self._tokens[i, 0], self._tokens[i, 1], key,
                                                      grads=grads, n_micro=c.grad_accum,
                                                      loss_scale=loss_scale)
            self.losses[i:i + 1].data.copy_from_device_async(loss.data, 4)
            losses.append(loss)
            rows.append(stats)
        if self._optimizer is None:
            self._optimizer = AdamWCuda(self.w, self.m, self.v, lambda name: model.rounder(name, self.key),
                                        lambda name: self.w.arrays[name].ndim > 1)
        norm, clip = grad_norm_cuda(self.g.buffer, c.grad_clip, self.losses, self._failed, self._step)
        if loss_scale != 1:
            norm, clip = self._unscaled(norm, loss_scale)
        self._optimizer.update(self.g, clip, self._failed, self._scalars)
        return losses, norm, rows

    def _unscaled(self, norm: Any, loss_scale: float) -> tuple[Any, Any]:
        """The norm without a loss scale, a power of two, and what gradients that have it are multiplied by."""
        norm, limit = norm / np.float32(loss_scale), self.config.grad_clip
        if not limit:
            return norm, self.cupy.full((), 1 / loss_scale, np.float32)
        clip = self.cupy.minimum(limit / (norm.astype(np.float64) + 1e-6), 1)
        return norm, clip.astype(np.float32) / np.float32(loss_scale)

    def take_failed(self) -> int:
        """The first step whose loss or norm was not finite, 0 if none; waits for the GPU and forgets it."""
        failed = int(self._failed.get()[0])
        self._failed.fill(0)
        return failed

    def norm(self) -> float:
        """Of the gradients as they lie."""
        return float(grad_norm_cuda(self.g.buffer, 0.0, self.losses, self._failed.copy(), self._step)[0])


def _pinned(size: int) -> np.ndarray:
    """int32 on the host, from where a copy to the GPU need not be waited for."""
    memory = kernels.import_cupy().cuda.alloc_pinned_memory(4 * size)
    return np.frombuffer(memory, np.int32, size)
