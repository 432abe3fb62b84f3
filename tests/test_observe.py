"""Training that is watched and dumped: the same losses, whole files, a notebook's view of them."""
import contextlib
import os

import numpy as np
import pytest

import cuflash
from cuflash.dump import read, recording
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.model.layers import Layers, spectral_norm, spectral_norms
from cuflash.model.observe import Observer
from cuflash.model.run import Run
from cuflash.precision import Precision
from cuflash.site_table import SITES
from cuflash.watching import wants
from tests.test_cli import run

TINY = ("--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-size", "2",
        "--grad-accum", "2", "--data", "synthetic:words,size=20000", "--device", "cpu", "--log-every", "2")


@pytest.fixture(scope="module", autouse=True)
def short_samples():
    """Training ends with a sample of text; here a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuflash.model.session.SAMPLE_TOKENS", 5)
        yield


def losses(folder):
    return [row["loss"] for row in Run(folder).metrics]


def params(folder, step):
    from cuflash.model import checkpoint
    return checkpoint.load(Run(folder).checkpoint_path(step))[0].params


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "watched"
    text = run("train", *TINY, "--steps", "6", "--precision", "bf16", "--out", str(folder),
               "--checkpoint-every", "3", "--watch", "attn,linear.y", "--dump-every", "3", "--dump-sites",
               "all")
    return folder, text


def test_losses_and_weights_are_those_of_a_run_that_nobody_watches(watched, tmp_path):
    folder, text = watched
    run("train", *TINY, "--steps", "6", "--precision", "bf16", "--out", str(tmp_path / "plain"),
        "--checkpoint-every", "3")
    assert losses(folder) == losses(tmp_path / "plain")
    a, b = params(folder, 6), params(tmp_path / "plain", 6)
    assert all(np.array_equal(a[n], b[n]) for n in a)
    assert text.count("biased: ") == 3
    assert not (tmp_path / "plain/dumps").exists()


def test_a_notebooks_view(watched):
    folder, _ = watched
    r = cuflash.Run(folder)
    assert [row["step"] for row in r.metrics] == [2, 4, 6] and r.dumps() == [3, 6]
    p = r.dump(3).read("attn.p", layer=1)
    assert p.shape == (4, 2, 16, 16) and p.dtype.name == "bfloat16"  # two micro-batches of two
    assert r.dump(6).attributes["step"] == 6 and r.dump(6).attributes["fix"] == "off"
    assert r.layers.steps.tolist() == [2, 4, 6]
    assert r.layers["sites/fwd/L01/attn.pv/mean"].shape == (3, 2)
    assert r.layers["sites/fwd/L01/attn.pv/count"][0, 0] == 2 * 4 * 16 * 8  # steps, samples, tokens, head_dim
    assert r.layers["sites/fwd/L00/c_fc/linear.y/changed"].shape == (3, 1)
    with pytest.raises(ValueError, match="has no dump of step 4; it has 3, 6: cuflash train --dump-every"):
        r.dump(4)
    with pytest.raises(ValueError, match="unknown series 'spectral/L01/qq': did you mean 'spectral/L01/q'"):
        r.layers["spectral/L01/qq"]


def test_dumped_weights_are_those_of_the_checkpoint(watched):
    folder, _ = watched
    d, p = read(Run(folder).dump_path(3)), params(folder, 3)
    for name, place in (("h.1.mlp.c_fc.weight", "L01/c_fc"), ("wte", "wte"), ("h.0.ln_1.weight", "L00/ln_1")):
        assert np.array_equal(d[f"bwd/{place}/weight"], p[name])


def test_cuflash_dump_of_a_checkpoint_is_the_dump_of_the_step_after_it(watched, tmp_path):
    """Step 6's dump has weights of step 5; so a run whose checkpoints lie one step before its dumps."""
    folder = tmp_path / "run"
    run("train", *TINY[:10], "--data", "synthetic:words,size=20000", "--device", "cpu", "--steps", "4",
        "--out", str(folder), "--checkpoint-every", "3", "--dump-every", "4", "--dump-sites", "attn,gelu.y",
        "--precision", "bf16-fa2")
    text = run("dump", str(folder), "--step", "3", "--sites", "attn,gelu.y", "-o", str(tmp_path / "x.h5"))
    assert "sites of step 4 under bf16-fa2" in text
    assert "the same bits" in run("diff", str(Run(folder).dump_path(4)), str(tmp_path / "x.h5"))
    run("dump", str(Run(folder).checkpoint_path(3)), "--data", "synthetic:words,size=20000", "--batch-size",
        "2", "--sites", "attn", "--layers", "1", "--heads", "0", "--batch", "1", "--rows", "3-5", "-o",
        str(tmp_path / "y.h5"))
    whole, part = read(tmp_path / "x.h5").read("attn.p", layer=1), read(tmp_path / "y.h5").read("attn.p")
    assert np.array_equal(part, whole[1:2, :1, 3:6])
    run("dump", str(folder), "--step", "3", "--precision", "fp32", "-o", str(tmp_path / "z.h5"))
    assert "first difference: fwd/L00/attn.q" in run("diff", str(tmp_path / "x.h5"), str(tmp_path / "z.h5"),
                                                     code=1)
    assert "weights at step 4" in run("diff", str(folder), str(folder))


def test_a_watched_step_asks_for_what_it_keeps(tmp_path):
    """On a GPU the rest would be brought to the host."""
    from types import SimpleNamespace
    model = SimpleNamespace(fix="off", watch=None)
    config = SimpleNamespace(watch="attn.pv", dump_every=2, dump_sites="bwd/attn.dq")
    trainer = SimpleNamespace(config=config, model=model, data=SimpleNamespace(sha256=""))
    observer = Observer(trainer, SimpleNamespace(path=tmp_path, dump_path=lambda step: tmp_path / "x.h5"), ValueError,
                        resumed=False)
    asked = []
    for step in (1, 2):
        with contextlib.suppress(ValueError), observer.step(step):  # nothing was recorded
            asked.append([(d, s) for s in SITES for d in ("fwd", "bwd") if wants(model.watch, d, 0, "", s, 0)])
    lengths = [(d, s) for s in ("attn.q", "attn.k") for d in ("fwd", "bwd")]
    assert asked[0] == [("fwd", "attn.pv"), ("bwd", "attn.pv")]
    assert asked[1] == [*lengths, *asked[0], ("bwd", "attn.dq")]


@pytest.mark.parametrize("arguments, message", [
    (("--layers", "2"), "--layers 2: the model has layers 0 to 1"),
    (("--heads", "1-3"), "--heads 2, 3: the model has heads 0 to 1"),
    (("--batch", "4"), "--batch 4: the batch has samples 0 to 3"),
    (("--rows", "5-3"), "a range goes up"),
    (("--sites", "atn"), "unknown site 'atn': did you mean 'attn"),
    (("--step", "7"), "--step 7: no such checkpoint"),
    (("--precision", "bf16-fa2", "--sites", "attn.pv"),
     "site attn.pv does not exist on its own under order=fa2"),
    (("--data", "/nowhere"), "--data /nowhere: no such file or folder"),
])
def test_mistakes_of_dump(watched, tmp_path, arguments, message):
    folder, _ = watched
    text = " ".join(run("dump", str(folder), "-o", str(tmp_path / "x.h5"), *arguments, code=2).split())
    assert message in text and "Traceback" not in text and os.listdir(tmp_path) == []


def test_a_checkpoint_file_needs_data(watched, tmp_path):
    text = run("dump", str(Run(watched[0]).checkpoint_path(3)), "-o", str(tmp_path / "x.h5"), code=2)
    assert "name some with --data" in " ".join(text.split())


def test_mistakes_of_train(tmp_path):
    for arguments, message in ((("--watch", "attn.pp"), "unknown site 'attn.pp'"),
                               (("--dump-every", "-1"), "--dump-every is -1"), (("--precision", "bf16-fa2",
                                                                                 "--watch", "attn.pv"),
                                                                                "does not exist on its own")):
        text = " ".join(run("train", *TINY, "--out", str(tmp_path / "x"), *arguments, code=2).split())
        assert message in text and os.listdir(tmp_path) == []


def test_resume_goes_on_with_layers(watched, tmp_path):
    arguments = (*TINY, "--precision", "bf16", "--watch", "attn", "--checkpoint-every", "3", "--out")
    run("train", *arguments, str(tmp_path / "two"), "--steps", "3")
    run("train", *arguments, str(tmp_path / "two"), "--steps", "6", "--resume")
    found, whole = Run(tmp_path / "two").layers, Run(watched[0]).layers
    assert found.steps.tolist() == [2, 3, 4, 6]
    assert np.array_equal(found["spectral/L00/q"][[0, 2, 3]], whole["spectral/L00/q"])
    assert np.array_equal(found["sites/fwd/L00/attn.s/mean"][3], whole["sites/fwd/L00/attn.s/mean"][2])
    assert Layers.load(tmp_path / "two/layers.h5", after=3).steps.tolist() == [2, 3]


@pytest.mark.parametrize("every, steps", [("4", [4, 7]), ("0", [])])
def test_spectral_norms_have_their_own_steps(tmp_path, every, steps):
    folder = tmp_path / "x"
    run("train", *TINY, "--steps", "7", "--spectral-every", every, "--out", str(folder))
    assert Run(folder).layers.steps.tolist() == steps
    if steps:
        assert np.isfinite(Run(folder).layers["spectral/L01/q_heads"]).all()


def test_layers_are_written_before_the_checkpoint_that_a_resume_starts_from(tmp_path, monkeypatch):
    """A kill between the two leaves layers.h5 ahead, of which the steps after the checkpoint are left out."""
    from cuflash.model import checkpoint
    folder, save, seen = tmp_path / "x", checkpoint.save, []

    def look(path, state, header):
        seen.append((state.step, int(Run(folder).layers.steps[-1])))
        save(path, state, header)

    monkeypatch.setattr(checkpoint, "save", look)
    run("train", *TINY, "--steps", "6", "--checkpoint-every", "2", "--out", str(folder))
    assert seen == [(2, 2), (4, 4), (6, 6)]


def test_the_dump_of_a_step_that_fails_is_kept(tmp_path):
    folder = tmp_path / "x"
    text = run("train", *TINY, "--steps", "9", "--out", str(folder), "--precision", "all-fp16", "--lr", "1e4",
               "--warmup-steps", "0", "--grad-clip", "0", "--dump-every", "1", code=2)
    step = Run(folder).dumps()[-1]
    assert f"step {step}: " in text
    site = text.split("appeared at site ")[1].split(";")[0]
    d = read(Run(folder).dump_path(step))
    if "attn." in site:
        direction, layer, name = site.split("/")
        assert not np.isfinite(d.read(name, direction=direction, layer=int(layer[1:])).astype(
            np.float32)).all()
    assert d.attributes["step"] == step and len(d) > 40


def test_a_recording_around_a_step_that_fails_hides_no_error(tmp_path):
    from cuflash.model.config import resolve
    from cuflash.model.data import load
    from cuflash.model.train import NonFinite, Trainer
    config = resolve({"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_size": 1, "device": "cpu",
                      "data": "synthetic:words,size=20000"})
    trainer = Trainer(config, load(config.data))
    trainer.state.params["h.0.mlp.c_fc.weight"][0, 0] = np.nan
    with pytest.raises(NonFinite, match="step 1: loss is nan; the first .* at site fwd/L0/c_fc/linear.w"):
        with recording(tmp_path / "x.h5"):
            trainer.step()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_at_a_dump_keeps_the_run(tmp_path, monkeypatch):
    from cuflash import hdf5
    writes = []

    def full(self, data):
        writes.append(len(data))
        if len(writes) > 40:
            self.error = self.error or OSError(28, "No space left on device")
        return len(data)
    monkeypatch.setattr(hdf5.Sink, "write", full)
    text = run("train", *TINY, "--steps", "4", "--out", str(tmp_path / "x"), "--checkpoint-every", "1",
               "--dump-every", "3", code=2)
    assert "step_00000003.h5: No space left on device" in " ".join(text.split()) and "--resume" in text
    assert os.listdir(tmp_path / "x/dumps") == []
    assert [s for s, _ in Run(tmp_path / "x").checkpoints()] == [1, 2]


def test_spectral_norms_against_svd():
    rng = np.random.default_rng(41)
    for shape in ((40, 60), (60, 40), (8, 8)):
        low_rank = rng.standard_normal((shape[0], 1)) @ rng.standard_normal((1, shape[1]))
        w = (rng.standard_normal(shape) + low_rank).astype(np.float32)
        # from below; a weight whose two largest singular values are close may be 1 % off
        exact = np.linalg.norm(w, 2)
        found = spectral_norm(np.stack([w, 2 * w]))
        assert 0.99 * exact < found[0] <= exact * (1 + 1e-5) and found[1] == 2 * found[0]
    assert spectral_norm(np.zeros((1, 3, 4), np.float32)) == 0
    assert np.isnan(spectral_norm(np.full((1, 3, 4), np.nan, np.float32)))
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8)
    model = GPT(config, init_params(config, 1), Precision.named("fp32"))
    found = spectral_norms(model)
    q = model.params["h.1.attn.c_attn.weight"][:16]
    assert found["spectral/L01/q"] == pytest.approx(np.linalg.norm(q, 2), rel=0.01)
    assert found["spectral/L01/q_heads"] == pytest.approx(
        [np.linalg.norm(q[:8], 2), np.linalg.norm(q[8:], 2)], rel=0.01)
