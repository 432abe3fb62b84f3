"""The smallest set of roundings that makes training fail, and the smallest whose fp32 saves it.

Sites are ranked on saved states first (model/screen.py); forks of one checkpoint, on other batches each, confirm
the top few under the sequential test; delta debugging takes away what is not needed, sites first, then layers,
then heads. Source of the algorithm: Zeller and Hildebrandt, IEEE TSE 28, 2002.
"""
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from cuflash.model.run import write_whole
from cuflash.model.study_arms import short_sites
from cuflash.model.trials import Arm, Study, Tally, merged
from cuflash.model.verdict import FAILS, TRAINS, UNDECIDED
from cuflash.precision import Precision

T = TypeVar("T")
FORKED = ("data_seed",)  # what a seed sets in a fork: its batches
FAILING, SAVING = "failing", "saving"
NAMED = 6  # sites that are named one by one
WHAT = {FAILING: "low alone, the rest of attention fp32", SAVING: "fp32, the rest of attention low"}

Place = tuple[int, int]  # layer, head


class Undecided(Exception):
    """A verdict that bisection needs is not there: time is over, or seeds do not suffice."""


def ddmin(test: Callable[[Sequence[T]], bool], items: Sequence[T]) -> list[T]:
    """A subset that passes the test and of which no item can be left out. `items` pass it, the empty set does not."""
    found, parts = list(items), 2
    while len(found) > 1:
        size = -(-len(found) // parts)
        chunks = [found[i:i + size] for i in range(0, len(found), size)]
        rest = [[x for x in found if x not in chunk] for chunk in chunks]
        if smaller := next((c for c in chunks if test(c)), None):
            found, parts = smaller, 2
        elif len(chunks) > 2 and (smaller := next((r for r in rest if test(r)), None)):
            found, parts = smaller, max(parts - 1, 2)
        elif parts >= len(found):
            break
        else:
            parts = min(len(found), 2 * parts)
    return found


@dataclass(frozen=True)
class Subset:
    """Sites, in these layers and heads of them alone (None: all)."""

    kind: str
    sites: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    places: tuple[Place, ...] | None = None

    def rounds(self, precision: Precision) -> tuple[str, ...]:
        """--round texts over the precision."""
        table = precision.table()
        texts = ["attn=fp32"] if self.kind == FAILING else []
        for scope in self._scopes():
            texts += [f"{scope}{s}={table[s] if self.kind == FAILING else 'fp32'}" for s in self.sites]
        return tuple(texts)

    def _scopes(self) -> list[str]:
        if self.places is not None:
            layers = dict.fromkeys(layer for layer, _ in self.places)
            return [f"L{i}/H{_numbers(h for layer, h in self.places if layer == i)}/" for i in layers]
        return [""] if self.layers is None else [f"L{_numbers(self.layers)}/"]

    def within(self, n_layer: int, n_head: int) -> "Subset":
        """The same set without scopes that leave nothing out."""
        layers, places = self.layers, self.places
        if places is not None:
            layers = tuple(dict.fromkeys(layer for layer, _ in places))
            places = None if len(places) == len(layers) * n_head else places
        return Subset(self.kind, self.sites, None if places or layers and len(layers) == n_layer else layers, places)

    def __str__(self) -> str:
        where = " and ".join(scope.rstrip("/").replace("/", " ") for scope in self._scopes() if scope)
        sites = ", ".join(self.sites) if len(self.sites) <= NAMED else (
            f"{len(self.sites)} sites ({hashlib.sha256(','.join(self.sites).encode()).hexdigest()[:8]}: "
            f"{', '.join(s.removeprefix('attn.') for s in self.sites)})")
        return sites + (f" in {where}" if where else "")


def _numbers(numbers: Any) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class Decision:
    """A set and its verdict, as a row of decisions.csv."""

    kind: str
    set: str
    sites: int
    verdict: str
    failures: int
    runs: int


class Bisection:
    """Verdicts of sets on forks of one checkpoint, kept on disk.

    Args:
        study: where runs go; its seeds are data seeds of the forks.
        fork: RUN@STEP.
        precision: of that run.
        options: of every fork, `steps` among them.
        cache: a JSON file; one of another fork, of other options or criterion is begun anew.
        n_layer, n_head: of the model.
    """

    def __init__(self, study: Study, fork: str, precision: Precision, options: dict[str, Any],
                 cache: pathlib.Path, n_layer: int, n_head: int) -> None:
        self.study, self.precision, self.cache, self.n_layer, self.n_head = study, precision, cache, n_layer, n_head
        self.options = {"fork": fork} | options
        self._head = {"fork": fork, "options": json.loads(json.dumps(options)), "criterion": str(study.criterion),
                      "precision": precision.digest}
        self.decisions: list[Decision] = []
        if cache.is_file():
            stored = json.loads(cache.read_text("utf-8"))
            if stored["head"] == self._head:  # what had too few seeds is asked again with more
                self.decisions = [d for d in (Decision(**row) for row in stored["decisions"])
                                  if d.verdict != UNDECIDED or d.runs >= len(study.seeds)]

    def arm(self, subset: Subset) -> Arm:
        state = "/".join(pathlib.PurePath(self.options["fork"]).parts[-2:])  # so that another one's runs lie elsewhere
        options = merged(self.options, {"round": subset.rounds(self.precision)})
        return Arm(f"{subset.kind} {subset}, from {state}", options, WHAT[subset.kind])

    def decide(self, subsets: Sequence[Subset]) -> list[str]:
        """The verdict of each; those that are known take no run."""
        known = {(d.kind, d.set): d.verdict for d in self.decisions}
        unknown = [s for s in dict.fromkeys(subsets) if (s.kind, str(s)) not in known]
        tallies = self.study.decide([self.arm(s) for s in unknown], seeded=FORKED) if unknown else []
        for subset, t in zip(unknown, tallies):
            known[subset.kind, str(subset)] = t.verdict
            if t.verdict != UNDECIDED or not self.study.over:
                self._add(subset, t)
        return [known[s.kind, str(s)] for s in subsets]

    def _add(self, subset: Subset, t: Tally) -> None:
        self.decisions.append(Decision(subset.kind, str(subset), len(subset.sites), t.verdict, t.failures, t.runs))
        text = json.dumps({"head": self._head, "decisions": [asdict(d) for d in self.decisions]}, indent=1)
        write_whole(self.cache, lambda partial: partial.write_text(text, encoding="utf-8"))

    @property
    def runs(self) -> int:
        return sum(d.runs for d in self.decisions)

    def _passes(self, subset: Subset) -> bool:
        """Fails where that is looked for, trains where that is; an undecided set passes neither."""
        subset = subset.within(self.n_layer, self.n_head)
        verdict, = self.decide([subset])
        if verdict == UNDECIDED and self.study.over:
            raise Undecided(f"{subset.kind} set {subset}")
        return verdict == (FAILS if subset.kind == FAILING else TRAINS)

    def _without(self, kind: str, everything: Sequence[str]) -> bool:
        """Whether the empty set passes, so that every set would: it is the other kind's set of all sites."""
        other = Subset(SAVING if kind == FAILING else FAILING, tuple(everything))
        verdict, = self.decide([other])
        if verdict == UNDECIDED and self.study.over:
            raise Undecided(f"{other.kind} set {other}")
        return verdict == (FAILS if kind == FAILING else TRAINS)

    def minimal(self, kind: str, ranked: Sequence[str], top: int) -> tuple[Subset | None, str]:
        """The minimal set, and why there is none where it is None.

        Args:
            ranked: sites, the most suspect first.
            top: so many of them are tried alone, all at once.

        Raises:
            Undecided: time is over; the verdicts until then are kept.
        """
        everything = [*ranked, *(s for s in short_sites(self.precision) if s not in ranked)]
        whole = Subset(kind, tuple(everything))
        if not self._passes(whole):
            verb = "fail" if kind == FAILING else "train"
            return None, f"{whole} ({WHAT[kind]}) does not surely {verb} from this state"
        if self._without(kind, everything):
            return None, ("with all of attention in fp32 training fails from this state, too" if kind == FAILING else
                          "in low precision training does not fail from this state, so nothing has to be saved")
        singles = [Subset(kind, (s,)) for s in everything[:top]]
        self.decide(singles)
        alone = next((s for s in singles if self._passes(s)), None)
        if alone is not None:
            sites = list(alone.sites)
        else:
            sites, size = everything, max(2, top)
            while size < len(everything):
                if self._passes(Subset(kind, tuple(everything[:size]))):
                    sites = everything[:size]
                    break
                size *= 2
            sites = ddmin(lambda some: self._passes(Subset(kind, tuple(some))), sites)
        chosen = tuple(sites)
        layers = ddmin(lambda some: self._passes(Subset(kind, chosen, tuple(sorted(some)))), list(range(self.n_layer)))
        places = [(layer, head) for layer in sorted(layers) for head in range(self.n_head)]
        places = ddmin(lambda some: self._passes(Subset(kind, chosen, None, tuple(sorted(some)))), places)
        return Subset(kind, chosen, None, tuple(sorted(places))).within(self.n_layer, self.n_head), ""
