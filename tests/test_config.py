import math
import tomllib

import pytest

from cuflash.model.config import FIELDS, PRESETS, TrainConfig, from_toml, resolve
from cuflash.model.run import to_toml


def test_every_preset_resolves_and_reads_back():
    for model in PRESETS:
        c = resolve({"model": model})
        assert all(getattr(c, name) == value for name, value in PRESETS[model].items())
        assert resolve(tomllib.loads(to_toml(c.to_dict()))) == c


def test_what_is_given_wins_over_the_preset_and_defaults_follow_it():
    c = resolve({"model": "study", "lr": 1, "steps": 70})  # TOML's whole number for a float
    assert (c.lr, c.min_lr, c.lr_decay_steps, c.n_layer) == (1.0, 0.1, 70, 6)


def test_a_models_file(tmp_path):
    path = tmp_path / "wide.toml"
    path.write_text('preset = "mini"\nn_embd = 96\nn_head = 2\nbias = true\nvocab_size = 300\n')
    c = resolve({"model": str(path), "n_head": 4})
    assert (c.n_embd, c.n_head, c.bias, c.vocab_size, c.n_layer) == (
        96,
        4,
        True,
        300,
        PRESETS["mini"]["n_layer"],
    )
    path.write_text("n_embed = 96\n")
    with pytest.raises(ValueError, match="unknown key in .*wide.toml 'n_embed': did you mean 'n_embd'"):
        resolve({"model": str(path)})
    path.write_text('preset = "nani"\n')
    with pytest.raises(ValueError, match="unknown preset in .* 'nani': did you mean 'nano'"):
        resolve({"model": str(path)})
    path.write_text("n_embd\n")
    with pytest.raises(ValueError, match="--model .*wide.toml: not valid TOML"):
        resolve({"model": str(path)})


def test_options_from_a_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('lr = 0.5\nround = ["attn=fp32"]\n')
    assert resolve(from_toml("--config", str(path))).round == ("attn=fp32",)
    path.write_text('[train]\nlr = 0.5\n[precision]\nbase = "bf16"\n')  # as a run's config.toml
    assert from_toml("--config", str(path)) == {"lr": 0.5}
    path.write_text("lrr = 0.5\n")
    with pytest.raises(ValueError, match="unknown option in .*c.toml 'lrr': did you mean 'lr'"):
        from_toml("--config", str(path))


def test_precision_takes_algorithm_then_switches_then_roundings():
    c = resolve(
        {
            "precision": "bf16",
            "algorithm": "plain",
            "set": ("delta_from=p_dp",),
            "round": ("attn=fp32", "attn.s=bf16"),
        }
    )
    p = c.resolved_precision()
    assert p.algorithm == "plain" and p.delta_from == "p_dp"
    assert (p.table()["attn.s"].format, p.table()["attn.o"].format) == ("bf16", "fp32")


def test_fix_is_recorded_by_its_own_name():
    assert resolve({"fix": "on"}).resolved_fix().startswith("capped:")


def test_user_files_are_hashed(tmp_path):
    (tmp_path / "my.py").write_text("from cuflash.fixes import Fix\nclass Mine(Fix):\n"
                                     "    def rule(self, r_m, ties):\n        return r_m + 1\n")
    name = f"{tmp_path / 'my.py'}:Mine"
    c = resolve({"fix": name})
    assert c.resolved_fix() == name
    assert list(c.user_files()) == [str(tmp_path / "my.py")] and len(*c.user_files().values()) == 64


def test_warm_up_and_cosine():
    c = resolve(
        {"lr": 1.0, "min_lr": 0.2, "warmup_steps": 4, "lr_decay_steps": 12, "steps": 20, "schedule": "cosine"}
    )
    assert [c.lr_at(s) for s in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert c.lr_at(8) == pytest.approx(0.6) and c.lr_at(12) == c.lr_at(20) == 0.2
    assert c.lr_at(6) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    c = resolve({"lr": 1.0, "warmup_steps": 4, "schedule": "constant"})
    assert c.lr_at(1) == 0.25 and c.lr_at(500) == 1.0
    assert resolve({"lr": 1.0, "warmup_steps": 0}).lr_at(1) > 0.99


@pytest.mark.parametrize("given,message", [
    ({"model": "namo"}, "unknown --model 'namo': did you mean 'nano'?"),
    ({"schedule": "cosin"}, "unknown --schedule 'cosin': did you mean 'cosine'?"),
    ({"device": "tpu"}, "unknown --device 'tpu'"),
    ({"algorithm": "flsh"}, "unknown --algorithm 'flsh': did you mean 'flash'?"),
    ({"precision": "bf61"}, "unknown precision 'bf61': did you mean"),
    ({"round": ("attn.ss=fp32",)}, "unknown site 'attn.ss': did you mean"),
    ({"round": ("attn.s=bf17",)}, "bf17"),
    ({"round": ("attn.s=bf16:rn",)}, "unknown mode 'rn'"),
    ({"set": ("delta_form=o",)}, "unknown switch 'delta_form': did you mean 'delta_from'"),
    ({"set": ("accumulator=hoper",)}, "unknown accumulator 'hoper': did you mean 'hopper'"),
    ({"fix": "caped"}, "unknown fix 'caped': did you mean 'capped'?"),
    ({"n_head": 3}, "n_head 3 does not divide n_embd"),
    ({"n_embd": 1028, "n_head": 4}, "head_dim n_embd/n_head is 257; attention takes 1 to 256"),
    ({"steps": 0}, "--steps is 0; valid: at least 1"),
    ({"batch_size": -1}, "--batch-size is -1; valid: at least 1"),
    ({"warmup_steps": -1}, "--warmup-steps is -1; valid: 0 or more"),
    ({"lr": math.nan}, "--lr is nan; valid: a finite number, 0 or more"),
    ({"lr": "fast"}, "option lr must be float, got 'fast'"),
    ({"beta2": 1.0}, "--beta2 is 1.0; valid: at least 0 and below 1"),
    ({"seed": -1}, "--seed is -1; valid: 0 to 2**64 − 1"),
    ({"steps": 1.5}, "option steps must be int, got 1.5"),
    ({"bias": 1}, "option bias must be bool, got 1"),
    ({"round": "attn=fp32"}, "option round must be"),
    ({"stepz": 1}, "unknown option 'stepz': did you mean 'steps'"),
])
def test_what_is_refused(given, message):
    with pytest.raises(ValueError) as e:
        resolve(given)
    assert message in str(e.value)


def test_what_a_resume_must_keep():
    c = resolve({})
    assert c.changed(resolve({"steps": 5, "lr_decay_steps": c.lr_decay_steps, "log_every": 1})) == []
    assert resolve({"lr": 0.1, "min_lr": c.min_lr}).changed(c) == ["lr"]
    assert set(FIELDS) == set(TrainConfig.__dataclass_fields__)
