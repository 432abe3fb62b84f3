"""The table of rounding sites: every place in forward and backward where a value may be rounded.

One line a site: its name, the axes of its value, where it acts, its format under the three
precisions that the others derive from, what is rounded. A format of "-" means that the site is
merged away there (the value does not exist on its own). numerics.md sections 2 and 4.
"""
import functools
from typing import NamedTuple


class Site(NamedTuple):
    """One row of the table.

    `axes` names the value's axes: q (query rows), k (keys), d (head dim) in attention; in the
    rest of the network t (token), c (feature), o, i (a weight's output and input features).
    `direction` is fwd, bwd or both (backward recomputes it under the forward's rounding).
    """

    name: str
    axes: str
    direction: str
    fp32: str
    bf16: str
    fa2: str
    value: str


SITES: dict[str, Site] = {row[0]: Site(*row) for row in (
    # name              axes  where   fp32    bf16    fa2     value
    ("attn.q",          "qd", "both", "fp32", "bf16", "bf16", "q, the input"),
    ("attn.k",          "kd", "both", "fp32", "bf16", "bf16", "k, the input"),
    ("attn.v",          "kd", "both", "fp32", "bf16", "bf16", "v, the input"),
    ("attn.s",          "qk", "both", "fp32", "bf16", "fp32", "S = QKᵀ, the dot product's result"),
    ("attn.s_scaled",   "qk", "both", "fp32", "bf16", "-",    "α·S"),
    ("attn.m",          "q",  "fwd",  "fp32", "bf16", "fp32", "row maximum: after a tile's fix, and running"),
    ("attn.x",          "qk", "fwd",  "fp32", "bf16", "fp32", "the argument of exp"),
    ("attn.p",          "qk", "fwd",  "fp32", "bf16", "bf16", "P̄ = exp(x), as operand of P̄V"),
    ("attn.dm",         "q",  "fwd",  "fp32", "bf16", "fp32", "m_old − m_new"),
    ("attn.alpha",      "q",  "fwd",  "fp32", "fp32", "fp32", "e^dm"),
    ("attn.l_tile",     "q",  "fwd",  "fp32", "fp32", "-",    "the tile's row sum of P̄"),
    ("attn.l_scaled",   "q",  "fwd",  "fp32", "fp32", "-",    "alpha·l"),
    ("attn.l",          "q",  "fwd",  "fp32", "bf16", "fp32", "running row sum"),
    ("attn.pv",         "qd", "fwd",  "fp32", "bf16", "-",    "the tile's P̄V, where it exists on its own"),
    ("attn.o_scaled",   "qd", "fwd",  "fp32", "bf16", "fp32", "alpha·Ō"),
    ("attn.o_acc",      "qd", "fwd",  "fp32", "bf16", "fp32", "Ō after the tile"),
    ("attn.o",          "qd", "fwd",  "fp32", "bf16", "bf16", "O = Ō / l, the output"),
    ("attn.lse",        "q",  "fwd",  "fp32", "fp32", "fp32", "L = m + log l"),
    ("attn.do",         "qd", "bwd",  "fp32", "bf16", "bf16", "incoming gradient"),
    ("attn.delta_prod", "qd", "bwd",  "fp32", "bf16", "fp32", "dO∘O, elementwise (P∘dP under delta_from = p_dp)"),
    ("attn.delta",      "q",  "bwd",  "fp32", "fp32", "fp32", "δ"),
    ("attn.x_bwd",      "qk", "bwd",  "fp32", "fp32", "fp32", "S − L"),
    ("attn.p_bwd",      "qk", "bwd",  "fp32", "bf16", "bf16", "P = exp(x_bwd), as operand of PᵀdO"),
    ("attn.p_ds",       "qk", "bwd",  "fp32", "fp32", "fp32", "the P inside dS"),
    ("attn.dp",         "qk", "bwd",  "fp32", "bf16", "fp32", "dP = dO·Vᵀ, the dot product's result"),
    ("attn.dpd",        "qk", "bwd",  "fp32", "fp32", "fp32", "dP − δ"),
    ("attn.ds",         "qk", "bwd",  "fp32", "bf16", "bf16", "dS = P∘(dP − δ), as operand of dS·K and dSᵀ·Q"),
    ("attn.dq_tile",    "qd", "bwd",  "fp32", "bf16", "fp32", "a key tile's dS·K"),
    ("attn.dk_tile",    "kd", "bwd",  "fp32", "bf16", "-",    "a query tile's dSᵀ·Q, where it exists on its own"),
    ("attn.dv_tile",    "kd", "bwd",  "fp32", "bf16", "-",    "a query tile's PᵀdO, where it exists on its own"),
    ("attn.dq_acc",     "qd", "bwd",  "fp32", "bf16", "fp32", "running dQ"),
    ("attn.dk_acc",     "kd", "bwd",  "fp32", "bf16", "fp32", "running dK"),
    ("attn.dv_acc",     "kd", "bwd",  "fp32", "bf16", "fp32", "running dV"),
    ("attn.dk_head",    "kd", "bwd",  "fp32", "fp32", "bf16", "a query head's share of dK (GQA)"),
    ("attn.dv_head",    "kd", "bwd",  "fp32", "fp32", "bf16", "a query head's share of dV (GQA)"),
    ("attn.dq",         "qd", "bwd",  "fp32", "bf16", "bf16", "dQ, returned"),
    ("attn.dk",         "kd", "bwd",  "fp32", "bf16", "bf16", "dK, returned"),
    ("attn.dv",         "kd", "bwd",  "fp32", "bf16", "bf16", "dV, returned"),
    ("embed",           "tc", "fwd",  "fp32", "fp32", "fp32", "token + position embedding"),
    ("ln.y",            "tc", "fwd",  "fp32", "fp32", "fp32", "LayerNorm's output"),
    ("ln.dx",           "tc", "bwd",  "fp32", "fp32", "fp32", "LayerNorm's input gradient"),
    ("linear.x",        "tc", "fwd",  "fp32", "bf16", "bf16", "a linear layer's input, as operand"),
    ("linear.w",        "oi", "both", "fp32", "bf16", "bf16", "its weight (and bias), as operand"),
    ("linear.y",        "tc", "fwd",  "fp32", "bf16", "bf16", "its output, after the bias"),
    ("linear.dy",       "tc", "bwd",  "fp32", "bf16", "bf16", "its output's gradient, as operand"),
    ("linear.dx",       "tc", "bwd",  "fp32", "bf16", "bf16", "its input gradient"),
    ("linear.dw",       "oi", "bwd",  "fp32", "bf16", "bf16", "its weight (and bias) gradient of a micro-batch"),
    ("gelu.y",          "tc", "fwd",  "fp32", "bf16", "bf16", "GELU's output"),
    ("gelu.dx",         "tc", "bwd",  "fp32", "bf16", "bf16", "GELU's input gradient"),
    ("residual.y",      "tc", "fwd",  "fp32", "fp32", "fp32", "the residual stream after a branch is added"),
    ("residual.dx",     "tc", "bwd",  "fp32", "fp32", "fp32", "its gradient where branch and stream join"),
    ("logits",          "tc", "fwd",  "fp32", "bf16", "bf16", "the head's result"),
    ("loss.dlogits",    "tc", "bwd",  "fp32", "bf16", "bf16", "the gradient of the logits"),
    ("grad",            "oi", "bwd",  "fp32", "fp32", "fp32", "a parameter's gradient, handed to the optimizer"),
    ("adam.m",          "oi", "bwd",  "fp32", "fp32", "fp32", "AdamW's first moment"),
    ("adam.v",          "oi", "bwd",  "fp32", "fp32", "fp32", "AdamW's second moment"),
    ("weight",          "oi", "bwd",  "fp32", "fp32", "fp32", "the stored parameter"),
    ("allreduce",       "oi", "bwd",  "fp32", "fp32", "fp32", "a gradient summed over devices"),
)}

# The number that stands for a site in stochastic rounding's counter: its place in the table above.
SITE_ID: dict[str, int] = {name: i for i, name in enumerate(SITES)}

# Sites that `algorithm = plain` merges away, beside those of the order.
PLAIN_MERGED = frozenset("attn." + s for s in (
    "dm", "alpha", "l_tile", "l_scaled", "pv", "o_scaled", "o_acc",
    "dq_tile", "dk_tile", "dv_tile", "dq_acc", "dk_acc", "dv_acc"))
FA2_MERGED = frozenset(name for name, site in SITES.items() if site.fa2 == "-")

# Sites with a value for each tile. attn.l is one of them under order = eager, where it is rounded in each.
TILED = frozenset("attn." + s for s in (
    "m", "dm", "alpha", "l_tile", "l_scaled", "pv", "o_scaled", "o_acc",
    "dq_tile", "dk_tile", "dv_tile", "dq_acc", "dk_acc", "dv_acc"))

# The layer number of what lies in no layer, so that a scope like L0/ does not reach it.
NO_LAYER = 0xFFFF

# Modules of the transformer that a site can be scoped to (nanoGPT's names).
MODULES = ("wte", "ln_1", "c_attn", "attn.c_proj", "ln_2", "c_fc", "mlp.c_proj", "ln_f", "lm_head", "attn.ln_q",
           "attn.ln_k")


@functools.cache
def merged(order: str, algorithm: str) -> frozenset[str]:
    """The sites that do not exist on their own under this order and algorithm (section 3)."""
    return (FA2_MERGED if order == "fa2" else frozenset()) | (PLAIN_MERGED if algorithm == "plain" else frozenset())
