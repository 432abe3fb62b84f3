"""Fixes: rules for the row maximum, which change nothing in exact arithmetic (numerics.md section 9).

A fix sees a row's maximum r_m and its tie count, the number of visible entries within ε of it. Only
rows with more than one are offered to the rule, and never an infinite r_m.
"""
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from cuflash.errors import unknown
from cuflash.formats import format_named
from cuflash.plugins import blame, load_class, parse_parameters


class Fix:
    """Base of all fixes; a user's own subclasses it.

    `rule(r_m, ties)` gives the new maximum of tied rows (arrays of fp32, scaled units, any shape);
    `limited(r_m, ties)` tells, for statistics, where a cap cut the shift. `cuda_rule` and
    `cuda_limited` are the same as CUDA expressions over r_m (float), ties (int) and the
    parameters, with the operations spelled __fmul_rn and the like; without them the GPU refuses.

    Class attributes: `parameters` (name -> default), `epsilon` (ties are r_m − S ≤ ε),
    `rounded_threshold` (ties are S ≥ rnd(r_m − ε) instead), `running` (r_m and ties over all tiles
    so far, restarted when the maximum rises, instead of one tile's; needs ε = 0), `rounds_down` (the new
    maximum is rounded down to the format of attn.m, not below r_m, so that its rounding adds nothing to the
    shift).
    """

    name: ClassVar[str] = "off"
    parameters: ClassVar[dict[str, float]] = {}
    least: ClassVar[dict[str, float]] = {}  # the smallest value that a parameter may have
    epsilon: float = 0.0
    rounded_threshold: ClassVar[bool] = False
    running: ClassVar[bool] = False
    rounds_down: ClassVar[bool] = False
    cuda_rule: ClassVar[str | None] = "r_m"
    cuda_limited: ClassVar[str | None] = "false"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for python, cuda in (("rule", "cuda_rule"), ("limited", "cuda_limited")):
            if python in vars(cls) and cuda not in vars(cls):
                setattr(cls, cuda, None)  # an inherited one is another rule's

    def __init__(self, **parameters: float) -> None:
        for parameter in parameters:
            if parameter not in self.parameters:
                raise unknown(f"parameter of fix {self.name}", parameter, self.parameters or ["(it has none)"])
        self.values = self.parameters | parameters
        for name, value in self.values.items():
            if not isinstance(value, (int, float)):
                raise TypeError(f"fix {self.name}: {name} must be a number, not {value!r}")
            if not (math.isfinite(value) and value >= self.least.get(name, -math.inf)):
                bound = f", {self.least[name]:g} or more" if name in self.least else ""
                raise ValueError(f"fix {self.name}: {name} is {value:g}; valid: a finite number{bound}")
        self.epsilon = float(self.values.get("epsilon", self.epsilon))
        if self.running and self.epsilon:
            raise ValueError(f"fix {self.name} counts ties over all tiles, which needs epsilon = 0")

    def __getattr__(self, name: str) -> np.float32:
        if name != "values" and name in self.values:
            return np.float32(self.values[name])
        raise AttributeError(name)

    def __str__(self) -> str:
        given = ",".join(f"{k}={v:g}" for k, v in self.values.items())
        return self.name + (f":{given}" if given else "")

    def __repr__(self) -> str:
        return f"<cuflash.Fix {self}>"

    def for_formats(self, format: Callable[[str], str]) -> "Fix":
        """This fix where `format(site)` is the format of each site: default parameters may depend on it."""
        return self

    def new_maximum(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        """`rule` on a copy, so that one that works in place changes nothing else; r_m's dtype."""
        return np.asarray(self.rule(r_m.copy(), ties), r_m.dtype)

    def rule(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        return r_m

    def limited(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        return np.zeros(r_m.shape, bool)


class Qiu(Fix):
    """The paper's rule: β·r_m above zero, 0 below (arXiv 2510.04212, section 4)."""

    least = {"beta": 0, "epsilon": 0}
    cuda_rule = "r_m > 0.f ? __fmul_rn(beta, r_m) : r_m < 0.f ? 0.f : r_m"

    def rule(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        return np.where(r_m > 0, self.beta * r_m, np.where(r_m < 0, np.float32(0), r_m))


class QiuB7(Qiu):
    """arXiv v2: exact ties, β = 7."""

    name = "qiu-b7"
    parameters = {"beta": 7.0, "epsilon": 0.0}


class QiuB2(Qiu):
    """arXiv v4: β = 2 and a tolerance of 1e-3, tested as the released code tests it."""

    name = "qiu-b2"
    parameters = {"beta": 2.0, "epsilon": 1e-3}
    rounded_threshold = True


class Shift(Fix):
    """β·r_m above zero, γ·r_m below, and an offset: the variants of arXiv 2510.04212, appendix C.

    A tolerance ε beyond every S makes it unconditional: each row with two keys or more is shifted.
    """

    name = "shift"
    parameters = {"beta": 1.0, "gamma": 1.0, "offset": 0.0, "epsilon": 0.0}
    least = {"beta": 0, "epsilon": 0}
    cuda_rule = "__fadd_rn(r_m > 0.f ? __fmul_rn(beta, r_m) : __fmul_rn(gamma, r_m), offset)"

    def rule(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        return np.where(r_m > 0, self.beta * r_m, self.gamma * r_m) + self.offset


class Capped(Fix):
    """r_m + min(max((β−1)·r_m if r_m > 0 else |r_m|, 0.01), cap), over all tiles so far.

    The cap keeps exp of the shift a normal number of every format that it goes through, so no row is
    lost: 80, or less where a format has fewer than 8 bits of exponent. The sum is rounded down to the
    format of attn.m: to nearest, a cap of 80 would become 128 above 8,192 in bf16. The floor moves maxima
    near zero too, where the paper's rule moves nothing.
    """

    name = "capped"
    parameters = {"beta": 2.0, "cap": 80.0}
    least = {"beta": 1, "cap": 0}
    running = rounds_down = True
    cuda_rule = ("__fadd_rn(r_m, fminf(fmaxf(r_m > 0.f ? __fmul_rn(__fsub_rn(beta, 1.f), r_m) : -r_m, 0.01f), cap))")
    cuda_limited = "(r_m > 0.f ? __fmul_rn(__fsub_rn(beta, 1.f), r_m) : -r_m) > cap"

    def __init__(self, **parameters: float) -> None:
        super().__init__(**parameters)
        self._cap_given = "cap" in parameters

    def for_formats(self, format: Callable[[str], str]) -> "Fix":
        if self._cap_given:
            return self
        through = {format(f"attn.{s}") for s in ("p", "l_tile", "l_scaled", "l", "pv", "o_scaled", "o_acc")}
        emin = max(format_named(f).emin for f in through - {"fp64"} | {"fp32"})
        cap = min(self.values["cap"], math.floor(0.93 * math.log(2) * -emin))  # fp16: 9
        return self if cap == self.values["cap"] else type(self)(**(self.values | {"cap": cap}))

    def _wanted(self, r_m: np.ndarray) -> np.ndarray:
        return np.where(r_m > 0, (self.beta - np.float32(1)) * r_m, -r_m)

    def rule(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        return r_m + np.minimum(np.maximum(self._wanted(r_m), np.float32(0.01)), self.cap)

    def limited(self, r_m: np.ndarray, ties: np.ndarray) -> np.ndarray:
        return self._wanted(r_m) > self.cap


FIXES: dict[str, type[Fix]] = {f.name: f for f in (Fix, QiuB7, QiuB2, Shift, Capped)}
RECOMMENDED = "capped"  # what `on` means


def as_fix(fix: "Fix | type[Fix] | str") -> Fix:
    """A Fix from an object, a class, or a text: `on`, `capped:cap=60`, `my.py:MyFix:cap=80,beta=2`."""
    if isinstance(fix, Fix):
        return fix
    if isinstance(fix, type) and issubclass(fix, Fix):
        return fix()
    if not isinstance(fix, str):
        raise TypeError(f"fix must be a name or a cuflash.Fix, not {type(fix).__name__}")
    name, _, rest = fix.partition(":")
    if name.endswith(".py"):
        attribute, _, rest = rest.partition(":")
        found = load_class(name, attribute, Fix)
        if isinstance(found, Fix):
            if rest:
                raise ValueError(f"fix {fix!r}: {attribute} is an instance and takes no parameters; name its class")
            return found
    elif name in FIXES or name == "on":
        found = FIXES[RECOMMENDED if name == "on" else name]
    else:
        raise unknown("fix", name, ["on", *FIXES, "FILE.py:NAME"])
    made = found(**(parse_parameters(rest) if rest else {}))
    if name.endswith(".py"):
        if found.rule is Fix.rule:
            raise ValueError(f"fix {fix}: {found.__name__} has no rule(self, r_m, ties), so it would change nothing")
        _try_out(made, fix)
    return made


def _try_out(fix: Fix, given: str) -> None:
    """Runs a user's rule once, so that its mistakes are told before a tie brings them up."""
    r_m, ties = np.array([2.5, 0, -1.5], np.float32), np.array([2, 3, 2])
    with blame(given):
        new, limited = np.asarray(fix.rule(r_m, ties)), np.asarray(fix.limited(r_m, ties))
    for name, x, kind in (("rule", new, "f"), ("limited", limited, "b")):
        if x.shape != r_m.shape or x.dtype.kind != kind:
            raise ValueError(f"fix {given}: {name} gave {x.dtype} of shape {x.shape} for three rows; it must give "
                             f"{'floats' if kind == 'f' else 'booleans'} of r_m's shape")
