"""A study small enough for tests: seconds for all of its runs, and a precision that overflows after a few steps."""
import functools

from cuflash.model.trials import Study
from cuflash.model.verdict import Criterion

TINY = {
    "data": "synthetic:words,seed=1,size=20000", "vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 16,
    "block_size": 16, "batch_size": 2, "steps": 24, "lr": 2e-3, "warmup_steps": 2, "schedule": "constant",
    "lr_decay_steps": 0, "log_every": 2, "device": "cpu",
}
HOT = {"lr": 1.0, "grad_clip": 0.0}  # the loss rises from the first steps on
FLAGS = [
    "--data", TINY["data"], "--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-size",
    "2", "--steps", "24", "--lr", "2e-3", "--warmup-steps", "2", "--option", "log_every=2", "--device", "cpu",
    "--jobs", "0"
]
CRITERION = Criterion(margin=0.5, rows=2)


def overflowing(folder):
    """A precision whose Ō is not finite from 4 on: trainings end with NaN soon, and with fp32 attention they do not."""
    path = folder / "low.toml"
    path.write_text('base = "bf16"\n[sites]\n"attn.o_acc" = "e2m4"\n')
    return str(path)


class Quiet:
    """A Board that keeps its lines."""

    terminal, interval = False, 0.05

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def live(self, lines):
        pass

    def close(self):
        pass


study = functools.partial(Study, seeds=range(1, 6), criterion=CRITERION, jobs=0)
