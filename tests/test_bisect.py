"""Delta debugging against rules whose minimal sets are known; what a set is as roundings; verdicts on disk."""
import itertools
import json

import pytest

from cuflash.model.bisect import FAILING, SAVING, Bisection, Subset, Undecided, ddmin
from cuflash.model.study_arms import short_sites
from cuflash.model.trials import Tally
from cuflash.model.verdict import Criterion
from cuflash.precision import Precision

LOW = Precision.named("bf16")
SITES = short_sites(LOW)


def passing(*sets):
    """A test that a subset passes which contains one of these sets."""
    asked = []

    def test(items):
        asked.append(tuple(items))
        return any(set(s) <= set(items) for s in sets)
    return test, asked


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(range(8), n)])
def test_ddmin_finds_what_is_needed(wanted):
    test, _ = passing(wanted)
    assert sorted(ddmin(test, range(8))) == list(wanted)


def test_ddmin_of_several_causes_leaves_nothing_out_that_could_go():
    sets = [(0, 5), (1, 2, 3), (4, 6)]
    test, asked = passing(*sets)
    found = ddmin(test, range(8))
    assert test(found) and not any(test([x for x in found if x != y]) for y in found)
    assert len(asked) < 2**5
    assert ddmin(passing((0, 1, 2))[0], [0, 1, 2]) == [0, 1, 2] and ddmin(passing((7,))[0], [7]) == [7]


# ---- sets as roundings --------------------------------------------------------------------------------

def at(subset, layer, head):
    return LOW.round(*subset.rounds(LOW)).sites_for("fwd", layer, "", head)


def low_ones(subset, layer, head):
    return {s for s in SITES if at(subset, layer, head)[s] == LOW.table()[s]}


def test_sets_as_roundings():
    high = LOW.round("attn=fp32").table()
    whole = Subset(FAILING, ("attn.o", "attn.l"))
    for layer, head in ((0, 0), (3, 1)):
        assert low_ones(whole, layer, head) == {"attn.o", "attn.l"}
    some = Subset(FAILING, ("attn.o",), None, ((1, 0), (1, 2), (2, 1)))
    for layer, head in itertools.product(range(3), range(3)):
        expected = {"attn.o"} if (layer, head) in some.places else set()
        assert low_ones(some, layer, head) == expected
        assert at(some, layer, head)["attn.p"] == high["attn.p"]
    saving = Subset(SAVING, ("attn.o",), (1,))
    assert set(SITES) - low_ones(saving, 1, 0) == {"attn.o"} and low_ones(saving, 0, 0) == set(SITES)
    assert str(some) == "attn.o in L1 H0,2 and L2 H1" and str(saving) == "attn.o in L1"
    assert "28 sites" in str(Subset(SAVING, tuple(SITES))) and len(SITES) == 28


def test_scopes_that_leave_nothing_out_go():
    places = tuple(itertools.product(range(2), range(3)))
    assert Subset(FAILING, ("attn.o",), None, places).within(2, 3) == Subset(FAILING, ("attn.o",))
    assert Subset(FAILING, ("attn.o",), None, places[3:]).within(2, 3) == Subset(FAILING, ("attn.o",), (1,))
    assert Subset(FAILING, ("attn.o",), (0, 1)).within(2, 3) == Subset(FAILING, ("attn.o",))
    part = Subset(FAILING, ("attn.o",), None, places[:2])
    assert part.within(2, 3) == part


# ---- the search ---------------------------------------------------------------------------------------

class Study:
    """Decides by a rule on the arm's roundings; counts what it is asked."""

    criterion = Criterion()

    def __init__(self, fails, over_after=10**9, seeds=(1, 2, 3, 4, 5)):
        self.fails, self.asked, self.over_after, self.seeds = fails, [], over_after, seeds

    @property
    def over(self):
        return len(self.asked) >= self.over_after

    def decide(self, arms, seeded):
        assert seeded == ("data_seed",)
        found = []
        for arm in arms:
            if self.over:
                found.append(tally_of(arm, "undecided", 0, 0))
                continue
            self.asked.append(arm.name)
            failed = self.fails(LOW.round(*arm.options["round"]))
            if not failed and len(self.seeds) < 5:
                found.append(tally_of(arm, "undecided", 0, len(self.seeds)))
                continue
            found.append(tally_of(arm, "fails" if failed else "trains", 2 * failed, 2 if failed else 5))
        return found


def tally_of(arm, verdict, failures, runs):
    return Tally(arm.name, "", "", "", verdict, failures, runs, 0, 1, 1, 1, 1, 1)


def guilty(p):
    """l of layer 1 and O of head 2 there, both low."""
    table = p.sites_for("fwd", 1, "", 2)
    return table["attn.l"].format == "bf16" and table["attn.o"].format == "bf16"


def search(tmp_path, study, fork="run@10"):
    return Bisection(study, fork, LOW, {"steps": 30, "round": ()}, tmp_path / "decisions.json", 3, 4)


@pytest.mark.parametrize("ranked", [["attn.p", "attn.o", "attn.dp", "attn.l"], SITES, SITES[::-1]])
def test_minimal_sets(tmp_path, ranked):
    study = Study(guilty)
    found = search(tmp_path, study)
    failing, why = found.minimal(FAILING, ranked, 3)
    assert (set(failing.sites), failing.places, why) == ({"attn.l", "attn.o"}, ((1, 2),), "")
    saving, _ = found.minimal(SAVING, ranked, 3)
    assert saving.sites in (("attn.l",), ("attn.o",)) and saving.places == ((1, 2),)
    assert found.runs == sum(d.runs for d in found.decisions) and len(set(study.asked)) == len(study.asked)


def test_verdicts_are_kept(tmp_path):
    first = Study(guilty)
    one = search(tmp_path, first)
    expected = one.minimal(FAILING, SITES, 3)
    again = Study(guilty)
    assert search(tmp_path, again).minimal(FAILING, SITES, 3) == expected and again.asked == []
    other = Study(guilty)
    search(tmp_path, other, fork="run@20").minimal(FAILING, SITES, 3)
    assert len(other.asked) == len(first.asked)  # of another state nothing is known
    assert json.loads((tmp_path / "decisions.json").read_text())["head"]["fork"] == "run@20"


def test_more_seeds_ask_again_what_fewer_left_open(tmp_path):
    few, more, again = Study(guilty, seeds=(1, 2)), Study(guilty), Study(guilty)
    for study in (few, more, again):
        found = search(tmp_path, study).minimal(SAVING, SITES, 3)
        assert (found[0] is None) == (study is few)
    assert few.asked == more.asked[:1] and again.asked == []


def test_time_that_is_spent_keeps_what_was_decided(tmp_path):
    short = Study(guilty, over_after=4)
    with pytest.raises(Undecided):
        search(tmp_path, short).minimal(FAILING, SITES, 3)
    on = Study(guilty)
    found, _ = search(tmp_path, on).minimal(FAILING, SITES, 3)
    whole = Study(guilty)
    (tmp_path / "b").mkdir()
    assert search(tmp_path / "b", whole).minimal(FAILING, SITES, 3)[0] == found
    assert short.asked + on.asked == whole.asked


def test_no_rounding_is_to_blame_where_every_run_does_the_same(tmp_path):
    """Every set would pass, so the first one that is tried is no finding."""
    for kind, fails, why in ((FAILING, True, "with all of attention in fp32 training fails from this state, too"),
                             (SAVING, False, "nothing has to be saved")):
        study = Study(lambda p, fails=fails: fails)
        (tmp_path / kind).mkdir()
        found, because = search(tmp_path / kind, study).minimal(kind, SITES, 3)
        assert found is None and why in because and len(study.asked) == 2


def test_a_state_that_no_rounding_makes_fail(tmp_path):
    found, why = search(tmp_path, Study(lambda p: False)).minimal(FAILING, SITES, 3)
    assert found is None and "does not surely fail from this state" in why
    (tmp_path / "c").mkdir()
    found, why = search(tmp_path / "c", Study(lambda p: True)).minimal(SAVING, SITES, 3)
    assert found is None and "does not surely train" in why
