import unicodedata

import numpy as np
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.model import checkpoint
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.model.run import Run
from cuflash.model.sample import _draw, decode, encode, generate, load_model, pieces, printable
from cuflash.precision import Precision

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=256)


def model(config: GPTConfig = CONFIG) -> GPT:
    params = {name: p * np.float32(10 if p.ndim > 1 else 1) for name, p in init_params(config, 1).items()}
    return GPT(config, params, Precision.named("bf16"))


def test_text_repeats_with_its_seed_and_is_longer_than_the_context():
    one = list(generate(model(), [1, 2, 3], 20, seed=4))
    assert len(one) == 20 and one == list(generate(model(), [1, 2, 3], 20, seed=4))
    assert one != list(generate(model(), [1, 2, 3], 20, seed=5))


def test_temperature_zero_takes_the_likeliest_and_sees_the_last_block():
    gpt = model()
    (token,) = generate(gpt, [9, 9, 1, 2, 3, 4], 1, temperature=0)
    logits, _ = gpt.forward(np.array([[1, 2, 3, 4]]))
    assert token == logits[0, -1].argmax()


def test_top_k_and_temperature_shape_the_draw():
    rng = np.random.Generator(np.random.PCG64(0))
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    assert {_draw(logits, 1.0, 2, rng) for _ in range(200)} == {2, 3}
    draws = np.bincount([_draw(logits, 1.0, 0, rng) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(draws - np.exp(logits)).max() < 0.04  # 5 standard errors of 0.5/√4000
    draws = np.bincount([_draw(logits, 0.5, 0, rng) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(draws - np.exp(2 * logits) / np.exp(2 * logits).sum()).max() < 0.04
    with pytest.raises(ValueError, match="logits are not finite"):
        _draw(np.array([0.0, np.nan]), 1.0, 0, rng)


def test_prompts():
    assert encode("ab", "bytes", 256) == [97, 98] and encode("", "bytes", 256) == [10]
    assert (
        encode("5 6", "tokens", 7) == [5, 6]
        and encode("", "tokens", 50257) == [50256]
        and encode("", "tokens", 7) == [0]
    )
    assert decode([97, 255], "bytes") == "a�" and decode([5, 6], "tokens") == "5 6"
    with pytest.raises(ValueError, match="the tokens of this run are numbers, as 11 22 33"):
        encode("hello", "tokens", 7)
    with pytest.raises(ValueError, match="token 7 is outside the vocabulary of 7"):
        encode("7", "tokens", 7)


def test_pieces_are_the_text_and_come_as_the_tokens_do():
    text = "aé\u20ac😀\n".encode() + b"\xff\xc3"
    assert "".join(pieces(text, "bytes")) == decode(list(text), "bytes") == text.decode(errors="replace")

    def tokens():
        yield 97
        raise AssertionError("not needed yet")

    assert next(pieces(tokens(), "bytes")) == "a" and next(pieces(tokens(), "tokens")) == "97"


def test_control_characters_do_not_reach_a_terminal():
    every = "".join(map(chr, range(256)))
    shown = printable(every)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert printable("\x1b[2J\r\x7f\x9b a\n\té") == "\\x1b[2J\\x0d\\x7f\\x9b a\n\té"


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run.create("r", {})

    def sample(*arguments: str, code: int) -> str:
        result = CliRunner().invoke(main, ["sample", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert "has no checkpoint yet" in sample("r", code=2)
    header = checkpoint.Header(
        CONFIG, Precision.named("bf16").round("L0/attn.s=fp32").to_toml(), "capped:cap=60", 1, "", "bytes"
    )
    params = init_params(CONFIG, 1)
    for step in (3, 9):
        checkpoint.save(run.checkpoint_path(step), checkpoint.State(step, params, params, params), header)
    threads = []
    monkeypatch.setattr("cuflash.model.sample.one_thread_if_small", threads.append)
    gpt, _, step = load_model("r")
    assert threads == [CONFIG.n_embd]  # as in training: small matrices gain nothing from more
    assert (
        step == 9
        and gpt.precision == Precision.from_toml(header.precision)
        and str(gpt.fix) == "capped:beta=2,cap=60"
    )
    text = sample("r", "--prompt", "xy", "--tokens", "5", code=0)
    assert text.startswith("xy") and text == sample(
        "r/checkpoints/step_00000009.h5", "--prompt", "xy", "--tokens", "5", code=0
    )
    assert "--step 4: no such checkpoint in r; it has 3, 9" in sample("r", "--step", "4", code=2)
    assert "no such file or run folder" in sample("nowhere", code=2)
    assert "is not a run folder" in sample(".", code=2)
    assert "'--temperature'" in sample("r", "--temperature", "-1", code=2)
