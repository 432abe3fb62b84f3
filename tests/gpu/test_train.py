"""The model and its training on a GPU against NumPy, and the command line."""
import csv

import numpy as np
import pytest
from click.testing import CliRunner
from cuflash.cli.main import main
from cuflash.model import config, data, train
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.model.run import Run

from cuflash import kernels
from cuflash.diff import diff
from cuflash.dump import recording
from cuflash.kernel_header import device_accumulator
from cuflash.philox import Key
from cuflash.precision import Precision

from .network import ODD, assert_same

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=48, block_size=40, vocab_size=75, bias=True)
PRECISIONS = {"fp32": Precision.named("fp32"), "bf16": Precision.named("bf16"),
              "bf16-fa2": Precision.named("bf16-fa2"),
              "fp16-fa2": Precision.named("fp16-fa2"), "stream": Precision.named("bf16-stream"), "odd": ODD,
              "scoped": Precision.named("bf16-fa2").round("L1/c_fc/linear.y=fp32", "L0/H1/attn.o=fp32",
                                                          "bwd/L1/linear.dy=fp16")}


def defined(precision: Precision) -> Precision:
    """With this GPU's accumulator by name, so that a CPU gives the same bits."""
    return precision.replace(accumulator=device_accumulator(precision, kernels.capability(0)))


@pytest.mark.parametrize("fix", ["off", "on"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_first_gradients_of_every_parameter(precision, fix, seed):
    import cupy
    rng, p = np.random.default_rng(seed), defined(PRECISIONS[precision])
    params = {n: x * np.float32(5 if x.ndim > 1 else 1) for n, x in init_params(SMALL, seed).items()}
    text = rng.integers(0, SMALL.vocab_size, (3, 34))
    on_gpu = {n: cupy.asarray(x) for n, x in params.items()}
    results = []
    for model in (GPT(SMALL, params, p, fix), GPT(SMALL, on_gpu, p, fix)):
        grads, stats = {}, []
        for micro in (0, 1):
            loss, grads, rows = model.loss_and_grads(text[:, :-1], text[:, 1:],
                                                     Key(seed, 3, sample=7 + 3 * micro), grads=grads,
                                                     n_micro=2)
            stats.append(rows)
        results.append((loss, grads, stats))
    (loss, grads, stats), (got_loss, got, got_stats) = results
    assert_same(got_loss, loss, f"loss, seed {seed}")
    assert list(got) == list(grads)
    for name in grads:
        assert_same(got[name], grads[name], f"{name}, seed {seed}")
    for a, b in zip(sum(stats, []), sum(got_stats, [])):
        assert np.array_equal(a, b.get())


@pytest.mark.parametrize("precision", ["bf16", "bf16-fa2", "odd"])
def test_a_dump_of_a_pass_is_the_dump_of_the_cpu(precision, seed, tmp_path):
    """Every site of the network, and one sample's attention alone."""
    import cupy
    rng, p = np.random.default_rng(seed), defined(PRECISIONS[precision])
    params = {n: x * np.float32(5 if x.ndim > 1 else 1) for n, x in init_params(SMALL, seed).items()}
    text = rng.integers(0, SMALL.vocab_size, (3, 34))
    for name, given in (("cpu", params), ("gpu", {n: cupy.asarray(x) for n, x in params.items()})):
        model = GPT(SMALL, given, p, "on")
        for sites, options in (("all", {}), ("attn.p", {"batch": [8], "heads": [1], "rows": range(5, 9)})):
            with recording(tmp_path / f"{name} {sites}.h5", sites, **options):
                model.loss_and_grads(text[:, :-1], text[:, 1:], Key(seed, 3, sample=7))
    for sites in ("all", "attn.p"):
        found = diff(tmp_path / f"cpu {sites}.h5", tmp_path / f"gpu {sites}.h5")
        assert not [s.name for s in found.sites if s.differs] and not found.only_a and not found.only_b


@pytest.mark.parametrize("precision", ["bf16-fa2", "odd"])
def test_ten_steps(precision, monkeypatch):
    """The weights after ten steps of two micro-batches, and the losses on the way."""
    p = defined(PRECISIONS[precision])
    monkeypatch.setattr(config.TrainConfig, "resolved_precision", lambda self: p)
    trainers = [train.Trainer(config.resolve({
        "device": device, "steps": 10, "warmup_steps": 2, "batch_size": 3, "grad_accum": 2, "block_size": 32, "n_embd": 48,
        "data": "synthetic:words,size=20000", "weight_decay": 0.1}), data.load("synthetic:words,size=20000"))
        for device in ("cpu", "gpu")]
    for _ in range(10):
        cpu, gpu = (t.settled(t.step()) for t in trainers)
        assert (cpu.loss, cpu.norm, cpu.lr) == (gpu.loss, gpu.norm, gpu.lr)
        assert np.array_equal(cpu.layer_rows, gpu.layer_rows)
    for name, w in trainers[0].state.params.items():
        assert_same(trainers[1].state.params[name], w, name)
    assert trainers[0].evaluate() == trainers[1].evaluate()


def cuflash(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def rows(path) -> list[dict[str, str]]:
    with open(path / "metrics.csv", newline="") as f:
        return [{k: v for k, v in row.items() if k not in ("ms", "tokens_per_s", "mfu")} for row
                in csv.DictReader(f)]


TINY = ("--data", "synthetic:words,size=20000", "--batch-size", 4, "--warmup-steps", 3, "--log-every", 2,
        "--device", "gpu")


def test_command_line(tmp_path, monkeypatch):
    """Two runs are the same, a resumed one too, and the loss falls."""
    monkeypatch.chdir(tmp_path)
    output = cuflash("train", "--steps", 40, "--out", "a", "--checkpoint-every", 20, *TINY)
    assert "device gpu" in output.splitlines()[0]
    cuflash("train", "--steps", 40, "--out", "b", "--checkpoint-every", 20, *TINY)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    (tmp_path / "b" / "checkpoints" / "step_00000040.h5").unlink()
    cuflash("train", "--resume", "--out", "b")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    losses = [float(row["loss"]) for row in rows(tmp_path / "a")]
    assert losses[-1] < losses[0] - 0.5
    assert cuflash("sample", "a")


def test_qk_norm_and_eval(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = []
    for device in ("cpu", "gpu"):
        cuflash("train", "--steps", 6, "--out", device, *TINY[:-2], "--qk-norm", "--device", device)
        losses.append(float(rows(tmp_path / device)[-1]["loss"]))
    assert abs(losses[0] - losses[1]) < 1e-2  # products of BLAS and of cuBLAS
    lines = [cuflash("eval", "gpu", "--blocks", 4, "--device", device).splitlines()[-1] for device in ("cpu", "gpu")]
    a, b = (float(line.split()[1]) for line in lines)  # nats a token
    assert abs(a - b) < 1e-2


def test_watched_and_dumped_training_has_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out, options in (("a", ()), ("b", ("--watch", "attn.o_acc,gelu.y", "--dump-every", 4, "--dump-sites", "attn.p"))):
        cuflash("train", "--steps", 8, "--out", out, *TINY, *options)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert Run("b").dumps() == [4, 8]
    assert Run("b").dump(4).read("attn.p", layer=1).shape[0] == 4
    assert len(Run("b").layers.steps)


def test_a_loss_that_is_not_finite_stops_at_its_step_and_site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = cuflash("train", "--steps", 60, "--out", "a", "--lr", "1e9", "--min-lr", "1e9", "--precision",
                     "fp16-fa2", *TINY,
                     "--log-every", 50, code=2)
    assert "is not finite" in output or "nan" in output or "inf" in output
    assert "at site" in output and "is kept in" in output or "the weights were so already" in output
