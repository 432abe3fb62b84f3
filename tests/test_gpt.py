"""The model: finite differences, a hundred steps beside an independent program, sites and scopes."""

import math

import numpy as np
import pytest

from cuflash.adamw import adamw_update
from cuflash.grad_norm import clip_factor, grad_norm
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.philox import Key
from cuflash.precision import Precision
from cuflash.site_table import SITES

from .finite import assert_gradient

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)


def tokens(
    config: GPTConfig, seed: int, samples: int = 2, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(seed).integers(
        0, config.vocab_size, (samples, (length or config.block_size) + 1)
    )
    return text[:, :-1], text[:, 1:]


def model(precision: str | Precision = "fp64", config: GPTConfig = TINY, scale: float = 5, **options) -> GPT:
    """Initial weights made larger, so that attention and GELU are far from linear."""
    if isinstance(precision, str):
        precision = Precision.named(precision)
    params = {name: p * np.float32(scale if p.ndim > 1 else 1) for name, p in init_params(config, 1).items()}
    if config.bias:
        rng = np.random.default_rng(0)
        params |= {
            n: rng.standard_normal(p.shape).astype(np.float32) / 10
            for n, p in params.items()
            if n.endswith("bias")
        }
    return GPT(config, params, precision, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("algorithm", ["flash", "plain"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_gradient_of_every_parameter_by_finite_differences(bias, algorithm, qk_norm):
    config = GPTConfig(**(vars(TINY) | {"bias": bias, "qk_norm": qk_norm}))
    gpt = model(Precision.named("fp64").replace(algorithm=algorithm), config)
    x, y = tokens(config, seed=3, length=5)
    _, grads, _ = gpt.loss_and_grads(x, y)
    assert list(gpt.params) == list(config.shapes()) and grads.keys() == gpt.params.keys()
    for name, g in grads.items():
        assert_gradient(lambda: gpt.loss(x, y), gpt.params[name], g, entries=6)
        assert np.abs(g).max() > 1e-6, name


def test_micro_batches_add_up_to_the_batch():
    gpt = model()
    x, y = tokens(TINY, seed=4, samples=4)
    whole_loss, whole, _ = gpt.loss_and_grads(x, y)
    loss, grads = 0.0, {}
    for half in (slice(0, 2), slice(2, 4)):
        part, grads, _ = gpt.loss_and_grads(
            x[half], y[half], Key(0, sample=half.start), grads=grads, n_micro=2
        )
        loss += part / 2
    assert math.isclose(loss, whole_loss, rel_tol=1e-13)
    assert all(np.allclose(grads[n], whole[n], rtol=1e-11, atol=1e-14) for n in whole)


# ---- an independent program: plain softmax attention, einsum, fp64, none of cuflash's operations

def independent_step(
    p: dict[str, np.ndarray],
    moments: list[dict[str, np.ndarray]],
    x: np.ndarray,
    y: np.ndarray,
    step: int,
    c: GPTConfig,
    lr: float,
    decay: float,
    clip: float,
) -> float:
    """One step of training of GPT-2 with biases, in place; the loss."""
    B, T = x.shape
    H, D = c.n_head, c.n_embd // c.n_head
    erf = np.vectorize(math.erf)
    ln = {}

    def norm(a: np.ndarray, name: str) -> np.ndarray:
        mean, std = a.mean(-1, keepdims=True), np.sqrt(a.var(-1, keepdims=True) + 1e-5)
        ln[name] = (a - mean) / std, std
        return ln[name][0] * p[name + ".weight"] + p[name + ".bias"]

    def norm_back(dy: np.ndarray, name: str) -> np.ndarray:
        n, std = ln[name]
        g[name + ".weight"], g[name + ".bias"] = np.einsum("btc,btc->c", dy, n), dy.sum((0, 1))
        d = dy * p[name + ".weight"]
        return (d - d.mean(-1, keepdims=True) - n * (d * n).mean(-1, keepdims=True)) / std

    def lin(a: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("bti,oi->bto", a, p[name + ".weight"]) + p[name + ".bias"]

    def lin_back(dy: np.ndarray, a: np.ndarray, name: str) -> np.ndarray:
        g[name + ".weight"], g[name + ".bias"] = np.einsum("bto,bti->oi", dy, a), dy.sum((0, 1))
        return np.einsum("bto,oi->bti", dy, p[name + ".weight"])

    g: dict[str, np.ndarray] = {}
    h, kept = p["wte"][x] + p["wpe"][:T], []
    for i in range(c.n_layer):
        a = norm(h, f"h.{i}.ln_1")
        q, k, v = lin(a, f"h.{i}.attn.c_attn").reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)
        s = np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(D) + np.where(np.tri(T), 0, -np.inf)
        w = np.exp(s)
        w /= w.sum(-1, keepdims=True)
        o = np.einsum("bhij,bhjd->bihd", w, v).reshape(B, T, -1)
        h = h + lin(o, f"h.{i}.attn.c_proj")
        m = norm(h, f"h.{i}.ln_2")
        u = lin(m, f"h.{i}.mlp.c_fc")
        phi = (1 + erf(u / math.sqrt(2))) / 2
        h = h + lin(u * phi, f"h.{i}.mlp.c_proj")
        kept.append((a, q, k, v, w, o, m, u, phi))
    f = norm(h, "ln_f")
    prob = np.exp(f @ p["wte"].T)
    prob /= prob.sum(-1, keepdims=True)
    hot = np.eye(c.vocab_size)[y]
    loss = -np.log((prob * hot).sum(-1)).mean()

    dz = (prob - hot) / (B * T)
    g["wte"] = np.einsum("btv,btc->vc", dz, f)
    dh = norm_back(dz @ p["wte"], "ln_f")
    for i, (a, q, k, v, w, o, m, u, phi) in reversed(list(enumerate(kept))):
        du = lin_back(dh, u * phi, f"h.{i}.mlp.c_proj") * (
            phi + u * np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
        )
        dh = dh + norm_back(lin_back(du, m, f"h.{i}.mlp.c_fc"), f"h.{i}.ln_2")
        do = lin_back(dh, o, f"h.{i}.attn.c_proj").reshape(B, T, H, D).transpose(0, 2, 1, 3)
        dw = np.einsum("bhid,bhjd->bhij", do, v)
        ds = w * (dw - (dw * w).sum(-1, keepdims=True)) / math.sqrt(D)
        dqkv = np.stack([np.einsum("bhij,bhjd->bhid", ds, k), np.einsum("bhij,bhid->bhjd", ds, q),
                         np.einsum("bhij,bhid->bhjd", w, do)])
        da = lin_back(dqkv.transpose(1, 3, 0, 2, 4).reshape(B, T, -1), a, f"h.{i}.attn.c_attn")
        dh = dh + norm_back(da, f"h.{i}.ln_1")
    g["wte"] += np.einsum("btv,btc->vc", np.eye(c.vocab_size)[x], dh)
    g["wpe"] = np.zeros_like(p["wpe"])
    g["wpe"][:T] = dh.sum(0)

    total = math.sqrt(sum((d**2).sum() for d in g.values()))
    for name, d in g.items():
        d *= min(1, clip / (total + 1e-6))
        first, second = moments[0][name], moments[1][name]
        first += 0.1 * (d - first)
        second += 0.05 * (d**2 - second)
        change = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        p[name] -= lr * (change + (decay if d.ndim > 1 else 0) * p[name])
    return float(loss)


@pytest.mark.parametrize("precision,bound", [("fp64", 1e-11), ("fp32", 1e-5)])
def test_a_hundred_steps_beside_an_independent_program(precision, bound):
    """The losses agree to 1e-5 in fp32 (2^-24 in each operation, a hundred steps), to rounding in fp64."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=13, bias=True)
    gpt = model(precision, config, scale=1)
    theirs = {name: p.astype(np.float64) for name, p in gpt.params.items()}
    moments = [{name: np.zeros_like(p) for name, p in theirs.items()} for _ in range(2)]
    mine = [{name: np.zeros_like(p) for name, p in gpt.params.items()} for _ in range(2)]
    losses = []
    for step in range(1, 101):
        x, y = tokens(config, seed=step, samples=3)
        y = (x * 3 + 1) % config.vocab_size  # something to learn
        loss, grads, _ = gpt.loss_and_grads(x, y)
        norm = grad_norm(grads[n] for n in gpt.params)
        for name, w in gpt.params.items():
            adamw_update(
                w,
                grads[name],
                mine[0][name],
                mine[1][name],
                gpt.rounder(name, Key(0)),
                step=step,
                lr=3e-3,
                weight_decay=0.1 if w.ndim > 1 else 0,
                clip=clip_factor(norm, 0.5),
            )
        assert abs(loss - independent_step(theirs, moments, x, y, step, config, 3e-3, 0.1, 0.5)) < bound, step
        losses.append(loss)
    assert losses[-1] < losses[0] / 2


# ---- sites

def seen_places(gpt: GPT) -> set[tuple[str, int, str, str]]:
    """(direction, layer, module, site) of every rounding of a step."""
    places = set()

    def watch(rnd, site, x, rounded):
        places.add((rnd.direction, rnd.layer, rnd.module, site))

    gpt.watch = watch
    x, y = tokens(gpt.config, seed=5)
    _, grads, _ = gpt.loss_and_grads(x, y)
    gpt.watch = None
    return places


@pytest.mark.parametrize("precision", ["bf16", "bf16-fa2"])
def test_a_step_passes_through_every_site_of_the_table(precision):
    optimizer = {"grad", "adam.m", "adam.v", "weight"}
    gpt = model(precision)
    # GQA, several devices, and -- of attention alone -- are not in this model.
    absent = {"attn.dk_head", "attn.dv_head", "allreduce"} | gpt.precision.merged | optimizer
    assert {site for *_, site in seen_places(gpt)} | absent == set(SITES) | absent


def test_each_module_rounds_in_its_own_name():
    places = seen_places(model("bf16"))
    for direction, site, modules in (
        ("fwd", "linear.y", {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"}),
        ("bwd", "linear.dw", {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"}),
        ("fwd", "ln.y", {"ln_1", "ln_2"}),
        ("bwd", "residual.dx", {"ln_1", "ln_2"}),
        ("fwd", "residual.y", {"attn.c_proj", "mlp.c_proj"}),
        ("fwd", "gelu.y", {"c_fc"}),
    ):
        assert {m for d, layer, m, s in places if (d, layer, s) == (direction, 1, site)} == modules


def test_qk_norm_normalises_each_head_and_has_its_sites():
    config = GPTConfig(**(vars(TINY) | {"qk_norm": True}))
    gpt = model("bf16", config)
    assert config.n_params() == TINY.n_params() + 2 * 2 * 4  # layers, q and k, head_dim
    seen = []
    gpt.watch = lambda rnd, site, x, rounded: seen.append((rnd.module, site, x.shape, x))
    x, y = tokens(config, seed=5)
    gpt.loss_and_grads(x, y)
    for module in ("attn.ln_q", "attn.ln_k"):
        shown = [v for m, site, shape, v in seen if (m, site) == (module, "ln.y")]
        assert len(shown) == 2 and all(v.shape == (2, 6 * 2, 4) for v in shown)  # samples, tokens × heads, head_dim
        normal = shown[0] / gpt.params[f"h.0.{module}.weight"]
        # Mean 0, and variance 1 but for ε = 1e-5 beside a variance of about 0.01 or more.
        assert np.abs(normal.mean(-1)).max() < 1e-5 and np.abs(normal.var(-1) - 1).max() < 2e-3
        assert (module, "ln.dx", (2, 12, 4)) in [s[:3] for s in seen]
    rounded = model(Precision.named("bf16").round("attn.ln_q/ln.y=bf16:sr", "L1/attn.ln_k/ln.dx=fp16"), config)
    rounded.loss_and_grads(x, y, Key(3))


@pytest.mark.parametrize(
    "text,changes", [("L0/linear.y=fp32", {0}), ("L1/c_fc/linear.y=fp32", {1}), ("linear.y=fp32", {0, 1})]
)
def test_a_rounding_is_scoped_by_layer_and_module(text, changes):
    base = model("bf16")
    other = model(Precision.named("bf16").round(text))
    x, _ = tokens(TINY, seed=6)

    def branch_inputs(gpt: GPT) -> dict[int, np.ndarray]:
        found = {}

        def watch(rnd, site, value, rounded):
            if site == "linear.y" and rnd.module == "c_fc":
                found[rnd.layer] = bool((value != rounded).any())

        gpt.watch = watch
        gpt.forward(x)
        return found

    assert branch_inputs(base) == {0: True, 1: True}
    assert {layer for layer, rounds in branch_inputs(other).items() if not rounds} == changes


def test_a_layers_scope_does_not_reach_the_head():
    x, _ = tokens(TINY, seed=6)
    base, _ = model("bf16", scale=1).forward(x)
    scoped = Precision.named("bf16").round("L0-1/logits=fp32", "L0-1/ln.y=fp16")
    other = model(scoped, scale=1)
    heads = []
    other.watch = lambda rnd, site, v, r: (
        heads.append((rnd.layer, site, (v != r).any())) if site == "logits" else None
    )
    other.forward(x)
    assert heads[0][2] and heads[0][0] not in (0, 1)
    assert base.dtype == np.float32


def test_stochastic_rounding_does_not_depend_on_the_micro_batches():
    """The forward of sample 3 is the same bits alone or in a batch; another seed or step is not."""
    p = (
        Precision.named("bf16")
        .round("attn=bf16:sr", "linear=bf16:sr", "gelu=bf16:sr")
        .replace(accumulator="sequential")
    )
    gpt = model(p)
    x, _ = tokens(TINY, seed=7, samples=4)
    whole, _ = gpt.forward(x, Key(9, 5))
    part, _ = gpt.forward(x[3:], Key(9, 5, sample=3))
    assert np.array_equal(whole[3:], part)
    assert not np.array_equal(part, gpt.forward(x[3:], Key(9, 6, sample=3))[0])
    assert not np.array_equal(part, gpt.forward(x[3:], Key(8, 5, sample=3))[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fa2", "fp16-fa2", "bf16-stream"])
def test_low_precision_stays_near_fp64(precision):
    """Largest error of the logits against fp64, in ulps of the format."""
    x, _ = tokens(TINY, seed=8)
    exact, _ = model("fp64", scale=1).forward(x)
    logits, _ = model(precision, scale=1).forward(x)
    ulp = {"fp32": 2.0**-23, "fp16-fa2": 2.0**-10}.get(precision, 2.0**-7)
    # About 30 roundings lie between a token and its logits, each within half an ulp of a value of order 1.
    assert 0 < np.abs(logits - exact).max() < 15 * ulp * np.abs(exact).max()


# ---- shape and initialisation

def test_initialisation_is_nanogpts():
    config = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=256, bias=True)
    params = init_params(config, seed=1)
    for name, p in params.items():
        std = 0.02 / math.sqrt(8) if name.endswith("c_proj.weight") else 0.02
        if p.ndim == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all()
        else:  # standard deviation of n draws: within 5 of its standard errors, 1/√(2n)
            assert abs(p.std() / std - 1) < 5 / math.sqrt(2 * p.size), name
    assert np.array_equal(params["wte"], init_params(config, 1)["wte"])
    assert not np.array_equal(params["wte"], init_params(config, 2)["wte"])


def test_gpt2_has_its_number_of_parameters():
    config = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, bias=True)
    assert config.n_params() == 124_439_808


@pytest.mark.parametrize("change,message", [
    ({"n_head": 3}, "n_head 3 does not divide n_embd 8"),
    ({"n_embd": 514, "n_head": 2}, "head_dim n_embd/n_head is 257; attention takes 1 to 256"),
    ({"n_layer": 0}, "n_layer must be a positive integer, got 0"),
    ({"block_size": 1.5}, "block_size must be a positive integer, got 1.5"),
])
def test_shapes_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(vars(TINY) | change))
