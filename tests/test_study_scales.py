"""Scales: plain data that a training takes, the paper's numbers, what the user puts over them."""
import pytest

from cuflash.model.config import resolve
from cuflash.model.study_scales import MINUTES, PAPER, SCALES, cost, options_of


def test_every_scale_is_a_training():
    for name, scale in SCALES.items():
        config = resolve(options_of(name, {"data": "train.bin"}) | {"precision": "bf16"})
        assert 0 <= scale.layer < config.n_layer
        assert (config.bias, config.weight_decay, config.grad_clip) == (False, 0, 1)
        assert (config.beta1, config.beta2) == (0.9, 0.95) and max(scale.heads or (0,)) < config.n_head


def test_the_paper_s_setting():
    c = resolve(PAPER.options | {"data": "train.bin"})
    assert c.batch_size * c.grad_accum * c.block_size == 524288
    assert c.gpt().n_params() == pytest.approx(124e6, rel=0.01)
    assert c.lr_at(2000) == 1e-3 and c.lr_at(600000) == pytest.approx(1e-5) and c.lr_at(1000) == pytest.approx(5e-4)


def test_minutes_has_a_constant_rate_however_many_steps():
    c = resolve(MINUTES.options | {"steps": 7777})
    assert c.lr_at(c.warmup_steps) == c.lr_at(7777) == c.lr and c.changed(resolve(MINUTES.options)) == []


def test_options_over_a_scale():
    options = options_of("minutes", {"lr": 1e-3, "steps": 60}, ["weight-decay=0.1", "schedule=cosine"])
    assert (options["lr"], options["weight_decay"], options["lr_decay_steps"]) == (1e-3, 0.1, 60)
    for arguments, message in ((("hours", {}), "unknown --scale 'hours'"), (("paper", {}), "needs --data"),
                               (("minutes", {}, ["lrr=1"]), "did you mean 'lr'"), (("minutes", {}, ["lr"]), "option"),
                               (("minutes", {"n_head": 5}), "does not divide")):
        with pytest.raises(ValueError, match=message):
            options_of(*arguments)


def test_cost():
    c = resolve(PAPER.options | {"data": "train.bin"})
    text = "\n".join(cost(c, 1000, 10))
    assert "20,000 steps of 524,288 tokens: 1.05e+10 tokens" in text and "5.6 h a run, 56 h for the 10 runs" in text
    assert f"{c.gpt().flops_per_token() * 524288 * 20000:.3g} FLOP" in text
