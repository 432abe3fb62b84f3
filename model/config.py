"""The options of a training run: presets, TOML, checks, and what follows from them."""
import dataclasses
import hashlib
import math
import pathlib
import tomllib
from dataclasses import dataclass
from typing import Any

from cuflash.dump import Selection
from cuflash.errors import unknown
from cuflash.fixes import as_fix
from cuflash.model import loss_scale
from cuflash.model.gpt import GPTConfig
from cuflash.precision import Precision, as_precision
from cuflash.site_table import SITES

SCHEDULES = ("cosine", "constant")
DEVICES = ("auto", "cpu", "gpu")
ALGORITHMS = ("flash", "plain")

# Shape of each preset and how it is trained; nano takes about a minute on two CPU cores.
PRESETS: dict[str, dict[str, Any]] = {
    "nano": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 8, "steps": 1600,
             "lr": 4e-3, "warmup_steps": 50, "weight_decay": 0.1, "beta2": 0.99, "schedule": "cosine"},
    "mini": {"n_layer": 6, "n_head": 6, "n_embd": 192, "block_size": 256, "batch_size": 16, "steps": 2000,
             "lr": 2e-3, "warmup_steps": 100, "weight_decay": 0.1, "beta2": 0.99, "schedule": "cosine"},
    # The scale at which low-precision training was seen to fail in minutes on one GPU.
    "study": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 32, "steps": 10000,
              "lr": 5e-3, "warmup_steps": 200, "weight_decay": 0.0, "schedule": "constant"},
    # arXiv 2510.04212's setting but for its batch, which is 32 × 15 there over several GPUs.
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50257,
             "bias": True, "batch_size": 32, "steps": 600000, "lr": 6e-4, "warmup_steps": 2000,
             "weight_decay": 0.1, "schedule": "cosine"},
}
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "qk_norm")
# What --resume may change: nothing that training itself sees.
RESUMABLE = frozenset({"steps", "eval_every", "checkpoint_every", "keep", "log_every", "spectral_every", "watch",
                       "dump_every", "dump_sites"})


@dataclass(frozen=True)
class TrainConfig:
    """Everything resolved. Names are those of the command line's options; None in none of them."""

    data: str
    model: str
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool
    qk_norm: bool
    batch_size: int
    grad_accum: int
    steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    lr_decay_steps: int
    schedule: str
    weight_decay: float
    beta1: float
    beta2: float
    grad_clip: float
    seed: int
    data_seed: int
    precision: str
    round: tuple[str, ...]
    set: tuple[str, ...]
    fix: str
    algorithm: str
    loss_scale: str
    device: str
    init: str
    fork: str
    eval_every: int
    checkpoint_every: int
    keep: int
    log_every: int
    spectral_every: int
    watch: str
    dump_every: int
    dump_sites: str

    def __post_init__(self) -> None:
        self.gpt()
        for name, valid in (("schedule", SCHEDULES), ("device", DEVICES), ("algorithm", ALGORITHMS)):
            if getattr(self, name) not in valid:
                raise unknown(f"--{name}", getattr(self, name), valid)
        for name in ("batch_size", "grad_accum", "steps", "log_every"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "lr_decay_steps", "eval_every", "checkpoint_every", "keep", "spectral_every",
                     "dump_every"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("lr", "min_lr", "weight_decay", "grad_clip"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a finite number, 0 or more")
        for name in ("beta1", "beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("seed", "data_seed"):
            self._check(name, 0 <= getattr(self, name) < 1 << 64, "0 to 2**64 − 1")
        if self.init and self.fork:
            raise ValueError(f"--init {self.init} and --fork {self.fork}: a run begins from one of them")
        loss_scale.fixed(self.loss_scale)
        self.resolved_fix()
        precision = self.resolved_precision()
        for sites in filter(None, (self.watch, self.dump_sites)):
            Selection(sites).check(precision)

    def _check(self, name: str, good: bool, valid: str) -> None:
        if not good:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; valid: {valid}")

    def gpt(self) -> GPTConfig:
        return GPTConfig(*(getattr(self, name) for name in MODEL_KEYS))

    def resolved_precision(self) -> Precision:
        """--precision with --algorithm, --set and then --round applied."""
        precision = as_precision(self.precision)
        if self.algorithm != precision.algorithm:
            precision = precision.replace(algorithm=self.algorithm)
        return precision.set(*self.set).round(*self.round)

    def resolved_fix(self) -> str:
        """`on` by its own name, parameters spelled out; a user's FILE.py:NAME as it was given."""
        fix = as_fix(self.fix)
        return self.fix if ".py:" in self.fix else str(fix)

    def user_files(self) -> dict[str, str]:
        """Path -> SHA-256 of the files whose fix or rounding mode is used."""
        p = self.resolved_precision()
        modes = {r.mode for r in p.sites} | {o.rounding.mode for o in p.overrides}
        texts = [self.resolved_fix(), *modes]
        files = sorted({text[:text.index(".py:") + 3] for text in texts if ".py:" in text})
        return {file: hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() for file in files}

    def lr_at(self, step: int) -> float:
        """Of step 1, 2, …: linear warm-up, then constant, or a cosine to min_lr at lr_decay_steps."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        if step >= self.lr_decay_steps:
            return self.min_lr
        share = (step - self.warmup_steps) / (self.lr_decay_steps - self.warmup_steps)
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (self.lr - self.min_lr)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def changed(self, other: "TrainConfig") -> list[str]:
        """Options that differ from those of another run and that a resume must keep."""
        return [name for name, value in self.to_dict().items()
                if name not in RESUMABLE and getattr(other, name) != value]


FIELDS = {f.name: f.type for f in dataclasses.fields(TrainConfig)}


def resolve(given: dict[str, Any]) -> TrainConfig:
    """Options that were given, over the model's preset, over the defaults."""
    options: dict[str, Any] = {
        "data": "pydoc", "model": "nano", "vocab_size": 256, "bias": False, "qk_norm": False, "grad_accum": 1,
        "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "seed": 1, "data_seed": 1, "precision": "bf16-fa2",
        "round": (), "set": (), "fix": "off", "device": "auto", "init": "", "fork": "",
        "eval_every": 0, "checkpoint_every": 0, "keep": 3, "log_every": 20,
        "watch": "", "dump_every": 0, "dump_sites": "attn",
    }
    for name in given:
        if name not in FIELDS:
            raise unknown("option", name, FIELDS)
    options |= _preset(given.get("model", "nano"))
    options |= {name: _typed(name, value) for name, value in given.items()}
    options.setdefault("lr_decay_steps", options["steps"])
    options.setdefault("min_lr", options["lr"] / 10)
    options.setdefault("spectral_every", options["log_every"])
    precision = as_precision(options["precision"])
    options.setdefault("algorithm", precision.algorithm)
    fp16 = any(r.format == "fp16" for name, r in precision.table().items() if SITES[name].direction != "fwd")
    options.setdefault("loss_scale", loss_scale.DYNAMIC if fp16 else "1")
    return TrainConfig(**options)


def _preset(model: str) -> dict[str, Any]:
    """A preset's options, or nano's under those of a TOML file (which may name another `preset`)."""
    if model in PRESETS:
        return PRESETS[model]
    if not str(model).endswith(".toml"):
        raise unknown("--model", model, [*PRESETS, "FILE.toml"])
    options = read_toml("--model", model)
    base = options.pop("preset", "nano")
    if base not in PRESETS:
        raise unknown(f"preset in {model}", base, PRESETS)
    for name in options:
        if name not in MODEL_KEYS:
            raise unknown(f"key in {model}", name, ["preset", *MODEL_KEYS])
    return PRESETS[base] | {name: _typed(name, value) for name, value in options.items()}


def read_toml(option: str, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ValueError(f"{option} {path}: no such file") from e
    except OSError as e:
        raise ValueError(f"{option} {path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{option} {path}: not valid TOML: {e}") from e


def from_toml(option: str, path: str) -> dict[str, Any]:
    """Options of a file's top level, or of its [train] table, as a run's config.toml has it."""
    options = read_toml(option, path)
    options = options.get("train", options)
    for name in options:
        if name not in FIELDS:
            raise unknown(f"option in {path}", name, FIELDS)
    return options


def _typed(name: str, value: Any) -> Any:
    """Values of a TOML file have TOML's types: a whole number passes for a float, a list for a tuple."""
    kind = FIELDS[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[str, ...]:
        if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
            return tuple(value)
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"option {name} must be {getattr(kind, '__name__', kind)}, got {value!r}")
