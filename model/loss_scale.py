"""Loss scaling (Micikevicius et al. 2018, section 3.2): fp16 gradients kept above its smallest number.

The gradient of the logits is multiplied by a power of two and the optimizer's gradients are divided by it, so
that nothing changes but what overflows or underflows on the way.
"""
import math
from dataclasses import dataclass

DYNAMIC = "dynamic"
FIRST = 2.0**16
GROWS_AFTER = 2000  # steps without an overflow, as torch's GradScaler


def fixed(text: str) -> float | None:
    """The scale that `--loss-scale` gives; None for a dynamic one.

    Raises:
        ValueError: neither `dynamic` nor a power of two from 1 to 2**31.
    """
    if text == DYNAMIC:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (1 <= value <= 2.0**31 and math.frexp(value)[0] == 0.5):
        raise ValueError(f"--loss-scale is {text!r}; valid: {DYNAMIC}, or a power of two from 1 to 2**31")
    return value


@dataclass
class LossScale:
    """A dynamic scale as it is now: halved by an overflow, doubled after GROWS_AFTER steps without one.

    `since` counts those steps; `skipped` the steps that an overflow has kept from the optimizer.
    """

    value: float = FIRST
    since: int = 0
    skipped: int = 0

    def grown(self) -> None:
        """After a step whose gradients are finite."""
        self.since += 1
        if self.since == GROWS_AFTER:
            self.value, self.since = self.value * 2, 0

    def halved(self) -> bool:
        """After an overflow; False where the scale is 1 already, so not what made it."""
        if self.value <= 1:
            return False
        self.value, self.since, self.skipped = self.value / 2, 0, self.skipped + 1
        return True
