"""A run that continues another one's checkpoint, under another precision for example."""
from typing import Any

from cuflash.model import checkpoint
from cuflash.model.config import MODEL_KEYS, TrainConfig, resolve
from cuflash.model.data import Data
from cuflash.model.loss_scale import LossScale
from cuflash.model.run import Run, checkpoint_of, of_users_files

# What --precision sets anew.
_OF_PRECISION = ("round", "set", "algorithm", "loss_scale")


def options(given: dict[str, Any]) -> dict[str, Any]:
    """The forked run's options with those that are given over them.

    Raises:
        ValueError: `fork` is no checkpoint of a run, or the model would be another one.
    """
    source = given["fork"]
    theirs = _config(source).to_dict()
    for name in ("model", *MODEL_KEYS):
        if given.get(name, theirs[name]) != theirs[name]:
            raise ValueError(f"--fork {source} continues the same model; changed: --{name.replace('_', '-')} "
                             f"{theirs[name]!r} -> {given[name]!r}")
    if "precision" in given:
        theirs = {name: value for name, value in theirs.items() if name not in _OF_PRECISION}
    return theirs | {"init": ""} | given


def state(config: TrainConfig, data: Data) -> tuple[checkpoint.State, list[str]]:
    """Weights, moments and step to go on with, and a line that says from where.

    Raises:
        ValueError: the checkpoint is damaged, of a later step than the last, or its data have changed.
    """
    path, theirs = checkpoint_of(config.fork, "--fork"), _config(config.fork)
    found, header = checkpoint.load(path)
    if found.step >= config.steps:
        raise ValueError(f"--fork {config.fork}: is of step {found.step}; --steps {config.steps} leaves nothing to do: "
                         "give a larger --steps")
    if config.data == theirs.data and header.data != data.sha256:
        raise ValueError(f"--fork {config.fork}: --data {config.data} has changed since (SHA-256 {header.data[:12]} -> "
                         f"{data.sha256[:12]}), so batches would not be the same")
    if config.loss_scale != theirs.loss_scale:
        found.scale = LossScale(skipped=found.scale.skipped)
    note = f"from step {found.step} of {path.parent.parent}, precision {theirs.resolved_precision().name}"
    return found.cast(config.resolved_precision()), [note]


def _config(source: str) -> TrainConfig:
    run = Run(checkpoint_of(source, "--fork").parent.parent)
    with of_users_files(source, run.path):
        return resolve(run.config["train"])
