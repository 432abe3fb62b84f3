"""Trainings in pairs that differ in one thing, and how far their weights are apart, step by step.

    runs = train_arms(folder, options, seeds=(1, 2), tile=16, every=25, say=print)
    drifts = compare(folder, pairs((1, 2)))

Source: arXiv 2405.02803, figures 7 and 8.
"""
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.dump import recording
from cuflash.model import checkpoint, session
from cuflash.model.config import TrainConfig, resolve
from cuflash.model.passes import one_pass
from cuflash.model.run import Run
from cuflash.model.train import NonFinite, header, train
from cuflash.model.trials import Arm
from cuflash.weight_diff import diff_weights

# What a training computes in. `bf16` and `fp16` keep attention's running values in fp32, as
# FlashAttention-2's kernels do; `bf16-per-tile` rounds every intermediate of attention for each tile.
# Outside attention bf16-per-tile has the roundings of bf16. fp16 scales its loss (dynamic is the default of
# a training), `fp16-unscaled` does not.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16-fa2"},
    "bf16-per-tile": {"precision": "all-bf16",
                      "round": ("linear=bf16", "gelu=bf16", "logits=bf16", "loss.dlogits=bf16")},
    "fp16": {"precision": "fp16-fa2"},
    "fp16-unscaled": {"precision": "fp16-fa2", "loss_scale": "1"},
    "fp32": {"precision": "fp32"},
}
KINDS = ("flash / plain", "two initialisations", "low precision / fp32")


@dataclass(frozen=True)
class Pair:
    """Two arms that differ in one thing: which sort of thing, in which precision, from which seed."""

    kind: str
    label: str
    seed: int
    a: str
    b: str


@dataclass(frozen=True)
class Drift:
    """How far the weights of a pair are apart at a step: one tensor, a layer (`h.0`), or all.

    `size` is the mean |A|, which is A's Wasserstein-1 distance from 0: what `wasserstein` is relative to.
    """

    kind: str
    label: str
    seed: int
    a: str
    b: str
    step: int
    name: str
    equal: float
    max_abs: float
    mean_abs: float
    wasserstein: float
    size: float

    @property
    def relative(self) -> float:
        return self.wasserstein / self.size


@dataclass(frozen=True)
class Trained:
    """An arm that was trained: last step, validation loss there, seconds of its steps; why it ended early."""

    arm: str
    step: int
    val_loss: float
    precision: str
    digest: str
    seconds: float
    stopped: str = ""


def pairs(seeds: tuple[int, int]) -> list[Pair]:
    """What is compared: flash with plain attention, two seeds, low precision with fp32."""
    one, two = seeds
    if one == two:
        raise ValueError(f"seeds {one} and {two} are the same: two initialisations need two")
    found = [Pair(KINDS[0], p, s, f"{p}-flash-{s}", f"{p}-plain-{s}")
             for p, s in (
        ("bf16", one), ("bf16", two), ("bf16-per-tile", one), ("fp16", one), ("fp16", two), ("fp32", one))]
    found += [
        Pair(KINDS[1], p, one, f"{p}-flash-{one}", f"{p}-flash-{two}") for p in ("bf16", "fp16", "fp32")
    ]
    return found + [Pair(KINDS[2], p, s, f"{p}-flash-{s}", f"fp32-flash-{s}")
                    for p in ("fp16", "fp16-unscaled", "bf16") for s in seeds]


def arms(chosen: Iterable[Pair], tile: int) -> list[Arm]:
    """The trainings that these pairs need. Batches are the same in all of them."""
    found = {}
    for name in dict.fromkeys(name for pair in chosen for name in (pair.a, pair.b)):
        precision, algorithm, seed = name.rsplit("-", 2)
        options = PRECISIONS[precision] | {"algorithm": algorithm, "seed": int(seed)}
        if algorithm == "flash":
            options["set"] = (f"tile={tile},{tile}",)
        found[name] = Arm(name, options)
    return list(found.values())


def train_arms(folder: pathlib.Path, options: dict[str, Any], chosen: Sequence[Arm], *, every: int,
               say: Callable[[str], None] = print) -> list[Trained]:
    """Trains each arm into folder/NAME, with checkpoints of step 0 and each `every` steps.

    An arm that is there is taken as it is, one that was interrupted goes on from its last checkpoint.

    Raises:
        ValueError: options that are not valid, or folders of a study with other options.
    """
    common = options | {"checkpoint_every": every, "keep": 0}
    configs = [session.options(None, common | arm.options) for arm in chosen]
    return [_train(folder / arm.name, arm, config, say) for arm, config in zip(chosen, configs)]


def _train(path: pathlib.Path, arm: Arm, config: TrainConfig, say: Callable[[str], None]) -> Trained:
    stopped = ""
    if not (path / "config.toml").exists():
        run = session.start(str(path), config, ["study", "stable", arm.name])
        first = run.trainer.state
        checkpoint.save(run.folder.checkpoint_path(0), first, header(config, run.data))
    else:
        there = resolve(Run(path).config["train"])
        changed = [
            f.name for f in dataclasses.fields(config) if getattr(there, f.name) != getattr(config, f.name)
        ]
        if changed:
            raise ValueError(f"{path} is of another study: {', '.join(changed)} differ; give another folder")
        done = Run(path).checkpoints()
        if done and done[-1][0] >= config.steps:
            return _trained(path, arm, config, "")
        run = session.resume(str(path), {}, None)
    with run:
        try:
            train(run.trainer, run.folder, lambda text: say(f"{arm.name}: {text}"), resumed=run.resumed)
        except NonFinite as e:
            stopped = str(e)
            say(f"{arm.name}: {stopped}")
    return _trained(path, arm, config, stopped)


def _trained(path: pathlib.Path, arm: Arm, config: TrainConfig, stopped: str) -> Trained:
    run, precision = Run(path), config.resolved_precision()
    rows = run.metrics
    steps = [0.0, *(row["step"] for row in rows)]
    seconds = sum(row["ms"] * (row["step"] - before) for row, before in zip(rows, steps)) / 1000
    return Trained(arm.name,
                   run.checkpoints()[-1][0], rows[-1]["val_loss"] if rows else math.nan, precision.name,
                   precision.digest, seconds, stopped)


def dump_activations(run: pathlib.Path, path: pathlib.Path) -> dict[str, str]:
    """q, k, v, unrounded, of the pass after a run's last checkpoint, as a dump; SHA-256 of its data."""
    p = one_pass(run, precision="fp32")
    with recording(path,
                   "attn.q,attn.k,attn.v",
                   attributes={
                       "data_sha256": p.data,
                       "checkpoint": p.checkpoint
                   }):
        p.run()
    return {"the trainings' data": p.data}


def compare(folder: pathlib.Path, chosen: Iterable[Pair]) -> list[Drift]:
    """Each pair's weights at every step that both have a checkpoint of."""
    found = []
    for pair in chosen:
        a, b = (dict(Run(folder / name).checkpoints()) for name in (pair.a, pair.b))
        for step in sorted(a.keys() & b.keys()):
            sizes = _sizes(a[step])
            found += [Drift(*dataclasses.astuple(pair), step, w.name, w.equal, w.max_abs, w.mean_abs,
                            w.wasserstein, sizes[w.name]) for w in diff_weights(a[step], b[step])]
    return found


def _sizes(path: pathlib.Path) -> dict[str, float]:
    """Mean |weight| of each tensor, each layer, and all."""
    state, _ = checkpoint.load(path, optimizer=False)
    sums: dict[str, np.ndarray] = {}
    for name, w in state.params.items():
        groups = [name, "all"] + [".".join(name.split(".")[:2])] * name.startswith("h.")
        for group in groups:
            sums[group] = sums.get(group, 0) + np.array([np.abs(w, dtype=np.float64).sum(), w.size])
    return {group: float(total / count) for group, (total, count) in sums.items()}
