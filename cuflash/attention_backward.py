"""Backward of attention: the NumPy reference of cuda/attention_backward.cu.

    δ = rowsum(dO∘O)    P = exp(S − L)    dV = PᵀdO    dP = dO·Vᵀ    dS = P∘(dP − δ)    dQ = α·dS·K    dK = α·dSᵀQ

S and P are recomputed (FlashAttention-2's algorithm 2). dK and dV sum over query tiles, dQ over key
tiles, ascending under `eager`, descending under `fa2`. Every rounding is a call of rnd.
"""
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from cuflash import kernels
from cuflash.arithmetic import LOG2E, Arithmetic, add_columns, delta_sum, join_columns
from cuflash.attention_forward import base2_scale, exponent, masked, scores
from cuflash.fixes import Fix
from cuflash.kernel_header import (PRODUCTS, SHARED_MEMORY, TAPPED, cuda_name, device_accumulator,
                                   precision_header, product_operand)
from cuflash.philox import Key
from cuflash.precision import Precision, Rounding, Tile
from cuflash.sites import Rounder
from cuflash.tiles import Shape


@dataclass
class Gradients:
    """dq (G, Tq, D) rounded at attn.dq; dk_head, dv_head (G, Tk, D) of each query head, rounded at their sites."""

    dq: np.ndarray
    dk_head: np.ndarray
    dv_head: np.ndarray


def backward(do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, lse: np.ndarray,
             m: np.ndarray | None, l: np.ndarray | None, rnd: Rounder, shape: Shape, scale: float) -> Gradients:
    """Gradients of G heads: do, q, o (G, Tq, D), k and v (G, Tk, D).

    `o` is the O that `delta_from` asks for; m and l are used under p_bwd_from = m_l. Results fp32
    (fp64 under precision fp64).
    """
    precision, math, real = rnd.precision, Arithmetic(rnd), rnd.dtype
    scale = real(scale)
    fa2 = precision.order == "fa2"
    tiles = precision.tiles(q.shape[-1])
    rnd.at()
    q, k, v, do = rnd("attn.q", q), rnd("attn.k", k), rnd("attn.v", v), rnd("attn.do", do)
    out = Gradients(*(np.zeros(a.shape, real) for a in (q, k, v)))
    chunk = lcm(tiles.dkdv[0] or max(shape.tq, 1), tiles.dq[0] or max(shape.tq, 1))  # rows at a time
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        if precision.delta_from != "p_dp":
            delta = rnd("attn.delta", delta_sum(rnd("attn.delta_prod", do * o)))
        for _, r0, r1 in shape.query_tiles(chunk, descending=fa2):
            end = max(shape.key_end(r1, tiles.dkdv[1]), shape.key_end(r1, tiles.dq[1]))
            visible = shape.visible(r0, r1, 0, end)
            shown = shown_entries(visible, lse[:, r0:r1])
            rnd.at(q=r0, visible=shown)
            s = scores(q[:, r0:r1], k[:, :end], rnd, math, scale, visible)
            m_rows, l_rows = (x if x is None else x[:, r0:r1] for x in (m, l))
            p = _probabilities(s, lse[:, r0:r1], m_rows, l_rows, rnd, math, scale, shown)
            p_bwd, p_ds = rnd("attn.p_bwd", p), rnd("attn.p_ds", p)
            dp = rnd("attn.dp", math.dot(do[:, r0:r1], "attn.do", v[:, :end].swapaxes(-1, -2), "attn.v"))
            if precision.delta_from == "p_dp":
                delta_rows = _delta_from_p(_mask(rnd("attn.delta_prod", p_ds * dp), shown), shape, tiles.dq, r0, fa2)
                delta_rows = rnd("attn.delta", delta_rows)
            else:
                delta_rows = delta[:, r0:r1]
            dpd = rnd("attn.dpd", dp - delta_rows[..., None])
            ds = _mask(rnd("attn.ds", p_ds * dpd if fa2 else (p_ds * scale) * dpd), shown)
            _add_dkdv(out, p_bwd, ds, q, do, rnd, math, shape, tiles.dkdv, r0, r1)
            _add_dq(out, ds, k, rnd, math, shape, tiles.dq, r0, r1)
        rnd.at()
        out.dq = rnd("attn.dq", out.dq * scale if fa2 else out.dq)
        out.dk_head = rnd("attn.dk_head", out.dk_head * scale if fa2 else out.dk_head)
        out.dv_head = rnd("attn.dv_head", out.dv_head)
    return out


def _probabilities(s: np.ndarray, lse: np.ndarray, m: np.ndarray | None, l: np.ndarray | None, rnd: Rounder,
                   math: Arithmetic, scale: np.floating, shown: np.ndarray | None) -> np.ndarray:
    """P of a block before its rounding, 0 where masked and in empty rows."""
    fa2, m_l = rnd.precision.order == "fa2", rnd.precision.p_bwd_from == "m_l"
    if m_l:
        x = exponent(s, m, rnd, scale)
    elif fa2:
        x = s * base2_scale(scale, rnd) - (lse * math.log2e)[..., None]
    else:
        x = s - lse[..., None]
    x = rnd("attn.x_bwd", masked(x, shown, -np.inf))
    p = math.exp2(x) if fa2 else math.exp(x, "attn.x_bwd")
    return _mask(p * (1 / l)[..., None], shown) if m_l else p  # 1/l of an empty row is Inf


def shown_entries(visible: np.ndarray | None, lse: np.ndarray) -> np.ndarray | None:
    """Entries that are neither masked nor in an empty row (L = −Inf); None if all are shown."""
    empty = lse == -np.inf
    if not empty.any():
        return visible
    return ~empty[..., None] & (True if visible is None else visible)


def _mask(x: np.ndarray, shown: np.ndarray | None) -> np.ndarray:
    return masked(x, shown, 0)


def _delta_from_p(products: np.ndarray, shape: Shape, tile: Tile, r0: int, fa2: bool) -> np.ndarray:
    """δ = rowsum(P∘dP): the four sums of section 7 carried over dQ's key tiles, joined at the end."""
    sums = np.zeros((*products.shape[:2], 4), products.dtype)
    for _, q0, q1 in shape.query_tiles(tile[0], False, r0, r0 + products.shape[1]):
        rows = slice(q0 - r0, q1 - r0)
        for _, k0, k1 in shape.key_tiles(tile[1], descending=fa2):
            if k0 < shape.key_end(q1, tile[1]):
                add_columns(sums[:, rows], products[:, rows, k0:k1])
    return join_columns(sums)


def _add_dkdv(out: Gradients, p: np.ndarray, ds: np.ndarray, q: np.ndarray, do: np.ndarray, rnd: Rounder,
              math: Arithmetic, shape: Shape, tile: Tile, r0: int, r1: int) -> None:
    """Adds the query tiles of rows r0 to r1 to dK and dV of every key tile that they visit."""
    fa2 = rnd.precision.order == "fa2"
    for i, q0, q1 in shape.query_tiles(tile[0], fa2, r0, r1):
        end = shape.key_end(q1, tile[1])
        rows, keys = slice(q0 - r0, q1 - r0), slice(0, end)
        rnd.at(q=q0, tile=i)
        dv, dk = out.dv_head[:, keys], out.dk_head[:, keys]
        p_t, ds_t = p[:, rows, keys].swapaxes(-1, -2), ds[:, rows, keys].swapaxes(-1, -2)
        if fa2:
            dv[...] = rnd("attn.dv_acc", math.dot(p_t, "attn.p_bwd", do[:, q0:q1], "attn.do", dv))
            dk[...] = rnd("attn.dk_acc", math.dot(ds_t, "attn.ds", q[:, q0:q1], "attn.q", dk))
        else:
            dv_tile = rnd("attn.dv_tile", math.dot(p_t, "attn.p_bwd", do[:, q0:q1], "attn.do"))
            dv[...] = rnd("attn.dv_acc", dv + dv_tile)
            dk_tile = rnd("attn.dk_tile", math.dot(ds_t, "attn.ds", q[:, q0:q1], "attn.q"))
            dk[...] = rnd("attn.dk_acc", dk + dk_tile)


def _add_dq(out: Gradients, ds: np.ndarray, k: np.ndarray, rnd: Rounder, math: Arithmetic, shape: Shape,
            tile: Tile, r0: int, r1: int) -> None:
    """dQ of rows r0 to r1: the sum of dS·K over the key tiles that they visit."""
    fa2 = rnd.precision.order == "fa2"
    for _, q0, q1 in shape.query_tiles(tile[0], False, r0, r1):
        for j, k0, k1 in shape.key_tiles(tile[1], descending=fa2):
            if k0 < shape.key_end(q1, tile[1]):
                rnd.at(q=q0, k=k0, tile=j)
                dq = out.dq[:, q0:q1]
                dq_tile = rnd("attn.dq_tile", math.dot(ds[:, q0 - r0:q1 - r0, k0:k1], "attn.ds", k[:, k0:k1], "attn.k"))
                dq[...] = rnd("attn.dq_acc", dq + dq_tile)



# ---- CUDA ---------------------------------------------------------------------------------------

SCRATCH = 1 << 30  # bytes that dS (and P) take at a time, unless a single step needs more
_BLOCKS = 1024  # enough blocks to keep a large GPU busy
_MIXED = 350  # blocks that run mixed, for each that an SM holds: a few times an H200's 132 SMs

_TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "fp16"}

# struct Args of cuda/attention_backward.cuh
_ARRAYS = ("q", "k", "v", "dout", "dq", "dk", "dv")
_POINTERS = ("rows", "inv_l", "p", "ds", "dk_head", "dv_head", "heads")
_INTS = ("listed", "first", "count", "together", "tq", "tk", "d", "causal", "row0", "row1", "begins", "ends",
         "n_heads", "group", "pairs", "k_per_head", "v_per_head")
_SCALARS = (*_INTS, "scale", "c", "seed_low", "seed_high", "step", "layer", "sample")
_ARRAY = Struct("@Pqqq")
_ARGS = Struct("@" + len(_ARRAYS) * "Pqqq" + len(_POINTERS) * "P" + "q" + len(_INTS) * "i" + "2f5I")


def launch_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, m: Any, l: Any, dq: Any, dk: Any,
                    dv: Any, precision: Precision, shape: Shape, scale: float, key: Key,
                    taps: Any | None = None) -> None:
    """Queues the kernels on CuPy's current stream.

    Args:
        do, q, o, dq: (batch, heads, Tq, D) CuPy arrays with a contiguous last axis; k, v, dk, dv:
            (batch, kv_heads, Tk, D). Inputs are fp32, bf16 or fp16, and so are results, which hold the
            formats of attn.dq, attn.dk, attn.dv. `o` is the O that `delta_from` asks for.
        lse, m, l: (batch, heads, Tq) fp32, contiguous; m and l are used under p_bwd_from = m_l.
        taps: of a watched sample (taps.Sample); None: nothing is watched.

    Raises:
        ValueError: this device cannot run the accumulator, or a user's mode has no CUDA expression.
    """
    if min(*q.shape[:3], shape.tk) == 0:
        for out in (dq, dk, dv):
            out.fill(0)
        return
    launch = _Launch(do, q, k, v, o, lse, m, l, dq, dk, dv, precision, shape, scale, key)
    if taps is not None:
        for launch.tap in taps:
            launch.gradients(tuple(launch.tap.heads))
        for launch.tap in taps.sums():
            launch.sum_heads(tuple(launch.tap.heads))
        return
    for heads in _alike(precision, key.layer, tuple(range(q.shape[1]))):
        launch.gradients(heads)
    if launch.group > 1:
        for heads in _alike(precision, key.layer, tuple(range(0, q.shape[1], launch.group))):
            launch.sum_heads(heads)


@functools.lru_cache(maxsize=1024)
def _alike(precision: Precision, layer: int, heads: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Heads that round alike in backward."""
    found: dict[tuple, list[int]] = {}
    for head in heads:
        found.setdefault(tuple(precision.sites_for("bwd", layer, "", head).items()), []).append(head)
    return [tuple(some) for some in found.values()]


class Geometry(NamedTuple):
    """What a block of attention_dkdv.cu or attention_dq.cu does at once: its macros. It changes no bits."""

    stages: int
    blocks: int
    threads: int
    shared: int  # bytes


class Plan(NamedTuple):
    """How the backward of heads that round alike is computed."""

    headers: Mapping[str, str]
    rounding: Mapping[str, Any]
    operand: str  # the type of q, k, v, dO in memory
    geometries: tuple[Geometry, Geometry] | None  # of dK/dV and dQ; None: attention_backward_any.cu
    found: dict[tuple, Any]  # kernels, by what else they are compiled for

    def kernel(self, source: str, function: str, shared: int = 0, **defines: Any) -> Any:
        device = kernels.import_cupy().cuda.runtime.getDevice()
        key = (device, function, *defines.values())
        if key not in self.found:
            self.found[key] = kernels.kernel(source, function, defines, self.headers, shared=shared)
        return self.found[key]


def geometries(precision: Precision, head_dim: int, table: Mapping[str, Rounding],
               capability: int) -> tuple[Geometry, Geometry] | None:
    """How attention_dkdv.cu and attention_dq.cu run on a device; None where shared memory is too small."""
    panels = 1 if head_dim <= 64 else 2 if head_dim <= 128 else 4
    threads, tile = 256 if panels == 4 else 128, 64 * 128 * panels
    limit = SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))
    sums = 0
    if precision.order == "eager":  # sums of dK and dV for 64 keys
        formats = (table[site].format for site in ("attn.dk_acc", "attn.dv_acc"))
        sums = sum(64 * 64 * panels * (2 if format in ("bf16", "fp16") else 4) for format in formats)
    # Blocks that an SM's registers hold: with wgmma 3 of 168 registers a thread at small head dims.
    bc = precision.tiles(head_dim).dkdv[1]
    warpgroup = capability == 90 and (bc is None or bc % 64 == 0)
    most = {1: 3 if warpgroup else 2, 2: 2, 4: 1}[panels]
    dkdv = [Geometry(stages, blocks, threads, tile * (2 + 2 * stages) + stages * 64 * 12 + sums)
            for blocks in range(most, 0, -1) for stages in (2, 1)]
    dq = [Geometry(stages, blocks, threads, stages * (tile + threads * 64))
          for blocks in range({1: 3, 2: 2, 4: 1}[panels], 0, -1) for stages in (4, 3, 2)]
    # An SM has 1 KB more than a block may take, and takes 1 KB for each block.
    fit = [next((g for g in some if g.blocks * (g.shared + 1024) <= limit + 1024), None)
           for some in (dkdv, dq)]
    return None if None in fit else tuple(fit)


@functools.lru_cache(maxsize=1024)
def plan(precision: Precision, head_dim: int, layer: int, head: int, capability: int) -> Plan:
    """How backward runs on a device of this compute capability (90 for 9.0)."""
    accumulator = device_accumulator(precision, capability)
    table = precision.sites_for("bwd", layer, "", head)
    headers = {"precision.cuh": precision_header(precision, head_dim, "bwd", accumulator, Fix(), layer, head)}
    operands = {product_operand(table, sites, accumulator) for sites in PRODUCTS["bwd"].values()}
    if operands in ({"bf16"}, {"fp16"}):
        fast = geometries(precision, head_dim, table, capability)
        if fast:
            return Plan(headers, table, operands.pop(), fast, {})
    return Plan(headers, table, "float", None, {})


class _Launch:
    """One backward on the GPU: its arrays and the arguments that all kernels share."""

    def __init__(self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, m: Any, l: Any, dq: Any, dk: Any,
                 dv: Any, precision: Precision, shape: Shape, scale: float, key: Key) -> None:
        self.cupy = kernels.import_cupy()
        self.capability = kernels.capability(q.device.id)
        self.tap: Any = None  # where kernels write their sites' values, if anywhere
        self.inputs = {"attn.q": q, "attn.k": k, "attn.v": v, "attn.do": do}
        self.o, self.lse, self.m, self.l, self.results = o, lse, m, l, {"dq": dq, "dk": dk, "dv": dv}
        self.precision, self.shape, self.key = precision, shape, key
        self.batch, self.heads, tq, self.d = q.shape
        self.group = self.heads // k.shape[1]
        self.padded_rows = -(-tq // 64) * 64 + 64
        pairs = self.batch * self.heads
        self.rows = self.cupy.empty((pairs, self.padded_rows, 2), np.float32)
        m_l = precision.p_bwd_from == "m_l"
        self.inv_l = self.cupy.empty((pairs, self.padded_rows), np.float32) if m_l else None
        self.sums: tuple[Any, Any] | None = None
        scale = float(np.float32(scale))
        in_pairs = self.d % 2 == 0 and all(_multiples(x, 2 * x.itemsize) for x in self.results.values())
        # Further arrays and pointers are set where they come to exist.
        self.arrays = {name: (0, 0, 0, 0) for name in _ARRAYS}
        self.arrays |= {name: _place(x) for name, x in self.results.items()}
        self.pointers = dict.fromkeys(_POINTERS, 0)
        self.pointers |= {"rows": self.rows.data.ptr, "inv_l": self.inv_l.data.ptr if m_l else 0}
        self.scalars = dict.fromkeys(_SCALARS, 0) | {
            "tq": tq, "tk": shape.tk, "d": self.d, "causal": shape.causal, "n_heads": self.heads,
            "group": self.group, "pairs": in_pairs, "scale": scale, "c": float(np.float32(scale * LOG2E)),
            "seed_low": key.seed & 0xFFFFFFFF, "seed_high": key.seed >> 32,
            "step": key.step, "layer": key.layer, "sample": key.sample}

    def args(self) -> np.ndarray:
        arrays = itertools.chain(*self.arrays.values())
        packed = _ARGS.pack(*arrays, *self.pointers.values(), self.padded_rows, *self.scalars.values())
        return np.frombuffer(packed, f"V{len(packed)}")

    def gradients(self, heads: tuple[int, ...]) -> None:
        """dQ, dK and dV of these query heads; where heads share keys, their shares of dK and dV."""
        how = plan(self.precision, self.d, self.key.layer, heads[0], self.capability)
        listed = self._list(heads, self.heads)
        operands = [self._operand(site, how) for site in self.inputs]
        pairs = self.batch * len(heads)
        self.scalars |= {"first": 0, "count": pairs}
        self._deltas(how, pairs)

        count, steps = self._steps(how, pairs)
        size = count * max(r1 - r0 + (-r1 % 16) for r0, r1 in steps)
        tk, tk16 = self.shape.tk, -(-self.shape.tk // 16) * 16
        if how.geometries:
            scratch = [self.cupy.empty(size * tk16, np.uint16)]
        else:
            scratch = [self.cupy.empty(size * tk, np.float32) for _ in range(2)]
        self.pointers |= dict(zip(("ds", "p"), (x.data.ptr for x in scratch)))
        if self.sums is None and (self.group > 1 or len(steps) > 1):
            shape = (self.batch * self.heads, tk, self.d)
            self.sums = tuple(self.cupy.empty(shape, np.float32) for _ in range(2))
            self.pointers |= dict(zip(("dk_head", "dv_head"), (x.data.ptr for x in self.sums)))

        run = self._fast if how.geometries else self._any
        for first in range(0, pairs, count):
            now = min(count, pairs - first)
            for r0, r1 in steps:
                self.scalars |= {"first": first, "count": now, "row0": r0, "row1": r1,
                                 "begins": (r0, r1) == steps[0], "ends": (r0, r1) == steps[-1]}
                run(how, now, r1 - r0)
        del operands, listed, scratch  # kept until all that reads them was queued

    def sum_heads(self, heads: tuple[int, ...]) -> None:
        """dK and dV from the shares of groups that start with these query heads."""
        how = plan(self.precision, self.d, self.key.layer, heads[0], self.capability)
        listed = self._list(heads, self.heads // self.group)
        count, args = self.batch * len(heads) * self.shape.tk * self.d, self.args()
        for name, shares in zip(("dk", "dv"), self.sums):
            self._kernel(how, "attention_heads", "attention_heads", OUT=self._type(name), ROUNDED=f"attn_{name}")(
                (min(-(-count // 256), 1 << 16),), (256,),
                (shares, _array(self.results[name]), np.int64(count), args))
        del listed

    def _list(self, heads: tuple[int, ...], all_heads: int) -> Any:
        """Tells the kernels which heads are meant; the array is to be kept until they are queued."""
        listed = None if len(heads) == all_heads else self.cupy.array(heads, np.int32)
        self.pointers["heads"], self.scalars["listed"] = 0 if listed is None else listed.data.ptr, len(heads)
        return listed

    def _kernel(self, how: Plan, source: str, function: str, shared: int = 0, **defines: Any) -> Any:
        if self.tap is None:
            return how.kernel(source, function, shared, **defines)
        kernel = how.kernel(source, function, shared, **defines, **TAPPED)
        self.tap.fill(kernel)
        return kernel

    def _type(self, result: str) -> str:
        return _TYPES[self.results[result].dtype.name]

    def _operand(self, site: str, how: Plan) -> Any:
        """Sets an operand: the input as it lies where that serves, else a rounded array, which is returned."""
        x, rounding = self.inputs[site], how.rounding[site]
        name, kv = {"attn.do": "dout"}.get(site, site[-1]), site in ("attn.k", "attn.v")
        format = "fp32" if how.operand == "float" else how.operand
        as_it_lies = (self.tap is None and _TYPES[x.dtype.name] == how.operand and rounding.format == format
                      and (not how.geometries or self.d % 8 == 0 and _multiples(x, 16)))
        # Random words belong to a query head, and so do taps.
        per_head = not as_it_lies and kv and self.group > 1 and (rounding.rule.needs_key or self.tap is not None)
        if kv:
            self.scalars[f"{name}_per_head"] = per_head
        if as_it_lies:
            self.arrays[name] = _place(x)
            return None
        width = -(-self.d // 8) * 8 if how.geometries else self.d
        heads = self.heads if per_head else x.shape[1]
        dtype = np.uint16 if how.geometries else np.float32
        y = self.cupy.empty((self.batch, heads, x.shape[2], width), dtype)
        self.arrays[name] = _place(y)
        kernel = self._kernel(how, "attention_operand", "attention_operand", IN=_TYPES[x.dtype.name],
                              OUT=how.operand, ROUNDED=cuda_name(site))
        kernel((min(-(-y.size // 256), 1 << 16),), (256,),
               (_array(x), y, np.int32(x.shape[2]), np.int32(width), np.int32(kv), np.int32(per_head),
                np.int64(y.size), self.args()))
        return y

    def _deltas(self, how: Plan, pairs: int) -> None:
        """δ and what else a row brings."""
        do = self.inputs["attn.do"]
        o = do if self.precision.delta_from == "p_dp" else self.o
        lse, m, l = (self.lse if x is None else x for x in (self.lse, self.m, self.l))
        self._kernel(how, "attention_delta", "attention_delta", DO=_TYPES[do.dtype.name], O=_TYPES[o.dtype.name])(
            (pairs * (self.padded_rows // 32),), (256,), (_array(do), _array(o), lse, m, l, self.args()))
        if self.precision.delta_from == "p_dp":
            self._any_kernel("delta", how)((pairs * -(-self.shape.tq // 64),), (128,), (self.args(),))

    def _steps(self, how: Plan, pairs: int) -> tuple[int, list[tuple[int, int]]]:
        """(sample, head) pairs at a time, and query rows at a time in the order of the sum."""
        tq, tk = self.shape.tq, self.shape.tk
        tiles = self.precision.tiles(self.d)
        row = tk * (2 if how.geometries else 8)  # bytes
        enough = min(pairs, -(-_BLOCKS // -(-tk // 64)))
        if enough * tq * row <= SCRATCH:
            return -(-pairs // -(-pairs * tq * row // SCRATCH)), [(0, tq)]
        whole = lcm(tiles.dkdv[0] or tq, tiles.dq[0] or tq)
        rows = max(SCRATCH // (enough * row) // whole, 1) * whole
        steps = [(r0, min(r0 + rows, tq)) for r0 in range(0, tq, rows)]
        return enough, steps[::-1] if self.precision.order == "fa2" else steps

    def _fast(self, how: Plan, count: int, rows: int) -> None:
        g, h = how.geometries
        depth, tiles = -(-self.d // 16) * 16, -(-self.shape.tk // 64)
        self.scalars["together"] = -(-_MIXED * g.blocks // tiles)
        args = self.args()
        dkdv = self._kernel(how, "attention_dkdv", "attention_dkdv", g.shared, HEAD_DIM=depth, STAGES=g.stages,
                            BLOCKS=g.blocks, DK=self._type("dk"), DV=self._type("dv"))
        dkdv((count * tiles,), (g.threads,), (args,), shared_mem=g.shared)
        dq = self._kernel(how, "attention_dq", "attention_dq", h.shared, HEAD_DIM=depth, STAGES=h.stages,
                          BLOCKS=h.blocks, DQ=self._type("dq"))
        dq((count * -(-rows // 64),), (h.threads,), (args,), shared_mem=h.shared)

    def _any(self, how: Plan, count: int, rows: int) -> None:
        down, across, panels = (-(-n // 64) for n in (rows, self.shape.tk, self.d))
        args = self.args()
        for name, blocks in (("scores", down * across), ("dkdv", across * panels), ("dq", down * panels)):
            self._any_kernel(name, how)((count * blocks,), (128,), (args,))

    def _any_kernel(self, name: str, how: Plan) -> Any:
        return self._kernel(how, "attention_backward_any", f"attention_any_{name}", OPERAND=how.operand,
                          DQ=self._type("dq"), DK=self._type("dk"), DV=self._type("dv"))


def _place(x: Any) -> tuple[int, int, int, int]:
    """(batch, heads, T, D) as a kernel's Array: address, strides in elements."""
    size = x.itemsize
    return (x.data.ptr, *(stride // size for stride in x.strides[:3]))


def _array(x: Any) -> np.ndarray:
    return np.frombuffer(_ARRAY.pack(*_place(x)), "V32")


def _multiples(x: Any, size: int) -> bool:
    """Whether all rows start at multiples of so many bytes."""
    return (x.data.ptr | x.strides[0] | x.strides[1] | x.strides[2]) % size == 0
