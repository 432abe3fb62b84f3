"""A precision as constants of a kernel: the text of "precision.cuh", which cuda/sites.cuh includes.

One line a site, then products, switches, numeric tiles, and the fix, so that what is off costs nothing.
"""
import functools
from collections.abc import Iterator

import numpy as np

from cuflash.accumulators import common_format
from cuflash.fixes import Fix
from cuflash.formats import MODES, format_named
from cuflash.precision import Precision, Rounding
from cuflash.site_table import SITE_ID, SITES

# Operands of each product, by site.
PRODUCTS = {
    "fwd": {"s": ("attn.q", "attn.k"), "pv": ("attn.p", "attn.v")},
    "bwd": {"s": ("attn.q", "attn.k"), "dp": ("attn.do", "attn.v"), "dv": ("attn.p_bwd", "attn.do"),
            "dk": ("attn.ds", "attn.q"), "dq": ("attn.ds", "attn.k")},
}

# Bytes of shared memory that a block may ask for, by compute capability (CUDA programming guide).
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10,
                 103: 227 << 10, 120: 99 << 10, 121: 99 << 10}

# Compiles taps in (cuda/taps.cuh): how many sites there are.
TAPPED: dict[str, object] = {"TAPS": len(SITES)}


def product_operand(table: dict[str, Rounding], sites: tuple[str, str], accumulator: str) -> str | None:
    """The format in which a tensor core takes a product's operands; None: `sequential`."""
    if accumulator == "sequential":
        return None
    common = common_format(*(table[site].format for site in sites))
    return common and common.name


def device_accumulator(precision: Precision, capability: int) -> str:
    """The accumulator of attention on a device (90 for compute capability 9.0): its own tensor core under `auto`.

    Raises:
        ValueError: the device does not have it.
    """
    if precision.is_fp64:
        raise ValueError("precision fp64 runs on NumPy arrays only: cast with .astype('float32') for the GPU")
    core = {8: "ampere", 9: "hopper"}.get(capability // 10)
    wanted = precision.accumulator
    if wanted in ("library", "exact") or precision.exp == "library":
        what = f"accumulator={wanted}" if wanted in ("library", "exact") else "exp=library"
        raise ValueError(f"{what} is not defined to the bit, so the kernels do not have it: use accumulator=auto or "
                         "sequential and exp=defined or mufu, or NumPy arrays")
    if wanted == "auto":
        return core or "sequential"
    # sm_100 and sm_120 are said to sum as hopper does; asked for by name, they are taken at that word.
    if wanted not in ("sequential", core) and not (wanted == "hopper" and capability >= 100):
        raise ValueError(f"accumulator={wanted} is not what this device has (compute capability {capability / 10}): "
                         f"use auto, sequential{f' or {core}' if core else ''}, or the CPU reference by NumPy arrays")
    return wanted


def precision_header(precision: Precision, head_dim: int, direction: str, accumulator: str, fix: Fix,
                     layer: int = 0, head: int = 0) -> str:
    """The text of precision.cuh.

    Args:
        precision: what the kernel computes.
        head_dim: decides the default tiles.
        direction: `fwd` or `bwd`.
        accumulator: `sequential`, or the device's tensor core (`hopper`, `ampere`).
        fix: rule for the row maximum; backward has none, whatever is given.
        layer, head: where in the network, for scoped roundings.

    Raises:
        ValueError: a mode or fix of the user has no CUDA expression.
    """
    table = precision.sites_for(direction, layer, "", head)
    lines = ["#pragma once", *_modes(table)]
    lines += [_site(name, rounding) for name, rounding in table.items() if name.startswith("attn.")]
    for product, sites in PRODUCTS[direction].items():
        operand = product_operand(table, sites, accumulator)
        lines.append(f"PRODUCT({product}, {operand})" if operand else f"SEQUENTIAL_PRODUCT({product})")
    tiles = precision.tiles(head_dim)
    for name, (br, bc) in (("forward", tiles.forward), ("dkdv", tiles.dkdv), ("dq", tiles.dq)):
        lines.append(f"constexpr int tile_{name}_br = {br or 0}, tile_{name}_bc = {bc or 0};")
    switches = {"order_fa2": precision.order == "fa2", "algorithm_plain": precision.algorithm == "plain",
                "l_from_rounded": precision.l_from == "rounded", "p_bwd_from_m_l": precision.p_bwd_from == "m_l",
                "exp_mufu": precision.exp == "mufu"}
    lines += [f"constexpr bool {name} = {_bool(on)};" for name, on in switches.items()]
    lines.append(f"constexpr DeltaFrom delta_from = DeltaFrom::{precision.delta_from};")
    if direction == "fwd":
        lines += _fix(fix.for_formats(lambda site: table[site].format))
    return "\n".join(lines) + "\n"


@functools.lru_cache(maxsize=1024)
def network_header(sites: tuple[tuple[str, Rounding], ...]) -> str:
    """The text of precision.cuh for an operation of the network: its sites alone.

    Raises:
        ValueError: a mode of the user has no CUDA expression.
    """
    table = dict(sites)
    return "\n".join(["#pragma once", *_modes(table), *(_site(*site) for site in table.items())]) + "\n"


def _bool(on: bool) -> str:
    return str(bool(on)).lower()


def _modes(table: dict[str, Rounding]) -> Iterator[str]:
    """Definitions of the users' modes."""
    found: dict[str, str] = {}
    for rounding in dict.fromkeys(table.values()):
        mode = rounding.rule
        if mode.name in MODES:
            continue
        if found.setdefault(mode.name, mode.cuda_source) != mode.cuda_source:
            raise ValueError(f"two modes are named {mode.name!r} and differ: rename one")
    yield from found.values()


def _site(name: str, rounding: Rounding) -> str:
    f = format_named(rounding.format)
    return (f"SITE({cuda_name(name)}, {f.exponent_bits}, {f.mantissa_bits}, {rounding.rule.name}, "
            f"{_bool(f.saturates)}, {SITE_ID[name]}, {_bool(SITES[name].axes != 'qk')})")


def cuda_name(site: str) -> str:
    """attn.p -> attn_p."""
    return site.replace(".", "_")


def _fix(fix: Fix) -> list[str]:
    """The fix as a struct: its parameters, when it sees a tie, its rule."""
    for name in ("cuda_rule", "cuda_limited"):
        if getattr(fix, name) is None:
            raise ValueError(f"fix {fix.name!r} has no {name}, so only NumPy arrays can use it")
    return ["struct fix {",
            f"    static constexpr bool active = {_bool(type(fix) is not Fix)}, running = {_bool(fix.running)}, "
            f"rounded_threshold = {_bool(fix.rounded_threshold)}, rounds_down = {_bool(fix.rounds_down)};",
            *(f"    static constexpr float {name} = {_float(value)};"
              for name, value in {"epsilon": fix.epsilon, **fix.values}.items()),
            f"    static float rule(float r_m, int ties) {{ return {fix.cuda_rule}; }}",
            f"    static bool limited(float r_m, int ties) {{ return {fix.cuda_limited}; }}",
            "};"]


def _float(value: float) -> str:
    """fp32 as a constant, to the bit."""
    x = np.float32(value)
    return float(x).hex() + "f" if np.isfinite(x) else f"__builtin_bit_cast(float, {int(x.view(np.uint32)):#x}u)"
