"""Arms: each is a valid training that differs from low precision in what it says, and in nothing else."""
import pytest

from cuflash.model import study_arms as arms
from cuflash.model.config import resolve
from cuflash.precision import Precision

SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 32}
PRECISIONS = ("bf16", "bf16-fa2", "fp16-fa2", "all-e5m3")


def everything(precision):
    found = {a.name: a for a in arms.isolation(precision, n_layer=4, layer=1, heads=(0, 2))}
    return found, arms.cures(precision), [a for some in arms.sweeps(precision, 5e-3).values() for a in some]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_arm_is_a_training(precision):
    isolated, cures, swept = everything(precision)
    assert len({a.folder for a in (*isolated.values(), *swept)}) == len(isolated) + len(swept)
    for arm in (*isolated.values(), *cures, *swept):
        resolve(SHAPE | arm.options).resolved_precision().check_scopes(4, 4)


def sites(arm, direction="fwd", layer=1, head=0):
    return resolve(SHAPE | arm.options).resolved_precision().sites_for(direction, layer, "", head)


def test_isolation_changes_what_it_says():
    found, _, _ = everything("bf16")
    low, high = sites(found["bf16"]), sites(found[arms.ALL_FP32])
    assert {s for s in low if s.startswith("attn.") and high[s].format != "fp32"} == set()
    only, but = found["low in layer 1 only"], found["low but in layer 1"]
    assert (sites(only, layer=1), sites(only, layer=0)) == (low, high)
    assert (sites(but, layer=1), sites(but, layer=0)) == (high, low)
    o = found["O fp32 in heads 0,2"]
    assert {s for s in low if sites(o)[s] != low[s]} == {"attn.pv", "attn.o_scaled", "attn.o_acc", "attn.o"}
    assert sites(o, head=1) == sites(o, layer=0) == low
    assert {s for s in low if sites(found["Ō fp32"])[s] != low[s]} == {"attn.pv", "attn.o_scaled", "attn.o_acc"}
    for name, switch in (("delta from P∘dP", "p_dp"), ("delta from fp32 O", "o_fp32")):
        p = resolve(found[name].options).resolved_precision()
        assert p.diff(Precision.named("bf16")) == {"delta_from": (switch, "o")}
    off = resolve(found["tiling off"].options).resolved_precision()
    assert off.diff(Precision.named("bf16")) == {"tile": ("none,none", "default")}  # Ō is rounded as before
    assert off.tiles(64).forward == off.tiles(64).dq == (None, None)
    assert resolve(found["plain attention"].options).algorithm == "plain"


def test_what_the_paper_says_of_them():
    found, _, _ = everything("bf16")
    said = {name: a.paper for name, a in found.items() if a.paper}
    assert [name for name, word in said.items() if word == "fails"] == ["bf16", "tiling off", "low in layer 1 only"]
    assert len(said) == 10


def test_rows_that_change_nothing_are_left_out():
    found, cures, _ = everything("bf16-fa2")  # l, S and Ō are in fp32 there
    assert not {"l fp32", "S fp32", "Ō fp32", "bf16-fa2 "} & set(found) and "O fp32" in found
    digests = [(resolve(a.options).resolved_precision().digest, a.options.get("fix"), a.options.get("qk_norm"))
               for a in cures]
    assert len(set(digests)) == len(digests)


def test_sweeps():
    swept = arms.sweeps("bf16", 4e-3)
    assert [resolve(a.options).resolved_fix() for a in swept["beta"]][:2] == ["qiu-b7:beta=1.5,epsilon=0",
                                                                           "qiu-b7:beta=2,epsilon=0"]
    bits = resolve(swept["bits"][0].options).resolved_precision().table()
    low = Precision.named("bf16").table()
    assert {s for s in low if bits[s] != low[s]} == set(arms.short_sites("bf16")) and bits["attn.p"].format == "e8m4"
    assert {a.options["lr"] for a in swept["lr"]} == {4e-3 * f for f in arms.LR_FACTORS}
    chosen = arms.sweep("bf16", 4e-3, ["gamma"])
    assert [a.name for a in chosen[:2]] == ["bf16", arms.ALL_FP32] and len(chosen) == 2 + len(arms.GAMMAS)
    with pytest.raises(ValueError, match="unknown sweep 'betta': did you mean 'beta'"):
        arms.sweep("bf16", 4e-3, ["betta"])


def test_cures():
    own = arms.Arm.parse("mine: --fix capped:cap=60")
    found = arms.cures_of(["bf16", "bf16-fa2"], [1e-3, 2e-3], [own])
    assert len({a.name for a in found}) == len({a.folder for a in found}) == len(found)
    mine = [a for a in found if "mine" in a.name]
    assert [(a.options["precision"], a.options["lr"]) for a in mine] == [
        (p, lr) for p in ("bf16", "bf16-fa2") for lr in (1e-3, 2e-3)]
    stochastic = next(a for a in arms.cures("bf16") if a.name == "Ō, O stochastic")
    assert {str(sites(stochastic)[s]) for s in ("attn.pv", "attn.o")} == {"bf16:sr"}
    assert {a.name for a in arms.cures("bf16", short=True)} < {a.name for a in arms.cures("bf16")}


def test_cures_that_are_another_precision_or_two_things_at_once():
    found = {a.name: a for a in arms.cures("bf16")}
    assert resolve(found["bf16-fa2"].options).resolved_precision() == Precision.named("bf16-fa2")
    assert "another precision" in found["bf16-fa2"].note and found["bf16-fa2"].low == "bf16"
    both, low = found["capped, m fp32"], sites(found["bf16"])
    assert both.options["fix"] == "capped"
    assert {s for s in low if sites(both)[s] != low[s]} == {"attn.m", "attn.dm"}
    assert not {"bf16-fa2 ", "capped, m fp32"} & {a.name for a in arms.cures("bf16-fa2")}  # m is in fp32 there
    assert [a.name for a in arms.cures("bf16-fa2")].count("bf16-fa2") == 1
    several = arms.cures_of(["bf16", "bf16-fa2", "fp16-fa2"])
    assert [a.name for a in several if a.options == {"precision": "bf16-fa2"}] == ["bf16-fa2"]


def test_a_user_s_precision_with_roundings_of_its_own_in_layers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "fp32"\nround = ["L1/attn=bf16"]\n')
    found = {a.name: a for a in arms.isolation(str(path), n_layer=4, layer=1, heads=(0,))}
    low, high = sites(found["mine"]), sites(found[arms.ALL_FP32])
    assert low["attn.o"].format == "bf16" and high["attn.o"].format == "fp32"
    assert {s for s in low if sites(found["l fp32"])[s] != low[s]} == {"attn.l"}
    by_chance = next(a for a in arms.cures(str(path)) if a.name == "attn stochastic")
    assert str(sites(by_chance)["attn.o"]) == "bf16:sr" and str(sites(by_chance, layer=0)["attn.o"]) == "fp32"
    assert arms.own_places(str(path)) == ["L1/attn=bf16"] and arms.own_places("bf16") == []


def test_each_arm_has_its_own_control():
    found = arms.cures_of(["bf16", "bf16-fa2"], [1e-3, 2e-3])
    of = arms.controls(found)
    by_name = {a.name: a for a in found}
    for name, other in of.items():
        mine, control = by_name[name].options, by_name[other].options
        assert (mine["precision"], mine["lr"]) == (control["precision"], control["lr"])
        assert control["round"] == ("attn=fp32",)
    one = arms.controls(arms.cures_of(["bf16"], [1e-3, 2e-3], [arms.Arm.parse("mine: --precision fp16-fa2 --lr 1")]))
    for name in ("bf16", "bf16-fa2", "mine"):  # whatever their own options say
        assert [one[f"{name}, lr {lr}"] for lr in (0.001, 0.002)] == [f"attn fp32, lr {lr}" for lr in (0.001, 0.002)]
    swept = arms.controls(arms.sweep("bf16", 4e-3, ["lr", "beta"]))
    assert swept["bf16, lr 0.008"] == f"{arms.ALL_FP32}, lr 0.008" and swept["beta 2"] == arms.ALL_FP32
    assert arms.controls(arms.isolation("bf16", n_layer=4, layer=1, heads=(0,)))["bf16-fa2"] == arms.ALL_FP32


def test_mistakes():
    for make in (arms.base, arms.cures, lambda p: arms.sweeps(p, 1e-3)):
        for precision in ("fp32", "fp64"):
            with pytest.raises(ValueError, match=f"precision {precision} has all of attention in fp32 or fp64"):
                make(precision)
    with pytest.raises(ValueError, match="--layer 4: the model has layers 0 to 3"):
        arms.isolation("bf16", n_layer=4, layer=4, heads=(0,))
    with pytest.raises(ValueError, match="unknown precision 'bf17'"):
        arms.cures("bf17")
