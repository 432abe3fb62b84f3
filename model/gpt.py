"""GPT-2 as nanoGPT defines it, forward and backward by hand, composed of cuflash's operations.

Pre-LayerNorm blocks, learned positions, GELU, a head tied to the token embedding, biases optional,
no dropout; optional LayerNorm of each head's q and k. Parameters are a dict of arrays under GPT-2's
names; weights are (out, in).
"""
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from cuflash.accumulate import accumulate
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.cross_entropy import cross_entropy, cross_entropy_forward
from cuflash.embedding import embedding_backward, embedding_forward
from cuflash.fixes import Fix, as_fix
from cuflash.gelu import gelu_backward, gelu_forward
from cuflash.launch import cast, empty, indices, on_gpu, storage
from cuflash.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from cuflash.linear import linear_backward, linear_forward
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.site_table import MODULES, NO_LAYER
from cuflash.sites import Rounder, Watch
from cuflash.watching import watched

Params = dict[str, np.ndarray]

# The last part of a parameter's name -> the module that scopes its sites.
_MODULE = {"attn.c_attn": "c_attn", "mlp.c_fc": "c_fc"}
_QK = ("attn.ln_q", "attn.ln_k")
# Stochastic rounding tells modules of one layer apart by this number, where attention has the head.
_MODULE_ID = {module: i for i, module in enumerate([*MODULES[:9], "wpe", *MODULES[9:]])}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int = 256
    bias: bool = False
    qk_norm: bool = False  # LayerNorm of q and k, without bias, shared by the heads (Dehghani et al. 2023)

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        if self.n_embd // self.n_head > 256:
            raise ValueError(f"head_dim n_embd/n_head is {self.n_embd // self.n_head}; attention takes 1 to 256")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape, in the order of the checkpoint."""
        C = self.n_embd
        shapes: dict[str, tuple[int, ...]] = {"wte": (self.vocab_size, C), "wpe": (self.block_size, C)}
        linears = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C),
                   "mlp.c_proj": (C, 4 * C)}
        for i in range(self.n_layer):
            for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
                shapes[f"h.{i}.{name}.weight"] = linears.get(name, (C,))
                if self.bias:
                    shapes[f"h.{i}.{name}.bias"] = (linears.get(name, (C,))[0],)
            for name in _QK if self.qk_norm else ():
                shapes[f"h.{i}.{name}.weight"] = (C // self.n_head,)
        shapes["ln_f.weight"] = (C,)
        return shapes | ({"ln_f.bias": (C,)} if self.bias else {})

    def n_params(self) -> int:
        """Parameters, position embedding included; the tied head counts once."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def flops_per_token(self) -> int:
        """Matrix-product FLOPs of forward and backward per token (Chowdhery et al. 2022, appendix B)."""
        position = self.block_size * self.n_embd
        return 6 * (self.n_params() - position) + 12 * self.n_layer * self.n_embd * self.block_size


def init_params(config: GPTConfig, seed: int) -> Params:
    """nanoGPT's initialisation, fp32: normal(0, 0.02); residual projections 0.02/√(2·n_layer)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    params: Params = {}
    for name, shape in config.shapes().items():
        if name.endswith(".bias"):
            params[name] = np.zeros(shape, np.float32)
        elif len(shape) == 1:
            params[name] = np.ones(shape, np.float32)
        else:
            std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
            params[name] = rng.standard_normal(shape, np.float32) * np.float32(std)
    return params


class GPT:
    """The model under one precision and fix.

    Each LayerNorm takes the residual addition before it along, and so does its backward: one kernel on a GPU.

    Args:
        config: its shape.
        params: as `init_params`; kept by reference, so an optimizer updates them in place. CuPy arrays run on
            their GPU, and so does what they are given.
        precision: of every site. Under fp64 the parameters are taken to fp64.
        fix: of attention's row maximum.
        grad_out: arrays that gradients are summed up in, by name; on a GPU.
    """

    def __init__(self, config: GPTConfig, params: Params, precision: Precision, fix: Fix | str = "off",
                 grad_out: Params | None = None) -> None:
        precision.check_scopes(config.n_layer, config.n_head)
        self.config, self.precision, self.fix, self.grad_out = config, precision, as_fix(fix), grad_out or {}
        self.dtype = np.float64 if precision.is_fp64 else np.float32
        self.gpu = on_gpu(params["wte"])
        self.params = (params if self.gpu
                       else {name: p.astype(self.dtype, copy=False) for name, p in params.items()})
        self.watch: Watch | None = None
        self._rounders: dict[tuple[str, int, str], Rounder] = {}

    # ---- forward

    def forward(self, idx: np.ndarray, key: Key = Key(0), *,
                keep: bool = True) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Logits (B, T, vocab_size) of tokens idx (B, T), and what backward needs.

        key: seed, step and global index of the first sample, for stochastic rounding. keep: False where there
        is no backward, so that nothing of a block outlives it.
        """
        idx = self._tokens(idx)
        x = embedding_forward(idx, self.params["wte"], self.params["wpe"],
                              self._rnd("fwd", key, idx, module="wte"))
        h, norm = layernorm_forward(x, *self._weights("h.0.ln_1"), self._rnd("fwd", key, idx, 0, "ln_1"),
                                    operand=self._rnd("fwd", key, idx, 0, "c_attn"))
        blocks = []
        for i in range(self.config.n_layer):
            x, h, after, saved = self._block_forward(x, h, idx, i, key)
            if keep:
                blocks.append((norm, *saved))
            norm = after
            del saved
        logits, head = linear_forward(h, self.params["wte"], None,
                                      self._rnd("fwd", key, idx, module="lm_head"), y_site="logits")
        return logits, (idx, key, blocks, norm, head)

    def _block_forward(self, x: np.ndarray, h: np.ndarray, idx: np.ndarray, i: int,
                       key: Key) -> tuple[np.ndarray, np.ndarray, Any, tuple[Any, ...]]:
        """From the stream x and its ln_1 h to the next block's: (x, h, for h's backward, for the block's)."""
        def rnd(module: str, layer: int = i) -> Rounder:
            return self._rnd("fwd", key, idx, layer, module)

        qkv, c_attn = linear_forward(h, *self._weights(f"h.{i}.attn.c_attn"), rnd("c_attn"))
        q, k, v = self._split(qkv)
        ln_qk = None
        if self.config.qk_norm:
            (q, ln_q), (k, ln_k) = (self._qk_norm(x, f"h.{i}.{name}", rnd(name))
                                    for name, x in zip(_QK, (q, k)))
            v, ln_qk = v.astype(q.dtype, copy=False), (ln_q, ln_k)
        o, attn = flash_attention_forward(q, k, v, causal=True, layout="bthd", precision=self.precision,
                                          fix=self.fix, key=Key(key.seed, key.step, i, key.sample),
                                          watch=self.watch)
        y, attn_proj = linear_forward(self._merge(o), *self._weights(f"h.{i}.attn.c_proj"),
                                      rnd("attn.c_proj"))
        x, h, ln_2 = residual_layernorm_forward(x, y, *self._weights(f"h.{i}.ln_2"), rnd("attn.c_proj"),
                                                rnd("ln_2"), operand=rnd("c_fc"))
        f, c_fc = linear_forward(h, *self._weights(f"h.{i}.mlp.c_fc"), rnd("c_fc"))
        f_format = rnd("c_fc").format("linear.y")
        h = gelu_forward(f, rnd("c_fc"), x_format=f_format)
        y, mlp_proj = linear_forward(h, *self._weights(f"h.{i}.mlp.c_proj"), rnd("mlp.c_proj"))
        last = i == self.config.n_layer - 1
        name, *after = ("ln_f", rnd("ln_f", NO_LAYER), rnd("lm_head", NO_LAYER)) if last else (
            f"h.{i + 1}.ln_1", rnd("ln_1", i + 1), rnd("c_attn", i + 1))
        x, h, norm = residual_layernorm_forward(x, y, *self._weights(name), rnd("mlp.c_proj"), after[0],
                                                operand=after[1])
        return x, h, norm, (c_attn, attn, attn_proj, ln_2, c_fc, f, f_format, mlp_proj, ln_qk)

    def _qk_norm(self, x: np.ndarray, name: str, rnd: Rounder) -> tuple[np.ndarray, Any]:
        """q or k (B, T, H, D) normalised, and what backward needs."""
        y, saved = layernorm_forward(x.reshape(len(x), -1, x.shape[-1]), *self._weights(name), rnd)
        return (cast(y, np.dtype(np.float32)) if self.gpu else y).reshape(x.shape), saved

    # ---- loss, backward

    def loss(self, idx: np.ndarray, targets: np.ndarray, key: Key = Key(0)) -> float:
        """Mean cross-entropy in nats."""
        logits, _ = self.forward(idx, key, keep=False)
        return float(cross_entropy_forward(logits, self._tokens(targets),
                                           self._rnd("fwd", key, idx, module="lm_head"))[0])

    def loss_and_grads(self, idx: np.ndarray, targets: np.ndarray, key: Key = Key(0), *,
                       grads: Params | None = None, n_micro: int | Fraction = 1,
                       loss_scale: float = 1.0) -> tuple[float, Params, list[Any]]:
        """Mean loss of a micro-batch, its gradients added to `grads`, and attention's counters by layer.

        Gradients are those of the mean over n_micro such micro-batches, times loss_scale. On a GPU nothing
        waits: the loss is an array of no axes.
        """
        logits, (idx, _, blocks, ln_f, head) = self.forward(idx, key)
        stats = [saved[2].stats for saved in blocks]
        grads = {} if grads is None else grads

        rnd = self._rnd("bwd", key, idx, module="lm_head")
        loss, dlogits = cross_entropy(logits, self._tokens(targets), loss_scale / (idx.size * n_micro),
                                      self._rnd("fwd", key, idx, module="lm_head"), rnd)
        del logits
        dh, dwte, _ = linear_backward(dlogits, head, self.params["wte"], rnd, bias=False)
        del dlogits
        dx, *dw = layernorm_backward(dh, ln_f, self._rnd("bwd", key, idx, module="ln_f"),
                                     bias=self.config.bias)
        self._add(grads, "ln_f", *dw)
        dy = dx
        for i in reversed(range(self.config.n_layer)):
            dx, dy = self._block_backward(dx, dy, blocks.pop(), idx, i, key, grads)
        dtokens, dwpe = embedding_backward(dx, idx, self.config.vocab_size, self.config.block_size)
        for name, g in (("wte", accumulate(dtokens, dwte)), ("wpe", dwpe)):
            grads[name] = accumulate(grads.get(name), g, self.grad_out.get(name))
        return loss, grads, stats

    def _block_backward(self, dx: np.ndarray, dy: np.ndarray, saved: tuple[Any, ...], idx: np.ndarray,
                        i: int, key: Key, grads: Params) -> tuple[np.ndarray, np.ndarray]:
        """From the stream's gradient after the block to that before it; each also as a layer's operand."""
        def rnd(module: str, layer: int = i) -> Rounder:
            return self._rnd("bwd", key, idx, layer, module)

        def linear(dy: np.ndarray, saved: Any, name: str) -> np.ndarray:
            module = _MODULE.get(name, name)
            dx, *dw = linear_backward(dy, saved, self.params[f"h.{i}.{name}.weight"], rnd(module),
                                      bias=self.config.bias)
            self._add(grads, f"h.{i}.{name}", *dw)
            return dx

        def layernorm(dx: np.ndarray, dh: np.ndarray, saved: Any, name: str,
                      operand: Rounder | None) -> tuple[np.ndarray, np.ndarray]:
            dx, dy, *dw = residual_layernorm_backward(dx, dh, saved, rnd(name), bias=self.config.bias,
                                                      operand=operand)
            self._add(grads, f"h.{i}.{name}", *dw)
            return dx, dy

        ln_1, c_attn, attn, attn_proj, ln_2, c_fc, f, f_format, mlp_proj, ln_qk = saved
        dh = linear(dy, mlp_proj, "mlp.c_proj")
        dh = gelu_backward(dh, f, rnd("c_fc"), x_format=f_format)
        dx, dy = layernorm(dx, linear(dh, c_fc, "mlp.c_fc"), ln_2, "ln_2", rnd("attn.c_proj"))

        do = linear(dy, attn_proj, "attn.c_proj").reshape(attn.q.shape)
        dqkv = self._empty_dqkv(attn.q.shape, i)
        flash_attention_backward(do, attn, out=self._split(dqkv), watch=self.watch)
        if ln_qk is not None:
            for name, d, norm in zip(_QK, self._split(dqkv), ln_qk):
                d_in, *dw = layernorm_backward(d.reshape(len(d), -1, d.shape[-1]), norm, rnd(name),
                                               bias=False)
                self._add(grads, f"h.{i}.{name}", *dw)
                d[...] = d_in.reshape(d.shape)
        return layernorm(dx, linear(dqkv, c_attn, "attn.c_attn"), ln_1, "ln_1",
                         rnd("mlp.c_proj", i - 1) if i else None)

    # ---- helpers

    def rounder(self, name: str, key: Key) -> Rounder:
        """For the optimizer: the Rounder of a parameter, by its name."""
        layer, module = NO_LAYER, name
        if name.startswith("h."):
            _, number, module = name.split(".", 2)
            layer = int(number)
        module = module.removesuffix(".weight").removesuffix(".bias")
        return self._rnd("bwd", key, (), layer, _MODULE.get(module, module))

    def _tokens(self, idx: np.ndarray) -> np.ndarray:
        """Tokens where the parameters are."""
        if not self.gpu or on_gpu(idx):
            return idx
        import cupy
        return indices(cupy.asarray(np.asarray(idx, np.int32)))

    def _rnd(self, direction: str, key: Key, idx: Sequence[Any] | np.ndarray, layer: int = NO_LAYER,
             module: str = "") -> Rounder:
        place = (direction, layer, module)
        if place not in self._rounders:
            self._rounders[place] = Rounder(self.precision, direction, layer, module,
                                            heads=(_MODULE_ID[module],))
        rnd = self._rounders[place]
        rnd.key, rnd.watch, rnd.samples = key, watched(self.watch), range(key.sample, key.sample + len(idx))
        return rnd

    def _weights(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        return self.params[f"{name}.weight"], self.params.get(f"{name}.bias")

    def _add(self, grads: Params, name: str, dw: np.ndarray, db: np.ndarray | None) -> None:
        for full, g in ((f"{name}.weight", dw), (f"{name}.bias", db)):
            if g is not None:
                grads[full] = accumulate(grads.get(full), g, self.grad_out.get(full))

    def _split(self, qkv: np.ndarray) -> tuple[np.ndarray, ...]:
        """(B, T, 3C) -> q, k, v, each (B, T, H, D), views."""
        B, T, C = *qkv.shape[:2], self.config.n_embd
        return tuple(qkv[..., i * C:(i + 1) * C].reshape(B, T, self.config.n_head, -1) for i in range(3))

    def _merge(self, x: np.ndarray) -> np.ndarray:
        """(B, T, H, D) in attention's own dtype -> (B, T, C)."""
        x = x.reshape(*x.shape[:2], -1)
        return x if self.gpu else x.astype(self.dtype, copy=False)

    def _empty_dqkv(self, shape: tuple[int, ...], layer: int) -> np.ndarray:
        """For dQ, dK and dV (B, T, 3C); on a GPU in their own dtype where they are alike and final."""
        shape = (*shape[:2], 3 * self.config.n_embd)
        if not self.gpu:
            return np.empty(shape, self.dtype)
        if self.config.qk_norm:
            return empty(shape)
        table = self.precision.sites_for("bwd", layer)
        formats = {table[site].format for site in ("attn.dq", "attn.dk", "attn.dv")}
        scoped = any(o.heads is not None for o in self.precision.overrides)
        return empty(shape, storage(formats.pop()) if len(formats) == 1 and not scoped else np.float32)
