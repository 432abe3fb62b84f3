"""The vectorised reference against plain loops, bit for bit, on cases drawn at random.

Every run draws other cases. A failure prints its seed; `draw(np.random.default_rng(seed))` is the case.
"""
from typing import NamedTuple

import numpy as np
import pytest

from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.site_table import SITES
from tests.slow_attention import differing

F = np.float32
NAMES = ("fp32", "bf16", "bf16-fa2", "fp16-fa2", "all-fp8_e5m2", "all-fp8_e4m3", "all-e2m1", "all-e8m1", "all-e3m7")
FORMATS = ("bf16", "fp16", "e5m4", "e3m2", "fp8_e4m3", "tf32", "e8m20", "fp32")
MODES = ("rne", "rz", "rna", "rd", "ru", "sr", "sr")
FIXES = ("off", "capped", "capped", "capped:beta=3,cap=5", "qiu-b7", "qiu-b2", "qiu-b2:epsilon=0.1",
         "qiu-b7:epsilon=0.2", "qiu-b7:beta=1")
KINDS = ("normal", "ties", "ties", "flat", "zeros", "tiny", "huge", "negative", "nan", "infinite")


class Case(NamedTuple):
    """Inputs q, k, v, dO and the options of attention."""

    inputs: list[np.ndarray]
    precision: Precision
    options: dict

    def __str__(self):
        q, k = self.inputs[:2]
        return f"q {q.shape}, k {k.shape}, {self.precision.describe()}, {self.options}"


def draw(rng):
    return Case(draw_inputs(rng), p := draw_precision(rng), draw_options(rng, p))


def _chooser(rng):
    return lambda *choices: choices[rng.integers(len(choices))]


def draw_precision(rng):
    """A canonical precision with other switches, tiles and roundings."""
    one = _chooser(rng)
    p = Precision.named(one(*NAMES))
    switches = {"accumulator": one(*["sequential"] * 9, "hopper"), "exp": one("defined", "defined", "mufu"),
                "p_bwd_from": one("lse", "m_l"), "delta_from": one("o", "o_unrounded", "o_fp32", "p_dp"),
                "algorithm": one("flash", "flash", "flash", "plain"), "order": one(p.order, p.order, "eager", "fa2"),
                "tile": [(one(16, 32, 48, None), one(16, 32, 48, None)) for _ in range(3)]}
    if switches["algorithm"] == "flash":
        switches["l_from"] = one("unrounded", "rounded")
    p = p.replace(**switches)
    roundings = [f"attn={one(*FORMATS)}:{one(*MODES)}"] if rng.random() < 0.25 else []
    for _ in range(rng.integers(0, 7)):
        site = one(*(s for s in SITES if s.startswith("attn.") and s not in p.merged))
        direction = SITES[site].direction
        directions = ("fwd/", "bwd/") if direction == "both" else (f"{direction}/",)
        scope = one("", "", *directions) + one("", "L3/", "L2/") + one("", "", "H0/", "H1-2/")
        roundings.append(f"{scope}{site}={one(*FORMATS)}:{one(*MODES)}")
    return p.round(*roundings)


def draw_inputs(rng):
    one = _chooser(rng)
    tq, tk, d = int(rng.integers(1, 36)), int(rng.integers(0, 44)), one(1, 2, 3, 5, one(8, 17, 65, 70, 130))
    batch, kv_heads, group = one(1, 1, 1, 2), one(1, 1, 2), one(1, 1, 2, 3)
    if d > 8 or batch * kv_heads * group > 2:
        tq, tk = min(tq, 19), min(tk, 20)
    if d > 17:
        tq, tk, batch, kv_heads = min(tq, 9), min(tk, 11), 1, 1
    q, do = (rng.standard_normal((batch, kv_heads * group, tq, d)).astype(F) * 2 for _ in range(2))
    k, v = (rng.standard_normal((batch, kv_heads, tk, d)).astype(F) for _ in range(2))
    kind = one(*KINDS) if tk else "normal"
    row, key = rng.integers(tq), rng.integers(max(tk, 1))
    if kind != "normal":
        k[:, :, rng.integers(0, tk, tk // 2 + 1)] = k[:, :, :1]
    match kind:
        case "flat":
            q[...] = 0
        case "zeros":
            q[...] = np.where(rng.random(q.shape) < 0.5, F(-0.0), F(0))
        case "tiny":
            q, v = q * F(0.02), v * F(0.02)
        case "huge":
            q, k = q * 30, k * 20
        case "negative":
            q, k = np.abs(q) * 3, -np.abs(k)
        case "nan":
            one(q[0, 0, row], k[0, 0, key], v[0, 0, key], do[0, 0, row])[0] = np.nan
        case "infinite":
            x = one(k[0, 0, key], v[0, 0, key], do[0, 0, row])
            x[...] = 0
            x[0] = one(np.inf, -np.inf)
    return [q, k, v, do]


def draw_options(rng, p):
    one = _chooser(rng)
    scales = (None, None, 0.3, 0.71, 1.7, 3.0, 1e-3, *([-0.6] if p.order == "eager" else []))
    key = Key(int(rng.integers(2**63)), step=int(rng.integers(9)), layer=one(0, 2, 3), sample=one(0, 7))
    return {"causal": one(True, False), "scale": one(*scales), "fix": one(*FIXES), "key": key}


@pytest.mark.parametrize("_", range(100))
def test_reference_equals_plain_loops(_):
    seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    case = draw(np.random.default_rng(seed))
    print(f"seed {seed}: {case}")
    assert differing(*case.inputs, case.precision, **case.options) == []
