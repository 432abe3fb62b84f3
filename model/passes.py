"""One forward and backward pass of a checkpoint, on the batch that training would take next."""
import dataclasses
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cuflash.audit import Capture
from cuflash.errors import ranges
from cuflash.fixes import Fix, as_fix
from cuflash.model.checkpoint import Header, loss_scale
from cuflash.model.config import resolve
from cuflash.model.data import batch, load
from cuflash.model.gpt import GPT, Params
from cuflash.model.gpu import placed
from cuflash.model.run import checkpoint_of, run_of
from cuflash.model.sample import load_model
from cuflash.philox import Key
from cuflash.precision import as_precision
from cuflash.sites import Rounder
from cuflash.watching import Only


@dataclass
class Pass:
    """A model, its batch x, y (B, T) and the key of the step: all that a pass depends on.

    `step` is the step that training would do from this checkpoint, the checkpoint's own and one. Gradients are
    those of the mean loss over `whole` samples, the step's, times `loss_scale`, though x may have fewer;
    `micro` samples are computed at a time.
    """

    model: GPT
    header: Header
    checkpoint: int
    x: np.ndarray
    y: np.ndarray
    key: Key
    data: str
    micro: int
    whole: int
    loss_scale: float = 1.0

    @property
    def step(self) -> int:
        return self.checkpoint + 1

    def run(self) -> tuple[float, Params]:
        """Mean loss of x in nats, and gradients."""
        loss, grads = 0.0, None
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for i in range(0, len(self.x), self.micro):
                x, y = self.x[i:i + self.micro], self.y[i:i + self.micro]
                key = dataclasses.replace(self.key, sample=self.key.sample + i)
                mean, grads, _ = self.model.loss_and_grads(x, y, key, grads=grads, loss_scale=self.loss_scale,
                                                           n_micro=Fraction(self.whole, len(x)))
                loss += float(mean) * len(x)
        return loss / len(self.x), grads


def one_pass(path: str | pathlib.Path, *, step: int | None = None, data: str | None = None,
             data_seed: int | None = None, batch_size: int | None = None,
             samples: Sequence[int] | None = None, precision: str | None = None, rounds: Sequence[str] = (),
             settings: Sequence[str] = (), fix: Fix | str | None = None, device: str = "cpu") -> Pass:
    """The pass of a run's checkpoint, or of a file: a checkpoint, or GPT-2's weights as safetensors, which count as
    step 0 and are computed in bf16-fa2 unless `precision` is given.

    Args:
        path: a run folder, RUN@STEP, or a file (then `data` is needed).
        step: of the checkpoint; default the last.
        data, data_seed: instead of the run's.
        batch_size: samples of the step, at once; default the run's micro-batches, of a file 1.
        samples: only samples up to the largest of these are computed; their numbers and their share of the
            gradients stay, and so do their bits (under accumulator `auto` as far as BLAS's do).
        precision, rounds, settings, fix: instead of the run's precision and fix, or changing them.
        device: `auto`, `cpu` or `gpu`.

    Raises:
        ValueError: for any of these that is not valid, and for a damaged checkpoint.
    """
    model, header, at = load_model(path, step)
    seed, micro_batches = header.seed, 1
    if step is not None and step != at:
        raise ValueError(f"--step {step}: {path} is of step {at}")
    if run := run_of(path):
        config = resolve(run.config["train"])
        data, data_seed = data or config.data, config.data_seed if data_seed is None else data_seed
        micro_batches = config.grad_accum if batch_size is None else 1
        batch_size = batch_size or config.batch_size
    if data is None:
        raise ValueError(f"{path} is a file and no run, so it says nothing of data: name some with --data")
    micro = batch_size or 1
    size = whole = micro * micro_batches
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
    scale = 1.0 if str(path).endswith(".safetensors") else loss_scale(checkpoint_of(path, step=step))
    return Pass(model, header, at, x, y, Key(seed, at + 1), loaded.sha256, micro, whole, scale)


def captures(p: Pass, layers: Sequence[int], *, heads: Sequence[int] | None = None,
             samples: Sequence[int] | None = None) -> dict[int, Capture]:
    """What attention took in each of these layers during the pass: q, k, v before their sites, and dO. They are
    computed where the pass was."""
    found: dict[int, dict[str, np.ndarray]] = {i: {} for i in layers}
    config = p.header.model
    shape = (len(p.x), config.n_head, config.block_size, config.n_embd // config.n_head)
    taken = {("fwd", "attn.q"): "q", ("fwd", "attn.k"): "k", ("fwd", "attn.v"): "v", ("bwd", "attn.do"): "do"}

    def watch(rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
        name = taken.get((rnd.direction, site))
        if name and rnd.layer in found:
            whole = found[rnd.layer].setdefault(name, np.empty(shape, x.dtype))
            whole[np.asarray(rnd.samples) - p.key.sample, np.asarray(rnd.heads)] = x

    p.model.watch = Only(watch, lambda direction, layer, module, site, sample:
                         (direction, site) in taken and layer in found)
    try:
        p.run()
    finally:
        p.model.watch = None
    return {
        i: Capture.of(**arrays, causal=True, layer=i, heads=heads, batch=samples,
                      device="gpu" if p.model.gpu else "cpu")
        for i, arrays in found.items()
    }
