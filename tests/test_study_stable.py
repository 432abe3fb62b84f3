"""Trainings in pairs: what is trained, what survives an interruption, what is compared."""
import shutil

import numpy as np
import pytest

from cuflash.deviation import read_activations
from cuflash.model import checkpoint
from cuflash.model.config import resolve
from cuflash.model.run import Run
from cuflash.model.study_stable import (
    KINDS,
    PRECISIONS,
    Arm,
    Pair,
    arms,
    compare,
    dump_activations,
    pairs,
    train_arms,
)

TINY = {
    "data": "synthetic:words,seed=1,size=20000",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 32,
    "batch_size": 2,
    "steps": 4,
    "warmup_steps": 1,
    "log_every": 2,
    "device": "cpu"
}
ARMS = [
    Arm("bf16-flash-1", {
        "precision": "bf16-fa2",
        "algorithm": "flash",
        "seed": 1,
        "set": ("tile=16,16", )
    }),
    Arm("bf16-plain-1", {
        "precision": "bf16-fa2",
        "algorithm": "plain",
        "seed": 1
    })
]
PAIR = Pair(KINDS[0], "bf16", 1, "bf16-flash-1", "bf16-plain-1")


def quiet(text):
    pass


def params(folder, step):
    return checkpoint.load(Run(folder).checkpoint_path(step), optimizer=False)[0].params


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return folder, train_arms(folder, TINY, ARMS, every=2, say=quiet)


def test_arms_are_what_the_pairs_need():
    chosen = pairs((3, 8))
    found = {arm.name: resolve(TINY | arm.options) for arm in arms(chosen, 32)}
    assert set(found) == {name
                          for p in chosen
                          for name in (p.a, p.b)} and {p.kind
                                                       for p in chosen} == set(KINDS)
    assert all(found[p.a].data_seed == found[p.b].data_seed for p in chosen)
    for p in chosen:
        a, b = found[p.a], found[p.b]
        differs = {n for n in ("seed", "algorithm", "precision") if getattr(a, n) != getattr(b, n)}
        assert differs == {KINDS[0]: {"algorithm"}, KINDS[1]: {"seed"}, KINDS[2]: {"precision"}}[p.kind]
    assert found["fp16-flash-3"].resolved_precision().tiles(16).forward == (32, 32)
    assert [found[f"{p}-flash-3"].loss_scale for p in ("fp16", "fp16-unscaled")] == ["dynamic", "1"]


def test_one_seed_is_no_pair():
    with pytest.raises(ValueError, match="seeds 3 and 3 are the same"):
        pairs((3, 3))


def test_per_tile_has_the_network_s_roundings_of_bf16():
    tile, fa2 = (resolve(TINY | PRECISIONS[p]).resolved_precision().table()
                 for p in ("bf16-per-tile", "bf16"))
    assert {s: r for s, r in tile.items() if not s.startswith("attn.")} == {
        s: r for s, r in fa2.items() if not s.startswith("attn.")}
    assert {r.format for s, r in tile.items() if s.startswith("attn.")} == {"bf16"}


def test_drift_against_direct_computation(study):
    folder, trained = study
    assert [t.step for t in trained] == [4, 4] and not any(t.stopped
                                                           for t in trained) and trained[0].seconds > 0
    found = compare(folder, [PAIR])
    assert sorted({d.step for d in found}) == [0, 2, 4]
    assert all(d.equal == 1 and d.wasserstein == 0 for d in found if d.step == 0)
    a, b = (params(folder / name, 4) for name in (PAIR.a, PAIR.b))
    last = {d.name: d for d in found if d.step == 4}
    assert set(last) == {*a, "h.0", "all"}
    layer = [n for n in a if n.startswith("h.0.")]
    for name, chosen in (("all", list(a)), ("h.0", layer), ("wte", ["wte"])):
        x, y = (np.concatenate([w[n].ravel() for n in chosen]).astype(np.float64) for w in (a, b))
        # sums of fp64 numbers in another order
        assert last[name].wasserstein == pytest.approx(np.abs(np.sort(x) - np.sort(y)).mean(), rel=1e-9)
        assert last[name].size == pytest.approx(np.abs(x).mean(),
                                                rel=1e-12) and last[name].max_abs == np.abs(x - y).max() > 0
        assert last[name].relative == last[name].wasserstein / last[name].size


def test_an_interrupted_arm_goes_on_bit_for_bit(study, tmp_path):
    folder, _ = study
    shutil.copytree(folder, tmp_path / "again")
    again = tmp_path / "again"
    Run(again / "bf16-flash-1").checkpoint_path(4).unlink()
    kept = Run(again / "bf16-plain-1").checkpoint_path(4).stat().st_mtime_ns
    train_arms(again, TINY, ARMS, every=2, say=quiet)
    assert Run(again / "bf16-plain-1").checkpoint_path(4).stat().st_mtime_ns == kept
    a, b = (params(f / "bf16-flash-1", 4) for f in (folder, again))
    assert all((a[n] == b[n]).all() for n in a)


def test_a_folder_of_other_options_is_refused(study):
    folder, _ = study
    with pytest.raises(ValueError, match="bf16-flash-1 is of another study: .*lr.* differ"):
        train_arms(folder, TINY | {"lr": 0.5}, ARMS, every=2, say=quiet)


def test_a_training_that_fails_is_kept_as_far_as_it_came(tmp_path):
    # weights of 1e4 give linear layers results above 65504, fp16's largest number
    arm = Arm("fp16-flash-1", {"precision": "fp16-fa2", "algorithm": "flash", "seed": 1, "loss_scale": "1"})
    found, = train_arms(tmp_path, TINY | {"lr": 1e4, "steps": 3, "grad_clip": 0.0}, [arm], every=1, say=quiet)
    assert "the first value that is not finite appeared at site" in found.stopped and found.step < 3
    assert Run(tmp_path / arm.name).checkpoints()[-1][0] == found.step


def test_activations_of_a_run(study, tmp_path):
    folder, _ = study
    found = dump_activations(folder / "bf16-flash-1", tmp_path / "a.h5")
    read = read_activations(tmp_path / "a.h5")
    assert read.q.shape == (4, 32, 8) and read.causal
    assert found == {"the trainings' data": Run(folder / "bf16-flash-1").config["data"]["sha256"]}
