"""One forward and backward pass of a checkpoint, on the batch that training would take next."""
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuflash.audit import Capture
from cuflash.errors import ranges
from cuflash.fixes import Fix, as_fix
from cuflash.model.checkpoint import Header
from cuflash.model.config import resolve
from cuflash.model.data import batch, load
from cuflash.model.gpt import GPT, Params
from cuflash.model.gpu import placed
from cuflash.model.run import run_of
from cuflash.model.sample import load_model
from cuflash.philox import Key
from cuflash.precision import as_precision
from cuflash.sites import Rounder


@dataclass
class Pass:
    """A model, its batch x, y (B, T) and the key of the step: all that a pass depends on.

    `step` is the step that training would do from this checkpoint, the checkpoint's own and one.
    """

    model: GPT
    header: Header
    checkpoint: int
    x: np.ndarray
    y: np.ndarray
    key: Key
    data: str

    @property
    def step(self) -> int:
        return self.checkpoint + 1

    def run(self) -> tuple[float, Params]:
        """Loss in nats and gradients of the batch."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            loss, grads, _ = self.model.loss_and_grads(self.x, self.y, self.key)
        return float(loss), grads


def one_pass(path: str | pathlib.Path, *, step: int | None = None, data: str | None = None,
             data_seed: int | None = None, batch_size: int | None = None,
             samples: Sequence[int] | None = None, precision: str | None = None, rounds: Sequence[str] = (),
             settings: Sequence[str] = (), fix: Fix | str | None = None, device: str = "cpu") -> Pass:
    """The pass of a run's checkpoint, or of a file: a checkpoint, or GPT-2's weights as safetensors, which count as
    step 0 and are computed in bf16-fa2 unless `precision` is given.

    Args:
        path: a run folder, RUN@STEP, or a file (then `data` is needed).
        step: of the checkpoint; default the last.
        data, data_seed, batch_size: instead of the run's; batch_size is 1 for a file.
        samples: only samples up to the largest of these are computed; their numbers, and so their bits, stay.
        precision, rounds, settings, fix: instead of the run's precision and fix, or changing them.
        device: `auto`, `cpu` or `gpu`.

    Raises:
        ValueError: for any of these that is not valid, and for a damaged checkpoint.
    """
    model, header, at = load_model(path, step)
    seed = header.seed
    if step is not None and step != at:
        raise ValueError(f"--step {step}: {path} is of step {at}")
    if run := run_of(path):
        config = resolve(run.config["train"])
        data, data_seed = data or config.data, config.data_seed if data_seed is None else data_seed
        batch_size = batch_size or config.batch_size
    if data is None:
        raise ValueError(f"{path} is a file and no run, so it says nothing of data: name some with --data")
    size = batch_size or 1
    if samples is not None:
        outside = [s for s in samples if not 0 <= s < size]
        if outside:
            raise ValueError(f"--batch {ranges(outside)}: the batch has samples 0 to {size - 1}")
        size = max(samples) + 1
    loaded = load(data)
    loaded.check(header.model.vocab_size, header.model.block_size)
    x, y = batch(loaded.train, header.model.block_size, range(size),
                 seed=1 if data_seed is None else data_seed, step=at + 1)
    p = as_precision(precision) if precision else model.precision
    p = p.set(*settings).round(*rounds)
    fix = as_fix(header.fix if fix is None else fix)
    model = GPT(header.model, placed(header.model, model.params, p, fix, device, ("fwd", "bwd")), p, fix)
    return Pass(model, header, at, x, y, Key(seed, at + 1), loaded.sha256)


def captures(p: Pass, layers: Sequence[int], *, heads: Sequence[int] | None = None,
             samples: Sequence[int] | None = None) -> dict[int, Capture]:
    """What attention took in each of these layers during the pass: q, k, v before their sites, and dO."""
    found: dict[int, dict[str, np.ndarray]] = {i: {} for i in layers}
    config = p.header.model
    shape = (len(p.x), config.n_head, config.block_size, config.n_embd // config.n_head)
    taken = {("fwd", "attn.q"): "q", ("fwd", "attn.k"): "k", ("fwd", "attn.v"): "v", ("bwd", "attn.do"): "do"}

    def watch(rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
        name = taken.get((rnd.direction, site))
        if name and rnd.layer in found:
            whole = found[rnd.layer].setdefault(name, np.empty(shape, x.dtype))
            whole[np.asarray(rnd.samples) - p.key.sample, np.asarray(rnd.heads)] = x

    p.model.watch = watch
    try:
        p.run()
    finally:
        p.model.watch = None
    return {
        i: Capture.of(**arrays, causal=True, layer=i, heads=heads, batch=samples)
        for i, arrays in found.items()
    }
