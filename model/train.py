"""The training loop: one step, and the run around it."""
import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.adamw import adamw_update
from cuflash.grad_norm import clip_factor, grad_norm
from cuflash.model import checkpoint
from cuflash.model.config import TrainConfig
from cuflash.model.data import Data, batch
from cuflash.model.gpt import GPT, NO_LAYER, Params, init_params
from cuflash.model.gpu import OnGpu, peak_flops, use_gpu
from cuflash.model.loss_scale import LossScale, fixed
from cuflash.model.observe import Observer
from cuflash.model.run import METRICS, Metrics, Run
from cuflash.philox import Key
from cuflash.sites import Rounder
from cuflash.watching import unwatched

EVAL_BATCHES = 8
Z_WINDOW = 128  # logged values that a z-score looks back on
COUNTERS = ("ties", "changed", "capped")
TIMINGS = ("ms", "tokens_per_s", "mfu")


def header(config: TrainConfig, data: Data) -> checkpoint.Header:
    """What a checkpoint of this run says of itself."""
    return checkpoint.Header(
        config.gpt(),
        config.resolved_precision().to_toml(),
        config.resolved_fix(),
        config.seed,
        data.sha256,
        data.kind,
    )


class NonFinite(Exception):
    """Loss or gradient norm is not finite. The message has the step and the first site."""


@dataclass
class StepResult:
    """What a step gives; on a GPU it lies there, until `Trainer.settled` brings it.

    losses: of the micro-batches. rows: for each of them and each layer, rows with ties, changed by the fix,
    limited by its cap. skipped: gradients overflowed at that loss scale, and the optimizer did nothing.
    """

    losses: list[Any]
    norm: Any
    lr: float
    rows: list[list[Any]]
    loss_scale: float = 1.0
    skipped: bool = False

    @property
    def loss(self) -> float:
        return sum(loss / len(self.losses) for loss in self.losses)

    @property
    def layer_rows(self) -> np.ndarray:
        """(n_layer, 3)."""
        return np.sum(np.array(self.rows), axis=0)


class Trainer:
    """Model, optimizer state and data of one run; `step()` does one step of training."""

    def __init__(self, config: TrainConfig, data: Data, state: checkpoint.State | None = None) -> None:
        self.config, self.data = config, data
        if state is None:
            params = init_params(config.gpt(), config.seed)
            state = checkpoint.State.new(params, config.resolved_precision())
        self.state, scale = state, fixed(config.loss_scale)
        self.dynamic = scale is None
        if scale is not None:
            state.scale = LossScale(scale, skipped=state.scale.skipped)
        self.gpu = OnGpu(config, state) if use_gpu(config) else None
        self.model = GPT(config.gpt(), state.params, config.resolved_precision(), config.fix,
                         self.gpu.g.arrays if self.gpu else None)

    def step(self) -> StepResult:
        """One step: gradients of grad_accum micro-batches, clipping, AdamW. A GPU is waited for only where the
        loss scale is dynamic.

        Raises:
            NonFinite: before anything has changed; on a GPU by `settled`.
        """
        c, state = self.config, self.state
        lr, scale = c.lr_at(state.step + 1), state.scale.value
        updates = state.step + 1 - state.scale.skipped  # AdamW's t
        if self.gpu:
            batches = [self._batch(i) for i in range(c.grad_accum)]
            state.step += 1
            losses, norm, rows = self.gpu.step(self.model, batches, state.step, updates, lr, scale)
            result = StepResult(losses, norm, lr, rows, scale)
            if self.dynamic and (failed := self.gpu.take_failed()):
                state.step = failed - 1
                self._skip(result)
                state.step += 1
            elif self.dynamic:
                state.scale.grown()
            return result
        losses, grads, rows = self._gradients()
        with np.errstate(over="ignore", invalid="ignore"):
            norm = grad_norm(grads[name] for name in state.params) / scale
        result = StepResult(losses, norm, lr, rows, scale)
        if not (math.isfinite(result.loss) and math.isfinite(norm)):
            self._skip(result)
            state.step += 1
            return result
        state.step += 1
        if self.dynamic:
            state.scale.grown()
        clip = clip_factor(norm, c.grad_clip) / scale
        key = Key(c.seed, state.step)
        for name, w in state.params.items():
            adamw_update(
                w,
                grads[name],
                state.m[name],
                state.v[name],
                self.model.rounder(name, key),
                step=updates,
                lr=lr,
                beta1=c.beta1,
                beta2=c.beta2,
                clip=clip,
                weight_decay=c.weight_decay if w.ndim > 1 else 0.0,
            )
        return result

    def _skip(self, result: StepResult) -> None:
        """Halves a dynamic loss scale that has made gradients overflow.

        Raises:
            NonFinite: the scale is not to blame: the loss itself is not finite, or the scale is fixed or 1.
        """
        if not (self.dynamic and math.isfinite(float(result.loss)) and self.state.scale.halved()):
            raise NonFinite(self._describe_non_finite())
        result.skipped = True

    def settled(self, result: StepResult) -> StepResult:
        """The result on the host, once the GPU has done its step.

        Raises:
            NonFinite: that step's or an earlier one's loss or norm was not finite; nothing has changed
                since, and `state.step` is the one before.
        """
        if self.gpu is None:
            return result
        if failed := self.gpu.take_failed():
            self.state.step = failed - 1
            raise NonFinite(self._describe_non_finite())
        import cupy
        rows = cupy.stack([cupy.stack(layers) for layers in result.rows]).get()
        losses = [float(loss) for loss in result.losses]
        return dataclasses.replace(result, losses=losses, norm=float(result.norm), rows=list(rows))

    def evaluate(self) -> float:
        """Mean loss of EVAL_BATCHES fixed batches of the validation text."""
        c = self.config
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a loss of NaN says so itself
            losses = [
                self.model.loss(
                    *batch(self.data.val, c.block_size, self._samples(0), seed=0, step=i), Key(c.seed)
                )
                for i in range(EVAL_BATCHES)
            ]
        return sum(losses) / len(losses)

    def _gradients(self) -> tuple[list[Any], Params, list[list[Any]]]:
        """Losses of the micro-batches, the sum of their gradients, counters of each one's layers."""
        c, step = self.config, self.state.step + 1
        grads: Params = {}
        losses, rows = [], []
        with np.errstate(
            over="ignore", invalid="ignore", divide="ignore"
        ):  # step() looks for what is not finite
            for i in range(c.grad_accum):
                loss, grads, stats = self.model.loss_and_grads(
                    *self._batch(i),
                    Key(c.seed, step, sample=self._samples(i).start),
                    grads=grads,
                    n_micro=c.grad_accum,
                    loss_scale=self.state.scale.value,
                )
                losses.append(loss)
                rows.append(stats)
        return losses, grads, rows

    def _batch(self, micro: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the next step."""
        c = self.config
        return batch(
            self.data.train, c.block_size, self._samples(micro), seed=c.data_seed, step=self.state.step + 1
        )

    def _samples(self, micro: int) -> range:
        return range(micro * self.config.batch_size, (micro + 1) * self.config.batch_size)

    def _describe_non_finite(self) -> str:
        """Repeats the step, which has changed nothing yet, with a watcher that finds the first such value."""
        found: list[str] = []

        def watch(rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
            if not found and not _is_finite(site, rounded):
                found.append(place(rnd, site))

        self.model.watch = watch
        try:
            with unwatched():
                losses, grads, _ = self._gradients()
        finally:
            self.model.watch = None
        what, value = "loss", sum(float(loss) / len(losses) for loss in losses)
        if math.isfinite(value):
            with np.errstate(over="ignore", invalid="ignore"):
                what, value = (
                    "gradient norm",
                    self.gpu.norm() if self.gpu else grad_norm(grads[n] for n in self.state.params),
                )
        first = f"at site {found[0]}" if found else "in no site's value, so in a sum of finite ones"
        step = self.state.step + 1
        return f"step {step}: {what} is {value}; the first value that is not finite appeared {first}"


def place(rnd: Rounder, site: str) -> str:
    """`fwd/L1/c_fc/linear.y`, as `--round` writes it."""
    parts = [rnd.direction]
    if rnd.layer != NO_LAYER:
        parts.append(f"L{rnd.layer}")
    if rnd.module and not site.startswith("attn."):
        parts.append(rnd.module)
    return "/".join([*parts, site])


class ZScore:
    """How many standard deviations a value lies above the mean of the last Z_WINDOW ones (as llm.c)."""

    def __init__(self, values: list[float]) -> None:
        self.values = deque(values, Z_WINDOW)

    def add(self, value: float) -> float:
        """The value's z-score against those before it (0 with fewer than 2), which it then joins if finite."""
        if not math.isfinite(value):
            return math.nan
        z = 0.0
        if len(self.values) > 1 and (deviation := statistics.pstdev(self.values)) > 0:
            z = (value - statistics.fmean(self.values)) / deviation
        self.values.append(value)
        return z


def columns(n_layer: int) -> list[str]:
    """Of metrics.csv. Counters are rows of attention: totals, then by layer. The last three are timings.

    loss_scale is that of the step, skipped how many steps so far it has kept from the optimizer. mfu is the
    share of the device's peak (`peak_flops`) that the model's FLOPs are, where one is known.
    """
    layers = [f"{counter}_L{i}" for i in range(n_layer) for counter in COUNTERS]
    return [
        "step",
        "loss",
        "loss_z",
        "norm",
        "norm_z",
        "lr",
        "loss_scale",
        "skipped",
        "val_loss",
        "rows",
        *COUNTERS,
        *layers,
        *TIMINGS,
    ]


def train(trainer: Trainer, run: Run, say: Callable[[str], None], *, resumed: bool = False,
          progress: Callable[[int], object] | None = None, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains to config.steps: logs, evaluates, keeps checkpoints.

    Args:
        say: takes each line of progress.
        progress: called with the step after each one.
        stop: asked after each step; True ends the run with a checkpoint.

    Raises:
        NonFinite: after the state before the step has been saved, if that is finite.
        OSError: a file cannot be written; the checkpoints before are whole.
    """
    c, state = trainer.config, trainer.state
    loss_z, norm_z = ZScore(state.losses), ZScore(state.norms)
    metrics = Metrics(run.path / METRICS, columns(c.n_layer), after=state.step if resumed else None)
    observer = Observer(trainer, run, NonFinite, resumed=resumed)

    def save() -> None:
        state.losses, state.norms = list(loss_z.values), list(norm_z.values)
        observer.save()  # first: a resume leaves out steps after its checkpoint, but cannot make up for missing ones
        checkpoint.save(run.checkpoint_path(state.step), state, header(c, trainer.data))
        run.keep_last(c.keep)

    try:
        since, begun = state.step, time.perf_counter()
        while state.step < c.steps:
            try:
                with observer.step(state.step + 1):
                    result = trainer.step()
                last, stopping = state.step == c.steps, stop()
                evaluated = last or (c.eval_every and state.step % c.eval_every == 0)
                logged = state.step % c.log_every == 0 or evaluated
                saved = last or stopping or (c.checkpoint_every and state.step % c.checkpoint_every == 0)
                if logged or saved:
                    result = trainer.settled(result)
            except NonFinite as e:
                if not all(np.isfinite(p).all() for p in state.params.values()):
                    raise NonFinite(f"{e}; the weights were so already, from the update before") from e
                save()
                raise NonFinite(
                    f"{e}; the state before that step is kept in {run.checkpoint_path(state.step)}"
                ) from e
            if progress:
                progress(state.step)
            if result.skipped:
                say(f"step {state.step}/{c.steps} | skipped: gradients overflow at loss scale "
                    f"{result.loss_scale:g}, now {state.scale.value:g}")
            if logged:
                ms = (time.perf_counter() - begun) * 1000 / (state.step - since)
                row = _row(trainer, result, loss_z, norm_z, ms)
                if evaluated:
                    row["val_loss"] = trainer.evaluate()
                metrics.write({k: f"{v:.4g}" if k in TIMINGS else v for k, v in row.items()})
                say(line(row, c.steps))
            if biased := observer.after(state.step, logged):
                say(biased)
            if logged:
                since, begun = state.step, time.perf_counter()
            if saved:
                save()
            if stopping:
                return
    finally:
        metrics.close()


def _row(trainer: Trainer, result: StepResult, loss_z: ZScore, norm_z: ZScore, ms: float) -> dict[str, float]:
    c = trainer.config
    tokens = c.batch_size * c.grad_accum * c.block_size
    row: dict[str, float] = {
        "step": trainer.state.step,
        "loss": result.loss,
        "loss_z": loss_z.add(result.loss),
        "norm": result.norm,
        "norm_z": norm_z.add(result.norm),
        "lr": result.lr,
        "loss_scale": result.loss_scale,
        "skipped": trainer.state.scale.skipped,
        "rows": tokens * c.n_head * c.n_layer,
    }
    row |= {counter: int(n) for counter, n in zip(COUNTERS, result.layer_rows.sum(axis=0))}
    row |= {
        f"{counter}_L{i}": int(n)
        for i, layer in enumerate(result.layer_rows)
        for counter, n in zip(COUNTERS, layer)
    }
    row |= {"ms": ms, "tokens_per_s": tokens * 1000 / ms}
    peak = peak_flops() if trainer.gpu else None
    return row | ({"mfu": c.gpt().flops_per_token() * row["tokens_per_s"] / peak} if peak else {})


def line(row: dict[str, float], steps: int) -> str:
    """`step 120/1000 | loss 3.2101 (+0.3z) | norm 0.82 | lr 9.8e-4 | 41.2 ms | 398k tok/s | ties 3.1 %`."""
    rate = row["tokens_per_s"]
    parts = [
        f"step {row['step']}/{steps}",
        f"loss {row['loss']:.4f} ({row['loss_z']:+.1f}z)",
        f"norm {row['norm']:.2f}",
        f"lr {short(row['lr'])}",
        f"{row['ms']:.1f} ms",
        f"{rate / 1000:.0f}k tok/s" if rate >= 10_000 else f"{rate / 1000:.1f}k tok/s",
        f"ties {100 * row['ties'] / row['rows']:.1f} %",
    ]
    if "mfu" in row:
        parts.insert(-1, f"mfu {100 * row['mfu']:.0f} %")
    if row["loss_scale"] != 1:
        parts.append(f"scale {row['loss_scale']:g}")
    if "val_loss" in row:
        parts.append(f"val {row['val_loss']:.4f}")
    return " | ".join(parts)


def short(x: float) -> str:
    """9.8e-4 for 0.00098."""
    mantissa, _, exponent = f"{x:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


# Where −Inf is meant: a masked entry, or a row that has seen no key yet.
_MINUS_INF = frozenset({"attn.m", "attn.x", "attn.dm", "attn.lse", "attn.x_bwd"})


def _is_finite(site: str, x: np.ndarray) -> bool:
    return bool(np.isfinite(x).all() if site not in _MINUS_INF else (x < np.inf).all())
