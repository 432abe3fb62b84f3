"""The audit of a run's own attention, and the map of its errors by token and feature."""
import json

import h5py
import numpy as np
import pytest

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.audit_map import read_maps
from cuflash.dump import read, recording
from cuflash.model.passes import captures, one_pass
from cuflash.model.run import Run
from tests.test_cli import run

TINY = ("--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--block-size", "16", "--batch-size", "2",
        "--steps", "2", "--data", "synthetic:words,size=20000", "--device", "cpu", "--precision", "bf16")


@pytest.fixture(scope="module", autouse=True)
def short_samples():
    """Training ends with a sample of text; here a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuflash.model.session.SAMPLE_TOKENS", 5)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "x"
    run("train", *TINY, "--out", str(folder))
    return folder


def test_captures_are_what_attention_took(trained, tmp_path):
    p = one_pass(trained)
    found = captures(p, [1])[1]
    with recording(tmp_path / "x.h5"):
        p.run()
    d = read(tmp_path / "x.h5")
    for name in ("q", "k", "v"):
        assert np.array_equal(getattr(found, name), d.read(f"attn.{name}", layer=1).astype(np.float32))
    assert np.array_equal(found.do, d.read("attn.do", layer=1).astype(np.float32))
    again = found.run(p.model.precision)
    assert np.array_equal(again.o, d.read("attn.o", layer=1)) and np.array_equal(
        again.dq, d.read("attn.dq", layer=1))


def test_the_command(trained, tmp_path):
    out = tmp_path / "a.h5"
    text = run("audit", str(trained), "--no-cures", "-o", str(out), "--json", str(tmp_path / "a.json"),
               "--heads", "1", "--precision", "bf16", "--precision", "fp32")
    for words in ("layer 0: bf16-paper", "layer 1: fp32", "attention's inputs in step 3, 2 samples"):
        assert words in text
    data = json.loads((tmp_path / "a.json").read_text())["layers"]
    assert [d["layer"] for d in data] == [0, 1] and len(data[0]["audits"]) == 2
    maps, tokens = read_maps(out)
    assert list(maps) == [0, 1] and [m.precision
                                     for m in maps[1]] == ["bf16-paper", "fp32"] and tokens.shape == (2, 16)
    m = maps[1][0]
    assert m.heads == (1, ) and m.batch == (0, 1) and m.delta.shape == (2, 1, 16) and m.o.shape == (2, 1, 16,
                                                                                                    8)
    assert m.delta.mean() == pytest.approx(data[1]["audits"][0]["delta"]["mean"], rel=1e-12)
    # under bf16 the products dO∘O are rounded, too: half an ulp of 8 bits each
    rounding = np.abs(m.do).max() * np.abs(m.o + 1).max() * 8 * 2**-8
    assert np.abs(m.by_feature.sum(-1) - m.delta).max() < rounding
    run("audit", str(Run(trained).checkpoint_path(2)), "--data", "synthetic:words,size=20000", "--layers",
        "0", "--no-cures")


def test_errors_of_o_and_delta_against_direct_computation(trained, tmp_path):
    run("audit", str(trained), "--layers", "0", "--no-cures", "-o", str(tmp_path / "a.h5"))
    m = read_maps(tmp_path / "a.h5")[0][0][0]
    c = captures(one_pass(trained), [0])[0]
    wide = [x.astype(np.float64) for x in (c.q, c.k, c.v, c.do)]
    golden, saved = flash_attention_forward(*wide[:3], causal=True, scale=c.scale)
    flash_attention_backward(wide[3], saved)
    o, _ = flash_attention_forward(c.q, c.k, c.v, causal=True, scale=c.scale, precision="bf16")
    assert np.array_equal(m.o, o.astype(np.float64) - golden)
    assert np.array_equal(m.do, wide[3])


def test_a_step_of_a_run_and_weights(trained, tmp_path):
    assert "in step 3, 2 samples" in run("audit", f"{trained}@2", "--layers", "0", "--no-cures")
    assert "@1: no such checkpoint" in run("audit", f"{trained}@1", code=2)
    assert "--step 1: " in run("audit", f"{trained}@2", "--step", "1", code=2)
    weights = tmp_path / "w.safetensors"
    run("export", str(trained), "-o", str(weights))
    assert "name some with --data" in run("audit", str(weights), code=2)
    text = run("audit", str(weights), "--data", "synthetic:words,size=20000", "--layers", "1", "--no-cures")
    assert "in step 1, 1 samples" in text and "bf16-fa2" in text


def test_dump_of_a_step_and_of_weights(trained, tmp_path):
    out, same = tmp_path / "x.h5", tmp_path / "y.h5"
    for source, file in ((trained, out), (f"{trained}@2", same)):
        run("dump", str(source), "-o", str(file))
    assert run("diff", str(out), str(same))
    assert "@7: no such checkpoint" in run("dump", f"{trained}@7", "-o", str(out), code=2)
    assert "--step 1: " in run("dump", f"{trained}@2", "--step", "1", "-o", str(out), code=2)

    weights, data = tmp_path / "w.safetensors", "synthetic:words,size=20000"
    run("export", str(trained), "-o", str(weights))
    assert "w.safetensors is a file and no run" in run("dump", str(weights), "-o", str(out), code=2)
    assert f"--step 2: {weights} is of step 0" in run("dump", str(weights), "--step", "2", "--data", data, "-o",
                                                      str(out), code=2)
    text = run("dump", str(weights), "--data", data, "--batch-size", "2", "-o", str(out))
    assert "of step 1 under bf16-fa2" in text
    # The run's weights on the batch that its file would be given: the same bits
    p, q = one_pass(weights, data=data, batch_size=2), one_pass(trained, precision="bf16-fa2")
    q.x, q.y, q.key = p.x, p.y, p.key
    with recording(same):
        q.run()
    assert p.model.config.n_layer == 2 and p.x.shape == (2, 16)
    mine, theirs = read(out), read(same)
    assert list(mine) == list(theirs) and all(mine[n].tobytes() == theirs[n].tobytes() for n in mine)


@pytest.mark.parametrize("arguments, message", [
    (("--layers", "2"), "--layers 2: the model has layers 0 to 1"),
    (("--causal", ), "are for a file of arrays"),
    (("--step", "1"), "--step 1: no such checkpoint"),
    (("--batch", "5"), "--batch 5: the batch has samples 0 to 1"),
])
def test_mistakes(trained, arguments, message):
    assert message in " ".join(run("audit", str(trained), *arguments, code=2).split())


def test_mistakes_without_a_run(tmp_path):
    assert "name a FILE with q, k, v and do, a RUN, or --monte-carlo" in run("audit", code=2)
    np.savez(tmp_path / "x.npz", **{n: np.ones((1, 1, 4, 4), np.float32) for n in "qkv"})
    assert "--step is for a run" in run("audit", str(tmp_path / "x.npz"), "--step", "1", code=2)
    text = run("audit", str(tmp_path / "x.npz"), "-o", str(tmp_path / "o.h5"), code=2)
    (line,) = text.splitlines()  # before any work
    assert "the errors of δ need do, which " in line and not (tmp_path / "o.h5").exists()
    with h5py.File(tmp_path / "y.h5", "w") as f:
        f["x"] = np.zeros(2)
    with pytest.raises(ValueError, match="not 'cuflash audit 1'"):
        read_maps(tmp_path / "y.h5")


def test_what_cuflash_wrote_and_is_no_capture_says_what_to_do(trained, tmp_path):
    dump, errors = str(tmp_path / "d.h5"), str(tmp_path / "e.h5")
    run("dump", f"{trained}@2", "-o", dump)
    run("audit", str(trained), "--layers", "0", "--no-cures", "-o", errors)
    assert f"{dump} is a dump; audit its run: cuflash audit RUN@2" in run("audit", dump, code=2)
    assert f"cuflash plot {errors} -o errors.png draws it" in run("audit", errors, code=2)
    (tmp_path / "cut.h5").write_bytes((tmp_path / "d.h5").read_bytes()[:3000])
    assert "cut.h5 is a damaged HDF5 file" in run("audit", str(tmp_path / "cut.h5"), code=2)
