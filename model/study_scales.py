"""The settings at which the failure of arXiv 2510.04212 is studied: plain data, in the options of `cuflash train`."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.errors import unknown
from cuflash.model.config import FIELDS, TrainConfig, resolve
from cuflash.model.trials import typed
from cuflash.model.verdict import Criterion


@dataclass(frozen=True)
class Scale:
    """Options of every arm, and when a training of these has failed; the layer (from 0) where the failure is looked
    for; heads of it that keep O in full in the row of chosen heads, None: the half with the largest spectral norms of
    W_Q."""

    options: dict[str, Any]
    criterion: Criterion = Criterion()
    layer: int = 1
    heads: tuple[int, ...] | None = None


# A failure in minutes on one GPU. Text of a made-up language in which three words of ten repeat the one before. On an
# H200 the loss of precision bf16 rose from 1.2 at step 700 to 1.4 at step 1,500 for seed 1 (seed 2 ended at step 1,000,
# at 1.13); with attention in fp32 it rose for none of six seeds by step 1,000, and for seed 1 fell to 0.87 at step 2,500.
MINUTES = Scale({
    "model": "study", "data": "synthetic:words,size=33554432,repeat=30", "vocab_size": 256, "bias": False,
    "n_layer": 6, "n_head": 3, "n_embd": 384, "block_size": 512, "batch_size": 32,
    "steps": 2000, "lr": 5e-3, "schedule": "constant", "warmup_steps": 200, "lr_decay_steps": 0,
    "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "log_every": 10,
}, Criterion(margin=0.1, rows=10))

# The paper's setting (section 3.1, and its released code for what the text leaves open): GPT-2 124M without
# biases, 524,288 tokens a step, AdamW. Its Muon runs are beyond cuflash, and so are several GPUs: what four of
# them do at once are micro-batches here.
PAPER = Scale({
    "model": "gpt2", "data": "", "vocab_size": 50304, "bias": False,
    "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 32, "grad_accum": 16,
    "steps": 20000, "lr": 1e-3, "min_lr": 1e-5, "schedule": "cosine", "warmup_steps": 2000, "lr_decay_steps": 600000,
    "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "log_every": 20,
}, heads=(0, 6, 7, 8, 10, 11))

SCALES = {"minutes": MINUTES, "paper": PAPER}


def options_of(name: str, given: Mapping[str, Any], texts: Sequence[str] = ()) -> dict[str, Any]:
    """A scale's options with those that are given over them; `texts` are NAME=VALUE of any other option.

    Raises:
        ValueError: an unknown name, a value that is not valid, or data that a scale leaves to the user.
    """
    if name not in SCALES:
        raise unknown("--scale", name, SCALES)
    options = SCALES[name].options | dict(given)
    for text in texts:
        option, equals, value = text.partition("=")
        option = option.replace("-", "_")
        if not equals or option not in FIELDS:
            raise unknown("--option", option, FIELDS)
        options[option] = typed(option, value)
    if not options["data"]:
        raise ValueError(f"--scale {name} needs --data: GPT-2's tokens of a text, as nanoGPT's or llm.c's train.bin "
                         "of OpenWebText or FineWeb")
    if options["schedule"] == "cosine" and not options["lr_decay_steps"]:
        options["lr_decay_steps"] = options["steps"]
    if options.get("fork"):
        del options["model"]  # it is the forked run's; the shape must be the same
    resolve(options)
    return options


def cost(config: TrainConfig, ms: float, runs: int) -> list[str]:
    """What `runs` runs of this setting take: lines to print before they begin."""
    tokens = config.batch_size * config.grad_accum * config.block_size
    flops = config.gpt().flops_per_token() * tokens
    hours = ms * config.steps / 3.6e6
    return [f"{config.gpt().n_params():,} parameters; a run is {config.steps:,} steps of {tokens:,} tokens: "
            f"{tokens * config.steps:.3g} tokens, {flops * config.steps:.3g} FLOP",
            f"at {ms:,.0f} ms a step ({flops / ms / 1e9:,.0f} TFLOP/s) {hours:,.1f} h a run, {hours * runs:,.0f} h for "
            f"the {runs} runs that may be needed"]
