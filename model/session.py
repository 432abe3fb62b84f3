"""A run from its options to its sampled text: what `cuflash train` does between arguments and printing."""
import dataclasses
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from cuflash import NUMERICS_VERSION, __version__, kernels
from cuflash.model import blas, checkpoint, fork, weights
from cuflash.model.config import TrainConfig, from_toml, resolve
from cuflash.model.data import Data, load
from cuflash.model.gpu import refusal, use_gpu
from cuflash.model.memory import in_bytes, keep_freed
from cuflash.model.run import CONFIG, Run, next_free, of_users_files
from cuflash.model.sample import decode, encode, generate, printable
from cuflash.model.train import NonFinite, Trainer, header, train

__all__ = ["NonFinite", "Session", "dry_run", "options", "resume", "start"]

SAMPLE_TOKENS = 400
AFFORDABLE = 10**12  # FLOPs of a step of a dry run on a CPU: some ten seconds
PROMPT = "The "


def options(config: str | None, given: dict[str, Any]) -> TrainConfig:
    """Flags over --config over a forked run's over the model's preset over the defaults; ValueError for any that
    is not valid."""
    if config:
        file = from_toml("--config", config)
        try:
            return options(None, file | given)
        except (ValueError, OSError) as e:
            options(None, given)  # the flags' own mistakes speak of flags
            raise ValueError(f"--config {config}: {e}") from e
    if given.get("fork"):
        given = fork.options(given)
    c = resolve(given)
    use_gpu(c)
    return c


class Session:
    """A locked run folder and its trainer; a context manager that lets go of the lock.

    Raises:
        ValueError: the folder is in use, or its last checkpoint is damaged or of another run.
    """

    def __init__(
        self,
        folder: Run,
        config: TrainConfig,
        data: Data,
        *,
        state: checkpoint.State | None = None,
        resumed: bool = False,
        notes: list[str] | None = None,
    ) -> None:
        self.folder, self.config, self.data, self.resumed, self._notes = (
            folder,
            config,
            data,
            resumed,
            notes or [],
        )
        self._lock = folder.lock()
        try:
            self.trainer = Trainer(config, data, state or self._state())
            if state is not None:  # so that a resume needs nothing else
                checkpoint.save(folder.checkpoint_path(state.step), state, header(config, data))
        except BaseException:
            self._lock.release()
            raise

    def _state(self) -> checkpoint.State | None:
        """Of the last checkpoint, which must be of this run's options."""
        found = self.folder.checkpoints() if self.resumed else []
        if not found:
            return None
        state, theirs = checkpoint.load(found[-1][1])
        mine = header(self.config, self.data)
        for field in dataclasses.fields(theirs):
            stored, wanted = getattr(theirs, field.name), getattr(mine, field.name)
            if stored != wanted:
                raise ValueError(
                    f"--resume: {found[-1][1]} is of another run: its {field.name} is {stored}, that of "
                    f"{self.folder.path / CONFIG} is {wanted}"
                )
        return state

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def train(
        self, say: Callable[[str], None], advance: Callable[[int], object] | None, stop: Callable[[], bool]
    ) -> None:
        """Prints what is resolved, trains, samples unless stopped."""
        for text in [*heading(self.config, self.data), *self._notes]:
            say(text)
        if self.resumed:
            say(f"resumed at step {self.trainer.state.step} of {self.config.steps}")
        train(self.trainer, self.folder, say, resumed=self.resumed, progress=advance, stop=stop)
        if not stop():
            say("")
            say(self.sample())

    def sample(self) -> str:
        kind, model = self.data.kind, self.trainer.model
        prompt = encode(PROMPT if kind == "bytes" else "", kind, self.config.vocab_size)
        tokens = prompt + list(generate(model, prompt, SAMPLE_TOKENS, seed=self.config.seed))
        return printable(decode(tokens, kind))

    def closing(self, stopped: bool) -> str:
        path = self.folder.path
        if stopped:
            return f"stopped at step {self.trainer.state.step}; cuflash train --resume --out {path} continues"
        loss, entropy = self.folder.metrics[-1]["val_loss"], self.data.unigram_entropy()
        return (
            f"\nvalidation loss {loss:.4f} nats a token; unigram entropy of the text {entropy:.4f}\n"
            f"run in {path}: config.toml, metrics.csv, checkpoints; more text: cuflash sample {path}"
        )


def start(out: str | None, config: TrainConfig, command: list[str]) -> Session:
    """A new run in `out`, by default in runs/ under the first free name.

    Its first checkpoint is what it forks or is initialised from.
    """
    _prepare(config)
    data = _data(config)
    state, notes = _first(config, data)
    fix = config.resolved_fix().rpartition("/")[2].partition(":")[0]
    stem = f"{pathlib.Path(config.model).stem}-{config.resolved_precision().name}-{fix}"
    folder = Run.create(out or next_free(pathlib.Path("runs"), stem), _config_toml(config, data, command))
    for file in config.user_files():
        (folder.path / "plugins").mkdir(exist_ok=True)
        shutil.copy(file, folder.path / "plugins")
    return Session(folder, config, data, state=state, notes=notes)


def _first(config: TrainConfig, data: Data) -> tuple[checkpoint.State | None, list[str]]:
    """What a run that is forked or initialised begins with, and lines that say so; None for any other."""
    if config.fork:
        return fork.state(config, data)
    if config.init:
        params, notes = weights.initial(config.init, config.gpt())
        return checkpoint.State.new(params, config.resolved_precision()), notes
    return None, []


def resume(out: str | None, given: dict[str, Any], config_file: str | None) -> Session:
    """The run in `out` from its last checkpoint (from its beginning, where it has none); flags may change
    nothing that training sees."""
    if out is None:
        raise ValueError("--resume: say which run with --out DIR")
    if config_file:
        raise ValueError(
            f"--config {config_file}: --resume takes the options from the run's own {CONFIG}; drop --config"
        )
    if not os.path.isdir(out):
        raise ValueError(f"--resume --out {out}: no such folder")
    folder = Run(out)
    stored = folder.config
    with of_users_files(out, folder.path):
        config, wanted = resolve(stored["train"]), resolve(stored["train"] | given)
    if changed := wanted.changed(config):
        listed = ", ".join(
            f"--{n.replace('_', '-')} {getattr(config, n)!r} -> {getattr(wanted, n)!r}" for n in changed
        )
        raise ValueError(f"--resume continues the same training; changed: {listed}")
    if stored["environment"]["numerics_version"] != NUMERICS_VERSION:
        raise ValueError(
            f"--resume: the run is of numerics version {stored['environment']['numerics_version']}, this is "
            f"{NUMERICS_VERSION}; its bits cannot be continued"
        )
    if stored["user_files"] != config.user_files():
        raise ValueError(
            f"--resume: the user's files have changed since (SHA-256): {stored['user_files']} -> "
            f"{config.user_files()}"
        )
    found = folder.checkpoints()
    if found and found[-1][0] >= wanted.steps:
        raise ValueError(f"--resume: the run has its {found[-1][0]} steps already; a larger --steps goes on")
    _prepare(wanted)
    data = _data(config)
    state, notes = (None, []) if found else _first(wanted, data)
    return Session(folder, wanted, data, state=state, resumed=True,
                   notes=notes + _environment_notes(stored["environment"]))


def heading(c: TrainConfig, data: Data) -> list[str]:
    """Line 1: precision, fix, accumulator, device. Then model and data."""
    precision = c.resolved_precision()
    auto = precision.accumulator == "auto"
    accumulator = "fp64" if precision.is_fp64 else "library (auto)" if auto else precision.accumulator
    if auto and use_gpu(c):
        accumulator = "the GPU's tensor core in attention, cuBLAS elsewhere (auto)"
    gpt = c.gpt()
    lines = [
        f"precision {precision.describe()} | fix {c.resolved_fix()} | accumulator {accumulator} | "
        f"device {device(c)}",
        f"model {c.model}: {gpt.n_params():,} parameters, {c.n_layer} layers, {c.n_head} heads, "
        f"width {c.n_embd}, context {c.block_size} | batch {c.batch_size}"
        + (f" × {c.grad_accum}" if c.grad_accum > 1 else ""),
        f"data {data.name}: {len(data.train):,} tokens, {len(data.val):,} for validation, SHA-256 "
        f"{data.sha256[:12]} | unigram entropy {data.unigram_entropy():.4f} nats",
    ]
    return lines


def device(c: TrainConfig) -> str:
    if use_gpu(c):
        return f"gpu, {kernels.device_name()}"
    return f"cpu, {_cores()} cores" + (
        f" (auto: {refusal(c)})" if c.device == "auto" and _gpu_present() else ""
    )


def dry_run(c: TrainConfig) -> list[str]:
    """What a run would take: time and memory by steps of one and of some samples, measured and carried on."""
    _prepare(c)
    data = _data(c)
    gpt, samples = c.gpt(), c.batch_size * c.grad_accum
    flops = gpt.flops_per_token() * c.block_size
    some = 2 if use_gpu(c) else max(2, min(AFFORDABLE // flops, c.batch_size))
    (one_peak, one_seconds), (peak, seconds) = (_measured(c, data, count) for count in (1, some))
    memory = peak + (c.batch_size - some) * (peak - one_peak) / (some - 1)
    # Noise may hide what one more sample takes; it is half of a sample's share at least.
    each = max((seconds - one_seconds) / (some - 1), seconds / some / 2)
    step_seconds = c.grad_accum * (seconds + (c.batch_size - some) * each)
    kept = 4 * gpt.n_params() * (8 if c.resolved_precision().is_fp64 else 4)
    return [
        *heading(c, data),
        f"parameters {gpt.n_params():,}",
        f"memory about {in_bytes(memory)}, of it weights, gradients and moments {in_bytes(kept)}",
        f"FLOPs {flops * samples:.3g} a step of {samples * c.block_size:,} tokens, "
        f"{flops * samples * c.steps:.3g} in all",
        f"time about {_seconds(step_seconds)} a step, {_seconds(step_seconds * c.steps)} in all",
    ]


def _measured(c: TrainConfig, data: Data, samples: int) -> tuple[int, float]:
    """Bytes that a step of so many samples needs at once, on the machine that it runs on, and its seconds."""
    trainer = Trainer(dataclasses.replace(c, batch_size=samples, grad_accum=1), data)
    begun = time.perf_counter()
    peak = _peak(trainer)
    seconds = time.perf_counter() - begun
    if trainer.gpu or seconds < 1:  # a longer one is hardly slowed down by what measures memory
        begun = time.perf_counter()
        trainer.settled(trainer.step())
        seconds = time.perf_counter() - begun
    return peak, seconds


def _seconds(s: float) -> str:
    units = {"days": 86400, "h": 3600, "min": 60, "s": 1}
    unit = next((u for u, size in units.items() if s >= 2 * size), "ms")
    n = s / units.get(unit, 1e-3)
    return f"{n:.0f} {unit}" if n >= 99.5 else f"{n:.2g} {unit}"


def _peak(trainer: Trainer) -> int:
    """Bytes that a step needs at once, on the machine that it runs on; weights and moments are among them."""
    if trainer.gpu:
        pool = kernels.import_cupy().get_default_memory_pool()
        trainer.settled(trainer.step())
        pool.free_all_blocks()  # what compiling and the first calls left
        trainer.settled(trainer.step())
        return pool.total_bytes()
    tracemalloc.start()
    trainer.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    state = trainer.state
    return peak + sum(x.nbytes for part in (state.params, state.m, state.v) for x in part.values())


def _prepare(c: TrainConfig) -> None:
    """Sets up the process for steps on a CPU."""
    if not use_gpu(c):
        keep_freed()
    blas.one_thread_if_small(c.n_embd)


def _data(c: TrainConfig) -> Data:
    data = load(c.data)
    data.check(c.vocab_size, c.block_size)
    return data


def _config_toml(c: TrainConfig, data: Data, command: list[str]) -> dict[str, Any]:
    precision = c.resolved_precision()
    return {
        "train": c.to_dict(),
        "precision": tomllib.loads(precision.to_toml()) | {"digest": precision.digest},
        "fix": c.resolved_fix(),
        "user_files": c.user_files(),
        "data": {
            "name": data.name,
            "sha256": data.sha256,
            "tokens": data.kind,
            "train": len(data.train),
            "val": len(data.val),
        },
        "environment": environment() | {"device": device(c), "command": shlex.join(["cuflash", *command])},
    }


def environment() -> dict[str, Any]:
    """Versions and what else decides the bits of BLAS."""
    build = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    return {
        "cuflash": __version__,
        "numerics_version": NUMERICS_VERSION,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{build['name']} {build['version']}",
        "machine": f"{platform.machine()} {_processor()}",
        "cores": _cores(),
        "blas_threads": blas.threads(),
    }


def _environment_notes(stored: dict[str, Any]) -> list[str]:
    """A line for what differs from the run's first part and may change its bits."""
    now = environment()
    names = ("python", "numpy", "blas", "machine", "cores", "blas_threads")
    changed = [f"{n} {stored.get(n)} -> {now[n]}" for n in names if stored.get(n) != now[n]]
    return (
        [f"resumed elsewhere, so bits may differ from an uninterrupted run: {', '.join(changed)}"]
        if changed
        else []
    )


def _git_commit() -> str:
    """Of the clone that this file is tracked in; of an installed copy, of the clone of its version that is the
    current folder, or the version alone."""
    here = pathlib.Path(__file__).resolve()

    def git(folder: pathlib.Path, *arguments: str) -> str | None:
        try:
            found = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    if git(here.parent, "ls-files", "--error-unmatch", here.name):
        clone: pathlib.Path | None = here.parent
    else:
        top = git(pathlib.Path.cwd(), "rev-parse", "--show-toplevel")
        clone = pathlib.Path(top) if top and _is_clone(pathlib.Path(top)) else None
    return clone and git(clone, "rev-parse", "HEAD") or f"none: cuflash {__version__} as installed"


def _is_clone(folder: pathlib.Path) -> bool:
    """Whether a folder holds the sources of this version of cuflash."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return False
    return (project.get("name"), project.get("version")) == ("cuflash", __version__)


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
