"""GPT-2 weights in and out, beside the safetensors package and an independent forward pass of GPT-2."""
import json
import math

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from cuflash.cli.main import main
from cuflash.model import checkpoint, weights
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.model.run import Run
from cuflash.precision import Precision

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=12, block_size=8, vocab_size=256, bias=True)
TINY = ("--n-layer", "2", "--n-embd", "12", "--n-head", "2", "--block-size", "8", "--batch-size", "2",
        "--data", "synthetic:words,size=20000", "--device", "cpu")


def cuflash(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def params(config: GPTConfig = CONFIG, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in config.shapes().items()}


def hugging_face(p: dict[str, np.ndarray], x: np.ndarray, n_head: int) -> np.ndarray:
    """Logits of GPT-2 by Hugging Face's names, Conv1D: y = x·w + b. fp64, nothing of this package."""
    p = {n.removeprefix("transformer."): a.astype(np.float64) for n, a in p.items()}

    def norm(a, name):
        return ((a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5)
                * p[name + ".weight"] + p[name + ".bias"])

    def conv1d(a, name):
        return a @ p[name + ".weight"] + p[name + ".bias"]

    B, T = x.shape
    h = p["wte.weight"][x] + p["wpe.weight"][:T]
    C = h.shape[-1]
    for i in range(1 + max(int(n.split(".")[1]) for n in p if n.startswith("h."))):
        q, k, v = (conv1d(norm(h, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")[..., j * C:(j + 1) * C]
                   .reshape(B, T, n_head, -1).swapaxes(1, 2) for j in range(3))
        s = q @ k.swapaxes(-1, -2) / math.sqrt(C // n_head) + np.where(np.tri(T), 0, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        o = ((w / w.sum(-1, keepdims=True)) @ v).swapaxes(1, 2).reshape(B, T, C)
        h = h + conv1d(o, f"h.{i}.attn.c_proj")
        u = conv1d(norm(h, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = h + conv1d(u * (1 + np.vectorize(math.erf)(u / math.sqrt(2))) / 2, f"h.{i}.mlp.c_proj")
    return norm(h, "ln_f") @ p["wte.weight"].T


def test_what_is_written_is_gpt2_to_the_safetensors_package():
    p = params()
    weights.write("w.safetensors", CONFIG, p)
    theirs = load_file("w.safetensors")
    assert len(theirs) == 2 + 2 * 12 + 2 and all(a.dtype == np.float32 for a in theirs.values())
    assert theirs["transformer.h.1.attn.c_attn.weight"].shape == (12, 36)
    assert np.array_equal(theirs["transformer.h.1.mlp.c_fc.weight"], p["h.1.mlp.c_fc.weight"].T)
    assert np.array_equal(theirs["transformer.wte.weight"], p["wte"])
    x = np.random.default_rng(2).integers(0, 256, (2, 8))
    logits, _ = GPT(CONFIG, p, Precision.named("fp64")).forward(x)
    # Two fp64 programs that sum in other orders.
    assert np.allclose(logits, hugging_face(theirs, x, 2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_what_the_package_writes_is_read(prefix):
    p = params()
    theirs = {prefix + {"wte": "wte.weight", "wpe": "wpe.weight"}.get(n, n):
              np.ascontiguousarray(a.T if n.startswith("h.") and a.ndim == 2 else a) for n, a in p.items()}
    theirs |= {f"{prefix}h.{i}.attn.bias": np.tri(8, dtype=np.float32)[None, None] for i in range(2)}
    save_file(theirs | {"lm_head.weight": p["wte"].copy()}, "w.safetensors", metadata={"format": "pt"})
    (json_file := __import__("pathlib").Path("config.json")).write_text(json.dumps({"n_head": 2}))
    config, read = weights.read("w.safetensors")
    assert config == CONFIG and read.keys() == p.keys()
    assert all(np.array_equal(read[n], p[n]) and read[n].flags.c_contiguous for n in p)
    json_file.write_text("{}")
    with pytest.raises(ValueError, match="config.json: says no n_head"):
        weights.read("w.safetensors")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_weights_are_read_exactly(dtype):
    p = {n: a.astype(dtype) for n, a in params().items()}
    arrays = {{"wte": "wte.weight", "wpe": "wpe.weight"}.get(n, n): np.ascontiguousarray(
        a.T if n.startswith("h.") and a.ndim == 2 else a) for n, a in p.items()}
    from cuflash.tensor_file import write_safetensors
    write_safetensors("w.safetensors", arrays, {"n_head": "2"})
    _, read = weights.read("w.safetensors")
    assert all(a.dtype == np.float32 and np.array_equal(a, p[n].astype(np.float32)) for n, a in read.items())


def test_a_run_goes_out_and_comes_back(here):
    cuflash("train", *TINY, "--steps", 3, "--out", "a")
    assert "6,684 parameters of step 3 in w.safetensors" in cuflash("export", "a", "-o", "w.safetensors")
    exported, (state, header) = weights.read("w.safetensors")[1], checkpoint.load(Run("a").checkpoint_path(3))
    assert all(np.array_equal(state.params[n], exported[n]) for n in state.params)
    assert header.model.bias is False and not any(exported[n].any() for n in exported if n.endswith("bias"))
    for source in ("w.safetensors", "a", "a@3", "a/checkpoints/step_00000003.h5"):
        out = f"from {source}".replace("/", " ")
        text = cuflash("train", *TINY, "--steps", 2, "--init", source, "--out", out, "--keep", 0)
        begin, _ = checkpoint.load(Run(out).checkpoint_path(0))
        assert "step 2/2" in text and all(np.array_equal(begin.params[n], state.params[n]) for n in state.params)
        assert not any(m.any() for m in begin.m.values())
    end = checkpoint.load(Run(out).checkpoint_path(2))[0]
    Run(out).checkpoint_path(2).unlink()
    (here / "w.safetensors").unlink()
    cuflash("train", "--resume", "--out", out)
    again = checkpoint.load(Run(out).checkpoint_path(2))[0]
    assert all(np.array_equal(end.params[n], p) for n, p in again.params.items())


def test_a_shorter_context_takes_the_first_positions():
    weights.write("w.safetensors", CONFIG, params())
    shorter = GPTConfig(**(vars(CONFIG) | {"block_size": 5}))
    p, notes = weights.initial("w.safetensors", shorter)
    assert np.array_equal(p["wpe"], params()["wpe"][:5]) and "of the 8 positions" in notes[0]


@pytest.mark.parametrize("change,message", [
    ({"n_layer": 3}, "its n_layer is 2, that of the model here is 3"),
    ({"n_head": 3}, "its n_head is 2, that of the model here is 3"),
    ({"vocab_size": 300}, "its vocab_size is 256, that of the model here is 300"),
    ({"block_size": 9}, "has 8 positions, --block-size is 9"),
    ({"bias": False}, "has biases, as "),
    ({"qk_norm": True}, "its qk_norm is False"),
])
def test_weights_of_another_model(change, message):
    weights.write("w.safetensors", CONFIG, params())
    with pytest.raises(ValueError, match=f"--init w.safetensors: {message}"):
        weights.initial("w.safetensors", GPTConfig(**(vars(CONFIG) | change)))


def broken(change) -> None:
    weights.write("good.safetensors", CONFIG, params())
    arrays = load_file("good.safetensors")
    change(arrays)
    save_file(arrays, "w.safetensors", metadata={"n_head": "2"})


@pytest.mark.parametrize("change,message", [
    (lambda a: a.pop("transformer.h.1.ln_2.bias"), "not GPT-2's weights: it has no h.1.ln_2.bias"),
    (lambda a: a.pop("transformer.wpe.weight"), "not GPT-2's weights: they have wte.weight, wpe.weight"),
    (lambda a: a.update({"transformer.h.0.attn.rotary": np.zeros(3)}), "what is h.0.attn.rotary?"),
    (lambda a: a.update({"lm_head.weight": np.zeros((256, 12), np.float32)}), "the head of this model is tied"),
    (lambda a: a.update({"transformer.h.0.mlp.c_fc.weight": np.zeros((48, 12), np.float32)}),
     r"h.0.mlp.c_fc.weight has shape \(48, 12\); in this model it has \(12, 48\)"),
    (lambda a: a.update({"transformer.ln_f.bias": np.zeros(12)}), "ln_f.bias has dtype float64; valid: F32, F16, BF16"),
    (lambda a: a.update({"transformer.wte.weight": np.zeros(12, np.float32)}), "must have two axes"),
])
def test_files_that_are_refused(change, message):
    broken(change)
    with pytest.raises(ValueError, match=message):
        weights.read("w.safetensors")


def test_damaged_and_missing_files_name_themselves(here):
    weights.write("w.safetensors", CONFIG, params())
    whole = (here / "w.safetensors").read_bytes()
    for junk, message in ((whole[:-100], "truncated"), (b"junk" * 9, "not a safetensors"), (b"", "not a safetensors")):
        (here / "w.safetensors").write_bytes(junk)
        text = cuflash("train", *TINY, "--init", "w.safetensors", "--out", "a", code=2)
        assert message in text and not (here / "a").exists()
    assert "--init no.safetensors: no such file" in cuflash("train", *TINY, "--init", "no.safetensors", code=2)
    assert "--init no@3: no such file or run folder" in cuflash("train", *TINY, "--init", "no@3", code=2)
    save_file({"x": np.zeros(3)}, "w.safetensors")
    with pytest.raises(ValueError, match="not GPT-2's weights: .* this has x"):
        weights.read("w.safetensors")
    no_heads = {n: a for n, a in params().items()}
    weights.write_safetensors("w.safetensors", {n + ".weight" if n.startswith("w") else n: a for n, a in
                                                no_heads.items()}, {})
    with pytest.raises(ValueError, match="its number of heads is 0; it must divide the width 12"):
        weights.read("w.safetensors")


def test_export_refuses(here):
    cuflash("train", *TINY, "--steps", 1, "--out", "a", "--qk-norm")
    assert "QK-norm, which GPT-2 has not" in cuflash("export", "a", "-o", "w.safetensors", code=2)
    assert "must end in .safetensors" in cuflash("export", "a", "-o", "w.bin", code=2)
    text = cuflash("export", "a", "--step", 9, "-o", "w.safetensors", code=2)
    assert "--step 9: no such checkpoint in a; it has 1" in text
    assert not list(here.glob("w.*"))


def test_sampling_from_a_file(here):
    weights.write("w.safetensors", CONFIG, init_params(CONFIG, 1))
    assert cuflash("sample", "w.safetensors", "--prompt", "ab", "--tokens", 3).startswith("ab")
