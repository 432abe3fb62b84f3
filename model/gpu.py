"""Training on a GPU: which runs can, and where their weights, moments and gradients lie."""
from typing import Any

import numpy as np

from cuflash import kernels
from cuflash.adamw import AdamWCuda
from cuflash.fixes import as_fix
from cuflash.flat import Flat
from cuflash.grad_norm import grad_norm_cuda
from cuflash.kernel_header import device_accumulator, precision_header
from cuflash.model.checkpoint import State
from cuflash.model.config import TrainConfig
from cuflash.model.gpt import GPT
from cuflash.philox import Key


def refusal(config: TrainConfig) -> str | None:
    """Why no GPU here can train this; None if one can."""
    if reason := kernels.gpu_reason():
        return reason
    if config.watch or config.dump_every:
        return "attention's kernels do not show their values to --watch and --dump-every; a CPU does"
    try:
        from cupy.cuda import cublas  # noqa: F401
    except ImportError as error:
        return f"cuBLAS cannot be loaded ({error}): pip install 'cuflash[cuda12]' or 'cuflash[cuda13]'"
    precision, head_dim = config.resolved_precision(), config.n_embd // config.n_head
    try:
        accumulator = device_accumulator(precision, kernels.capability(kernels.import_cupy().cuda.runtime.getDevice()))
        for direction in ("fwd", "bwd"):  # modes and fixes without a CUDA body say so here
            precision_header(precision, head_dim, direction, accumulator, as_fix(config.fix))
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


def device_name() -> str:
    cupy = kernels.import_cupy()
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()


class OnGpu:
    """Weights, moments and gradients in one buffer each, and an update that nothing waits for.

    Takes the arrays of `state` over: they become views of the buffers.
    """

    def __init__(self, config: TrainConfig, state: State) -> None:
        cupy = kernels.import_cupy()
        self.config, self.key = config, Key(config.seed)
        self.w, self.m, self.v = (Flat.of(arrays) for arrays in (state.params, state.m, state.v))
        self.g = Flat({name: x.shape for name, x in self.w.arrays.items()})
        state.params, state.m, state.v = self.w.arrays, self.m.arrays, self.v.arrays
        self.losses, self._failed = cupy.zeros(config.grad_accum, np.float32), cupy.zeros(1, np.int32)
        self._optimizer: AdamWCuda | None = None

    def update(self, model: GPT, losses: list[Any], step: int, lr: float) -> Any:
        """Clips and applies the gradients, unless they or a loss are not finite now or were before: the norm."""
        c = self.config
        self.key = Key(c.seed, step)
        if self._optimizer is None:
            self._optimizer = AdamWCuda(self.w, self.m, self.v, lambda name: model.rounder(name, self.key),
                                        lambda name: self.w.arrays[name].ndim > 1)
        for i, loss in enumerate(losses):
            self.losses[i:i + 1].data.copy_from_device_async(loss.data, 4)
        norm, clip = grad_norm_cuda(self.g.buffer, c.grad_clip, self.losses, self._failed, step)
        self._optimizer.update(self.g, clip, self._failed, step=step, lr=lr, beta1=c.beta1, beta2=c.beta2,
                               weight_decay=c.weight_decay)
        return norm

    def take_failed(self) -> int:
        """The first step whose loss or norm was not finite, 0 if none was; waits for the GPU, and forgets it."""
        failed = int(self._failed.get()[0])
        self._failed.fill(0)
        return failed

    def norm(self) -> float:
        """Of the gradients as they lie."""
        return float(grad_norm_cuda(self.g.buffer, 0.0, self.losses, self._failed.copy(), 0)[0])

