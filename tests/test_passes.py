"""The pass that training would do next, bit for bit: micro-batches, loss scale, fewer samples."""
import numpy as np
import pytest

from cuflash.dump import read
from cuflash.model.passes import captures, one_pass
from cuflash.model.run import Run
from cuflash.watching import wants
from tests.test_cli import run

TINY = ("--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-size", "3", "--data",
        "synthetic:words,size=20000", "--device", "cpu", "--checkpoint-every", "1", "--steps", "2", "--dump-every",
        "1", "--dump-sites", "attn,loss.dlogits,linear.dw")
RUNS = {
    "plain": ("--precision", "bf16"),
    "micro-batches": ("--precision", "bf16", "--grad-accum", "3"),
    "scaled": ("--precision", "fp16-fa2", "--loss-scale", "1024"),
    "scaled by itself": ("--precision", "fp16-fa2", "--loss-scale", "dynamic"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuflash.model.session.SAMPLE_TOKENS", 5)
        folder, made = tmp_path_factory.mktemp("runs"), {}

        def make(name):
            if name not in made:
                made[name] = folder / name
                run("train", *TINY, *RUNS[name], "--set", "accumulator=sequential", "--out", str(made[name]))
            return made[name]
        yield make


@pytest.mark.parametrize("name", RUNS)
def test_a_dump_of_the_next_pass_is_training_s(name, trained, tmp_path):
    folder = trained(name)
    run("dump", f"{folder}@1", "--sites", "attn,loss.dlogits,linear.dw", "-o", str(tmp_path / "x.h5"))
    assert "the same bits" in run("diff", str(Run(folder).dump_path(2)), str(tmp_path / "x.h5"))


@pytest.mark.parametrize("name, samples", [("plain", (0, 1)), ("micro-batches", (1, 4, 7))])
def test_fewer_samples_are_those_of_the_whole_step(name, samples, trained, tmp_path):
    folder, numbers = trained(name), ",".join(map(str, samples))
    run("dump", f"{folder}@1", "--sites", "attn,loss.dlogits", "--batch", numbers, "-o", str(tmp_path / "x.h5"))
    whole, some = read(Run(folder).dump_path(2)), read(tmp_path / "x.h5")
    for e in some.entries:
        assert e.samples == samples and np.array_equal(some[e.name], whole[e.name][list(samples)]), e.name


def test_the_loss_is_the_mean_over_micro_batches(trained):
    p, q = one_pass(trained("micro-batches"), step=1), one_pass(trained("micro-batches"), step=1, batch_size=9)
    assert p.x.shape == (9, 16) and np.array_equal(p.x, q.x) and (p.micro, q.micro) == (3, 9)
    (loss, grads), (at_once, same) = p.run(), q.run()
    assert loss == pytest.approx(at_once, rel=1e-6)  # fp32 sums in another order
    for name, g in grads.items():  # each micro-batch is rounded to bf16 by itself
        assert np.abs(g - same[name]).max() <= 2.0**-7 * np.abs(g).max(), name


def test_captures_ask_for_what_they_keep_and_stay_where_the_pass_was(trained):
    p, asked = one_pass(trained("micro-batches"), step=1), []
    calculate = p.run

    def on_a_gpu():
        asked.extend((d, s) for d, s in (("fwd", "attn.q"), ("fwd", "attn.p"), ("bwd", "attn.do"), ("bwd", "attn.q"))
                     for layer in (0, 1) if wants(p.model.watch, d, layer, "", s, 0))
        calculate()
        p.model.gpu = True
    assert captures(p, [1])[1].device == "cpu"
    p.run = on_a_gpu
    found = captures(p, [1])[1]
    assert found.device == "gpu" and found.q.shape == (9, 2, 16, 8)
    assert asked == [("fwd", "attn.q"), ("bwd", "attn.do")]
