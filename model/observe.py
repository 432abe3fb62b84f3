"""What a run looks at beside its losses: `--watch`, `--dump-every`, spectral norms."""
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash.dump import Recorder, Selection, place_name
from cuflash.model.layers import LAYERS, Layers, site_series, spectral_norms
from cuflash.model.run import Run
from cuflash.sites import Rounder
from cuflash.statistics import SiteStatistics, Statistics
from cuflash.watching import Only

SHOWN = 3  # biased sites in a line of the log


class Observer:
    """Sets the model's watch for each step, and keeps layers.h5 and dumps/ of a run.

    `stop_on` is the exception after which a dump is kept all the same: it has what led there.
    """

    def __init__(self, trainer: Any, run: Run, stop_on: type[Exception], *, resumed: bool) -> None:
        self.config, self.model, self.run, self._stop_on = trainer.config, trainer.model, run, stop_on
        self._attributes = {"fix": str(trainer.model.fix), "data_sha256": trainer.data.sha256}
        self._wanted = Selection(self.config.watch) if self.config.watch else None
        self._statistics = Statistics()
        path = run.path / LAYERS
        self.layers = Layers.load(path, trainer.state.step) if resumed and path.is_file() else Layers()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step of training."""
        c = self.config
        recorder = None
        if c.dump_every and step % c.dump_every == 0:
            path = self.run.dump_path(step)
            path.parent.mkdir(exist_ok=True)
            recorder = Recorder(path, c.dump_sites, attributes=self._attributes)
        try:
            self.model.watch = self._watch(recorder)
            try:
                yield
            except self._stop_on:
                if recorder is not None:
                    recorder.finish()
                raise
            if recorder is not None:
                recorder.finish()
        finally:
            self.model.watch = None
            if recorder is not None:
                recorder.close()

    def _watch(self, recorder: Recorder | None) -> Any:
        wanted = self._wanted
        if wanted is None:
            return recorder

        def watch(rnd: Rounder, site: str, x: np.ndarray, rounded: np.ndarray) -> None:
            if (rnd.direction, rnd.module, site) in wanted:
                self._statistics(rnd, site, x, rounded)
            if recorder is not None:
                recorder(rnd, site, x, rounded)

        return Only(watch, lambda direction, layer, module, site, sample:
                    (direction, module, site) in wanted
                    or recorder is not None and recorder.wants(direction, layer, module, site, sample))

    def after(self, step: int, logged: bool) -> str | None:
        """Keeps what is due after a step: spectral norms; with a line of the log, what watched sites have
        measured since the last one. Returns a line with the most biased of these."""
        c = self.config
        due = c.spectral_every and (step % c.spectral_every == 0 or step == c.steps)
        values = spectral_norms(self.model) if due else {}
        line = None
        if logged and self._wanted is not None:
            sites = self._statistics.sites()
            values |= site_series(self._statistics.sites(by_head=True))
            self._statistics = Statistics()
            worst = sorted((s for s in sites if s.bias), key=lambda s: -s.bias)[:SHOWN]
            line = "  biased: " + (", ".join(map(_bias, worst)) or "no site")
        if values:
            self.layers.add(step, values)
        return line

    def save(self) -> None:
        """Before each checkpoint, so that a resume from it finds all steps up to it."""
        self.layers.save(pathlib.Path(self.run.path) / LAYERS)


def _bias(s: SiteStatistics) -> str:
    """`fwd/L01/attn.pv -0.2501 ± 0.0008 ulp`, or by how much away from zero, whichever is more."""
    at = place_name(s.direction, s.layer, s.module, s.site)
    signed = abs(s.mean) >= abs(s.away) or not s.away_se
    mean, se, how = (s.mean, s.se, "") if signed else (s.away, s.away_se, " away from 0")
    return f"{at} {mean:+.4f} ± {se:.1g} ulp{how}"
