"""A run from its options to its sampled text: what `cuflash train` does between arguments and printing."""
import dataclasses
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from cuflash import NUMERICS_VERSION, __version__
from cuflash.fixes import as_fix
from cuflash.model import checkpoint
from cuflash.model.config import TrainConfig, from_toml, resolve
from cuflash.model.data import Data, load
from cuflash.model.run import Run, next_free
from cuflash.model.sample import decode, encode, generate
from cuflash.model.train import NonFinite, Trainer, train

__all__ = ["NonFinite", "Session", "dry_run", "options", "resume", "start"]

SAMPLE_TOKENS = 400
PROMPT = "The "


def options(config: str | None, given: dict[str, Any]) -> TrainConfig:
    """Flags over --config over the model's preset over the defaults; ValueError for any that is not valid."""
    c = resolve((from_toml("--config", config) if config else {}) | given)
    if c.device == "gpu":
        raise ValueError("--device gpu: the transformer has no GPU path yet (attention alone runs there); valid now: auto, cpu")
    return c


class Session:
    """A locked run folder and its trainer; a context manager that lets go of the lock."""

    def __init__(self, folder: Run, config: TrainConfig, data: Data, state: checkpoint.State | None, notes: list[str]) -> None:
        self.folder, self.config, self.data, self.resumed = folder, config, data, state is not None
        self._lock, self._notes = folder.lock(), notes
        self.trainer = Trainer(config, data, state)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.__exit__(kind, error, trace)

    def train(self, say: Callable[[str], None], advance: Callable[[int], object] | None, stop: Callable[[], bool]) -> None:
        """Prints what is resolved, trains, samples unless stopped."""
        for text in [*heading(self.config, self.data), *self._notes]:
            say(text)
        train(self.trainer, self.folder, say, resumed=self.resumed, progress=advance, stop=stop)
        if not stop():
            say("")
            say(self.sample())

    def sample(self) -> str:
        kind, model = self.data.kind, self.trainer.model
        prompt = encode(PROMPT if kind == "bytes" else "", kind, self.config.vocab_size)
        return decode(prompt + list(generate(model, prompt, SAMPLE_TOKENS, seed=self.config.seed)), kind)

    def closing(self, stopped: bool) -> str:
        path = self.folder.path
        if stopped:
            return f"stopped at step {self.trainer.state.step}; cuflash train --resume --out {path} continues"
        last = self.folder.metrics[-1]["loss"]
        return (f"\nloss {last:.4f} nats a token; unigram entropy of the text {self.data.unigram_entropy():.4f}\n"
                f"run in {path}: config.toml, metrics.csv, checkpoints; more text: cuflash sample {path}")


def start(out: str | None, config: TrainConfig, command: list[str]) -> Session:
    """A new run in `out`, by default in runs/ under the first free name."""
    data = _data(config)
    fix = str(as_fix(config.fix)).partition(":")[0].replace("/", "-")
    stem = f"{pathlib.Path(config.model).stem}-{config.resolved_precision().name}-{fix}"
    folder = Run.create(out or next_free(pathlib.Path("runs"), stem), _config_toml(config, data, command))
    return Session(folder, config, data, None, [])


def resume(out: str | None, given: dict[str, Any], config_file: str | None) -> Session:
    """The run in `out` from its last checkpoint; flags may change nothing that training sees."""
    if out is None:
        raise ValueError("--resume: say which run with --out DIR")
    if config_file:
        raise ValueError("--config: --resume takes the options from the run's own config.toml; drop --config")
    folder = Run(out)
    stored = folder.config
    config = resolve(stored["train"])
    wanted = resolve(stored["train"] | given)
    if changed := wanted.changed(config):
        listed = ", ".join(f"--{n.replace('_', '-')} {getattr(config, n)!r} -> {getattr(wanted, n)!r}" for n in changed)
        raise ValueError(f"--resume continues the same training; changed: {listed}")
    if stored["environment"]["numerics_version"] != NUMERICS_VERSION:
        raise ValueError(f"--resume: the run is of numerics version {stored['environment']['numerics_version']}, this is "
                         f"{NUMERICS_VERSION}; its bits cannot be continued")
    found = folder.checkpoints()
    if not found:
        raise ValueError(f"--resume: {out} has no checkpoint yet; start it anew in another --out")
    state, header = checkpoint.load(found[-1][1])
    data = _data(config)
    session = Session(folder, wanted, data, state, _environment_notes(stored["environment"]))
    for what, mine, theirs in (("model", session.trainer.header.model, header.model),
                               ("precision", session.trainer.header.precision, header.precision),
                               ("fix", session.trainer.header.fix, header.fix),
                               ("data (SHA-256)", session.trainer.header.data, header.data)):
        if mine != theirs:
            raise ValueError(f"--resume: the checkpoint {found[-1][1].name} has another {what}: {theirs}, the run {mine}")
    if state.step >= wanted.steps:
        raise ValueError(f"--resume: the run has its {state.step} steps already; a larger --steps goes on")
    return session


def heading(c: TrainConfig, data: Data) -> list[str]:
    """Line 1: precision, fix, accumulator, device. Then model and data."""
    precision = c.resolved_precision()
    auto = precision.accumulator == "auto"
    accumulator = "fp64" if precision.is_fp64 else "library (auto)" if auto else precision.accumulator
    gpt = c.gpt()
    lines = [f"precision {precision.describe()} | fix {as_fix(c.fix)} | accumulator {accumulator} | device {device(c)}",
             f"model {c.model}: {gpt.n_params():,} parameters, {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, "
             f"context {c.block_size} | batch {c.batch_size}" + (f" × {c.grad_accum}" if c.grad_accum > 1 else ""),
             f"data {data.name}: {len(data.train):,} tokens, {len(data.val):,} for validation, SHA-256 {data.sha256[:12]} | "
             f"unigram entropy {data.unigram_entropy():.4f} nats"]
    return lines


def device(c: TrainConfig) -> str:
    threads = f"cpu, {_cores()} cores"
    return threads + (" (auto: the transformer has no GPU path yet)" if c.device == "auto" and _gpu_present() else "")


def dry_run(c: TrainConfig) -> list[str]:
    """What a run would take; the time is that of one sample's step, measured."""
    data = _data(c)
    gpt, tokens = c.gpt(), c.batch_size * c.grad_accum * c.block_size
    size = 8 if c.resolved_precision().is_fp64 else 4
    # Per token and layer: 16 vectors of the width kept for backward, and S and P while attention runs.
    kept = c.batch_size * c.block_size * (c.n_layer * (16 * c.n_embd + 2 * c.n_head * c.block_size) + 3 * c.vocab_size)
    one = Trainer(dataclasses.replace(c, batch_size=1, grad_accum=1), data)
    one.step()
    begun = time.perf_counter()
    one.step()
    seconds = (time.perf_counter() - begun) * c.batch_size * c.grad_accum
    return [*heading(c, data),
            f"parameters {gpt.n_params():,}",
            f"memory about {(4 * gpt.n_params() + kept) * size / 2**30:.2f} GiB (weights, gradients, moments "
            f"{4 * gpt.n_params() * size / 2**30:.2f})",
            f"FLOPs {gpt.flops_per_token() * tokens:.3g} a step, {gpt.flops_per_token() * tokens * c.steps:.3g} in all",
            f"time at most {seconds:.3g} s a step, {seconds * c.steps / 60:.3g} min in all ({tokens:,} tokens a step)"]


def _data(c: TrainConfig) -> Data:
    data = load(c.data)
    data.check(c.vocab_size, c.block_size)
    return data


def _config_toml(c: TrainConfig, data: Data, command: list[str]) -> dict[str, Any]:
    import tomllib
    precision = c.resolved_precision()
    return {
        "train": c.to_dict(),
        "precision": tomllib.loads(precision.to_toml()) | {"digest": precision.digest},
        "fix": str(as_fix(c.fix)),
        "data": {"name": data.name, "sha256": data.sha256, "tokens": data.kind, "train": len(data.train), "val": len(data.val)},
        "environment": environment() | {"device": device(c), "command": shlex.join(["cuflash", *command])},
    }


def environment() -> dict[str, Any]:
    """Versions and what else decides the bits of BLAS."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    return {"cuflash": __version__, "numerics_version": NUMERICS_VERSION, "git_commit": _git_commit(),
            "python": platform.python_version(), "numpy": np.__version__, "blas": f"{blas['name']} {blas['version']}",
            "machine": f"{platform.machine()} {_processor()}", "cores": _cores(),
            "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "default"}


def _environment_notes(stored: dict[str, Any]) -> list[str]:
    """A line for what differs from the run's first part and may change its bits."""
    now = environment()
    names = ("python", "numpy", "blas", "machine", "cores", "blas_threads")
    changed = [f"{n} {stored.get(n)} -> {now[n]}" for n in names if stored.get(n) != now[n]]
    return [f"resumed elsewhere, so bits may differ from an uninterrupted run: {', '.join(changed)}"] if changed else []


def _git_commit() -> str:
    here = pathlib.Path(__file__).resolve().parent
    try:
        found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def _processor() -> str:
    if sys.platform == "linux":
        for text in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu_present() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        import cupy
        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # noqa: BLE001 (no CuPy, no driver, no GPU: each its own exception)
        return False
