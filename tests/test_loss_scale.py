import numpy as np
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.model import checkpoint, config, data, loss_scale, train
from cuflash.model.loss_scale import LossScale
from cuflash.model.run import Run

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 2, "warmup_steps": 2,
        "data": "synthetic:words,size=20000", "device": "cpu"}


def trainer(**options) -> train.Trainer:
    c = config.resolve(TINY | options)
    return train.Trainer(c, data.load(c.data))


def trained(steps: int = 4, **options) -> dict[str, np.ndarray]:
    t = trainer(**options)
    for _ in range(steps):
        t.step()
    return t.state.params


def test_grows_and_shrinks_by_two(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    scale = LossScale(8.0)
    for expected in (8, 8, 16, 16):
        scale.grown()
        assert scale.value == expected
    assert scale.halved() and scale == LossScale(8.0, 0, 1)
    assert all(scale.halved() for _ in range(3)) and not scale.halved()
    assert scale == LossScale(1.0, 0, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_scale_changes_no_bits_where_nothing_overflows(precision):
    """Powers of two are exact in fp32 and bf16, whose exponents reach far enough."""
    plain, scaled = (trained(precision=precision, loss_scale=s, grad_accum=2) for s in ("1", "4096"))
    assert all(np.array_equal(plain[n], scaled[n]) for n in plain)


def test_a_scale_keeps_small_gradients_of_fp16():
    """Gradients of many tokens are small: unscaled, fp16 loses more of them to zero."""
    def zeros(scale: str) -> int:
        t = trainer(precision="fp16-fa2", loss_scale=scale, batch_size=16)
        _, grads, _ = t._gradients()
        return sum(np.count_nonzero(g == 0) for name, g in grads.items() if name != "wte")
    assert zeros("4096") < zeros("1")


def test_an_overflow_skips_the_step_and_the_optimizers_count(monkeypatch):
    t, reference = trainer(precision="fp16-fa2"), trainer(precision="fp16-fa2")
    assert t.dynamic
    t.state.scale = LossScale(2.0**40)
    before = {n: p.copy() for n, p in t.state.params.items()}
    result = t.step()
    assert result.skipped and t.state.step == 1 and t.state.scale == LossScale(2.0**39, 0, 1)
    assert all(np.array_equal(p, before[n]) for n, p in t.state.params.items())
    while t.step().skipped:
        pass
    skipped = t.state.scale.skipped
    assert skipped == t.state.step - 1 > 5
    # The first update is AdamW's first, on the batch and at the rate of its own step.
    reference.state.step, reference.state.scale = skipped, LossScale(t.state.scale.value, 0, skipped)
    reference.step()
    assert all(np.array_equal(p, reference.state.params[n]) for n, p in t.state.params.items())
    assert t.state.scale.since == 1


def test_a_fixed_scale_and_a_loss_that_is_not_finite_stop():
    with pytest.raises(train.NonFinite, match="step 1: gradient norm is .* at site bwd/"):
        trainer(precision="fp16-fa2", loss_scale=str(2**31)).step()
    t = trainer(precision="fp16-fa2")
    t.state.params["wpe"][0] = np.nan
    with pytest.raises(train.NonFinite, match="step 1: loss is nan; .* at site fwd/wte/embed"):
        t.step()
    assert t.state.scale == LossScale()


def test_fp16_is_dynamic_by_default():
    assert config.resolve({"precision": "fp16-fa2"}).loss_scale == "dynamic"
    assert config.resolve({"precision": "bf16"}).loss_scale == "1"
    assert config.resolve({"precision": "fp16-fa2", "loss_scale": "64"}).loss_scale == "64"


@pytest.mark.parametrize("text", ["3", "0.5", "dynamc", "nan", "inf", "-2", str(2**32)])
def test_scales_that_are_refused(text):
    with pytest.raises(ValueError, match=f"--loss-scale is '{text}'; valid: dynamic, or a power of two from 1"):
        config.resolve({"loss_scale": text})


def test_a_run_logs_skips_and_resumes_with_its_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**40)
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0**40, 0, 0))
    flags = [f for name, value in TINY.items() for f in (f"--{name.replace('_', '-')}", str(value))]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["train", *flags, "--precision", "fp16-fa2", "--log-every", "1", *arguments])
        assert result.exit_code == 0, result.output
        return result.output
    text = run("--steps", "40", "--checkpoint-every", "20", "--keep", "0", "--out", "a")
    assert "step 1/40 | skipped: gradients overflow at loss scale 1.09951e+12, now 5.49756e+11" in text
    rows = Run("a").metrics
    assert rows[0]["skipped"] == 1 and rows[0]["loss_scale"] == 2.0**40 and np.isnan(rows[0]["norm_z"])
    assert rows[-1]["skipped"] == text.count("skipped: ") > 5 and np.isfinite(rows[-1]["norm_z"])
    assert f"| scale {rows[-1]['loss_scale']:g}" in text
    final, _ = checkpoint.load(Run("a").checkpoint_path(40))
    assert final.scale.skipped == rows[-1]["skipped"]
    Run("a").checkpoint_path(40).unlink()
    run("--steps", "40", "--resume", "--out", "a")
    again, _ = checkpoint.load(Run("a").checkpoint_path(40))
    assert again.scale == final.scale
    assert all(np.array_equal(p, again.params[n]) for n, p in final.params.items())
