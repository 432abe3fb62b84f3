"""GPT-2 as nanoGPT defines it, forward and backward by hand, composed of cuflash's operations.

Pre-LayerNorm blocks, learned positions, GELU, a head tied to the token embedding, biases optional,
no dropout. Parameters are a dict of arrays under GPT-2's names; weights are (out, in).
"""
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.cross_entropy import cross_entropy_backward, cross_entropy_forward
from cuflash.embedding import embedding_backward, embedding_forward
from cuflash.fixes import Fix, as_fix
from cuflash.gelu import gelu_backward, gelu_forward
from cuflash.layernorm import layernorm_backward, layernorm_forward
from cuflash.linear import linear_backward, linear_forward
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.residual import residual_backward, residual_forward
from cuflash.site_table import MODULES
from cuflash.sites import Rounder, Watch

Params = dict[str, np.ndarray]

# The last part of a parameter's name -> the module that scopes its sites.
_MODULE = {"attn.c_attn": "c_attn", "mlp.c_fc": "c_fc"}
# The layer number of modules outside the blocks, so that a scope like L0/ does not reach them.
NO_LAYER = 0xFFFF
# Stochastic rounding tells modules of one layer apart by this number, where attention has the head.
_MODULE_ID = {module: i for i, module in enumerate(dict.fromkeys([*MODULES, "wpe"]))}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int = 256
    bias: bool = False

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
        linears = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        for i in range(self.n_layer):
            for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
                shapes[f"h.{i}.{name}.weight"] = linears.get(name, (C,))
                if self.bias:
                    shapes[f"h.{i}.{name}.bias"] = (linears.get(name, (C,))[0],)
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

    Args:
        config: its shape.
        params: as `init_params`; kept by reference, so an optimizer updates them in place.
        precision: of every site. Under fp64 the parameters are taken to fp64.
        fix: of attention's row maximum.
    """

    def __init__(self, config: GPTConfig, params: Params, precision: Precision, fix: Fix | str = "off") -> None:
        self.config, self.precision, self.fix = config, precision, as_fix(fix)
        self.dtype = np.float64 if precision.is_fp64 else np.float32
        self.params = {name: p.astype(self.dtype, copy=False) for name, p in params.items()}
        self.watch: Watch | None = None
        self._rounders: dict[tuple[str, int, str], Rounder] = {}

    # ---- forward

    def forward(self, idx: np.ndarray, key: Key = Key(0)) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Logits (B, T, vocab_size) of tokens idx (B, T), and what backward needs.

        key: seed, step and global index of the first sample, for stochastic rounding.
        """
        x = embedding_forward(idx, self.params["wte"], self.params["wpe"], self._rnd("fwd", key, idx, module="wte"))
        blocks = []
        for i in range(self.config.n_layer):
            x, saved = self._block_forward(x, idx, i, key)
            blocks.append(saved)
        x, ln_f = layernorm_forward(x, *self._weights("ln_f"), self._rnd("fwd", key, idx, module="ln_f"))
        logits, head = linear_forward(x, self.params["wte"], None, self._rnd("fwd", key, idx, module="lm_head"),
                                      y_site="logits")
        return logits, (idx, key, blocks, ln_f, head)

    def _block_forward(self, x: np.ndarray, idx: np.ndarray, i: int, key: Key) -> tuple[np.ndarray, tuple[Any, ...]]:
        def rnd(module: str) -> Rounder:
            return self._rnd("fwd", key, idx, i, module)

        h, ln_1 = layernorm_forward(x, *self._weights(f"h.{i}.ln_1"), rnd("ln_1"))
        qkv, c_attn = linear_forward(h, *self._weights(f"h.{i}.attn.c_attn"), rnd("c_attn"))
        q, k, v = (self._split_heads(part) for part in np.split(qkv, 3, axis=-1))
        o, attn = flash_attention_forward(q, k, v, causal=True, precision=self.precision, fix=self.fix,
                                          key=Key(key.seed, key.step, i, key.sample), watch=self.watch)
        y, attn_proj = linear_forward(self._merge_heads(o), *self._weights(f"h.{i}.attn.c_proj"), rnd("attn.c_proj"))
        x = residual_forward(x, y, rnd("attn.c_proj"))

        h, ln_2 = layernorm_forward(x, *self._weights(f"h.{i}.ln_2"), rnd("ln_2"))
        f, c_fc = linear_forward(h, *self._weights(f"h.{i}.mlp.c_fc"), rnd("c_fc"))
        f_format = rnd("c_fc").format("linear.y")
        h = gelu_forward(f, rnd("c_fc"), x_format=f_format)
        y, mlp_proj = linear_forward(h, *self._weights(f"h.{i}.mlp.c_proj"), rnd("mlp.c_proj"))
        x = residual_forward(x, y, rnd("mlp.c_proj"))
        return x, (ln_1, c_attn, attn, attn_proj, ln_2, c_fc, f, f_format, mlp_proj)

    # ---- loss, backward

    def loss(self, idx: np.ndarray, targets: np.ndarray, key: Key = Key(0)) -> float:
        """Mean cross-entropy in nats."""
        logits, _ = self.forward(idx, key)
        return cross_entropy_forward(logits, targets, self._rnd("fwd", key, idx, module="lm_head"))[0]

    def loss_and_grads(self, idx: np.ndarray, targets: np.ndarray, key: Key = Key(0), *, grads: Params | None = None,
                       n_micro: int = 1) -> tuple[float, Params, list[Any]]:
        """Mean loss of a micro-batch, its gradients added to `grads`, and attention's counters by layer.

        Gradients are those of the mean over n_micro such micro-batches.
        """
        logits, (_, _, blocks, ln_f, head) = self.forward(idx, key)
        loss, softmax = cross_entropy_forward(logits, targets, self._rnd("fwd", key, idx, module="lm_head"))
        stats = [saved[2].stats for saved in blocks]
        grads = {} if grads is None else grads

        rnd = self._rnd("bwd", key, idx, module="lm_head")
        dlogits = cross_entropy_backward(softmax, logits.shape, 1 / (idx.size * n_micro), rnd)
        dx, dwte, _ = linear_backward(dlogits, head, self.params["wte"], rnd, bias=False)
        dx, *dw = layernorm_backward(dx, ln_f, self._rnd("bwd", key, idx, module="ln_f"), bias=self.config.bias)
        self._add(grads, "ln_f", *dw)
        for i in reversed(range(self.config.n_layer)):
            dx = self._block_backward(dx, blocks.pop(), idx, i, key, grads)
        dtokens, dwpe = embedding_backward(dx, idx, self.config.vocab_size, self.config.block_size)
        for name, g in (("wte", dwte + dtokens), ("wpe", dwpe)):  # the head's share first
            grads[name] = grads[name] + g if name in grads else g
        return loss, grads, stats

    def _block_backward(self, dx: np.ndarray, saved: tuple[Any, ...], idx: np.ndarray, i: int, key: Key,
                        grads: Params) -> np.ndarray:
        def rnd(module: str) -> Rounder:
            return self._rnd("bwd", key, idx, i, module)

        def linear(dy: np.ndarray, saved: Any, name: str) -> np.ndarray:
            module = _MODULE.get(name, name)
            dx, *dw = linear_backward(dy, saved, self.params[f"h.{i}.{name}.weight"], rnd(module), bias=self.config.bias)
            self._add(grads, f"h.{i}.{name}", *dw)
            return dx

        def layernorm(dy: np.ndarray, saved: Any, name: str) -> np.ndarray:
            dx, *dw = layernorm_backward(dy, saved, rnd(name), bias=self.config.bias)
            self._add(grads, f"h.{i}.{name}", *dw)
            return dx

        ln_1, c_attn, attn, attn_proj, ln_2, c_fc, f, f_format, mlp_proj = saved
        dh = linear(dx, mlp_proj, "mlp.c_proj")
        dh = gelu_backward(dh, f, rnd("c_fc"), x_format=f_format)
        dh = layernorm(linear(dh, c_fc, "mlp.c_fc"), ln_2, "ln_2")
        dx = residual_backward(dx, dh, rnd("ln_2"))

        do = self._split_heads(linear(dx, attn_proj, "attn.c_proj"))
        dq, dk, dv = flash_attention_backward(do, attn, watch=self.watch)
        dqkv = np.concatenate([self._merge_heads(part) for part in (dq, dk, dv)], axis=-1)
        dh = layernorm(linear(dqkv, c_attn, "attn.c_attn"), ln_1, "ln_1")
        return residual_backward(dx, dh, rnd("ln_1"))

    # ---- helpers

    def rounder(self, name: str, key: Key) -> Rounder:
        """For the optimizer: the Rounder of a parameter, by its name."""
        layer, module = NO_LAYER, name
        if name.startswith("h."):
            _, number, module = name.split(".", 2)
            layer = int(number)
        module = module.removesuffix(".weight").removesuffix(".bias")
        return self._rnd("bwd", key, (), layer, _MODULE.get(module, module))

    def _rnd(self, direction: str, key: Key, idx: Sequence[Any] | np.ndarray, layer: int = NO_LAYER, module: str = "") -> Rounder:
        place = (direction, layer, module)
        if place not in self._rounders:
            self._rounders[place] = Rounder(self.precision, direction, layer, module, heads=(_MODULE_ID[module],))
        rnd = self._rounders[place]
        rnd.key, rnd.watch, rnd.samples = key, self.watch, range(key.sample, key.sample + len(idx))
        return rnd

    def _weights(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        return self.params[f"{name}.weight"], self.params.get(f"{name}.bias")

    def _add(self, grads: Params, name: str, dw: np.ndarray, db: np.ndarray | None) -> None:
        for full, g in ((f"{name}.weight", dw), (f"{name}.bias", db)):
            if g is not None:
                grads[full] = grads[full] + g if full in grads else g

    def _split_heads(self, x: np.ndarray) -> np.ndarray:
        """(B, T, C) -> (B, H, T, D), a view."""
        B, T, C = x.shape
        return x.reshape(B, T, self.config.n_head, -1).transpose(0, 2, 1, 3)

    def _merge_heads(self, x: np.ndarray) -> np.ndarray:
        """(B, H, T, D) in attention's own dtype -> (B, T, C)."""
        B, H, T, D = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, T, H * D).astype(self.dtype, copy=False)
