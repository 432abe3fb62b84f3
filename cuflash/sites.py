"""The one function through which every rounding goes: `rnd("attn.p", x)`.

A Rounder knows a precision and a place in the network, so it knows what the site does there; it
sees x and round(x), so it can also show both to a watcher (statistics, dumps).
"""
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuflash import launch
from cuflash.formats import Format, Mode, format_named, in_bf16, round_with, rounder, storage_dtype
from cuflash.philox import Key, random_words
from cuflash.precision import Precision, Rounding
from cuflash.site_table import SITE_ID, SITES

# watch(rounder, site, x, rounded): called after each rounding.
Watch = Callable[["Rounder", str, np.ndarray, np.ndarray], None]


class Rounder:
    """Rounds values at the sites of one place: a direction, layer, module and heads.

    In attention, arrays are (G, ...) with one (sample, head) per entry of `samples` and `heads`;
    `at` says where in the whole value the array lies, for stochastic rounding and for watchers, who see in
    `device` whether it was computed on the `cpu` or the `gpu`, in `causal` and `group` whether attention was
    causal and how many query heads shared keys.
    """

    def __init__(self, precision: Precision, direction: str = "fwd", layer: int = 0, module: str = "",
                 key: Key | None = None, watch: Watch | None = None,
                 heads: Sequence[int] = (0,), samples: Sequence[int] = (0,)) -> None:
        self.precision, self.direction, self.layer, self.module = precision, direction, layer, module
        self.key, self.watch, self.heads, self.samples = key, watch, heads, samples
        self.device = "cpu"
        self.causal, self.group = False, 1
        self.dtype = np.float64 if precision.is_fp64 else np.float32
        self._table, self._rounding = _place(precision, direction, layer, module,
                                             int(heads[0]) if len(heads) else 0)
        self.at()

    def at(self, q: int = 0, k: int = 0, tile: int = 0, visible: np.ndarray | None = None) -> None:
        """Where the next arrays lie: first query row, first key, numeric tile.

        `visible` masks (q, k) values: outside it they count for nothing, and read as −Inf (s, s_scaled,
        x, x_bwd) or 0, whatever the array holds there.
        """
        self.q, self.k, self.tile, self.visible = q, k, tile, visible

    def format(self, site: str) -> str:
        """The format of a site here; "fp64" under that precision."""
        return "fp64" if self.dtype is np.float64 else self._table[site].format

    def rounding(self, site: str) -> Rounding:
        """What the site does here."""
        return self._table[site]

    def __call__(self, site: str, x: np.ndarray) -> np.ndarray:
        """x rounded as the site says: same shape, dtype fp32 (fp64 under precision fp64, unrounded).

        A CuPy array keeps the dtype of the site's format, or fp32 where CuPy has none.
        """
        if launch.on_gpu(x):
            return _round_cuda(self, site, x)
        rounding = self._table[site]
        if self.dtype is np.float64 or (rounding.format == "fp32" and x.dtype == np.float32):
            y = x.astype(self.dtype, copy=False)
        else:
            format, mode, of_fp32 = self._rounding[site]
            if x.dtype != np.float32:
                word = self._words(site, x.shape) if mode.needs_key else None
                y = round_with(x, format, mode, word).astype(np.float32, copy=False)
            elif format.name == "bf16" and in_bf16(x):  # as where an operation takes the result of another one
                y = x
            else:
                y = of_fp32(x, self._words(site, x.shape) if mode.needs_key else None)
        if self.watch is not None and site not in self.precision.merged:
            self.watch(self, site, x, y)
        return y

    def _words(self, site: str, shape: tuple[int, ...]) -> np.ndarray:
        """Random words for a value of this shape, located by the site's axes.

        A (q, k) value is located by row and key alone, so that backward's S gets forward's words
        whatever its tiles; every other value also by its tile.
        """
        if self.key is None:
            raise ValueError(f"site {site} rounds stochastically: pass key=cuflash.Key(seed)")
        axes = SITES[site].axes
        start = {"q": self.q, "k": self.k}
        rows = start.get(axes[0], 0) + np.arange(shape[1] if len(axes) == 1 else shape[-2])
        cols = start.get(axes[1], 0) + np.arange(shape[-1]) if len(axes) == 2 else np.arange(1)
        key = Key(self.key.seed, self.key.step, self.layer, self.key.sample)
        words = random_words(key, site=SITE_ID[site], heads=np.asarray(self.heads),
                             samples=np.asarray(self.samples),
                             tile=0 if axes == "qk" else self.tile, rows=rows, cols=cols)
        return words.reshape(words.shape[0], *shape[1:]) if len(axes) == 2 else words[..., :1].reshape(shape)


@functools.lru_cache(maxsize=4096)
def _place(precision: Precision, direction: str, layer: int, module: str,
           head: int) -> tuple[dict[str, Rounding], dict[str, tuple[Format, Mode, Callable[..., Any]]]]:
    """What the sites of a place do; and their formats, modes, functions that round fp32."""
    table = precision.sites_for(direction, layer, module, head)
    found = {}
    for rounding in dict.fromkeys(table.values()):
        format, mode = format_named(rounding.format), rounding.rule
        found[rounding] = format, mode, rounder(format, mode, np.dtype(np.float32))
    return table, {site: found[rounding] for site, rounding in table.items()}


# ---- CUDA ---------------------------------------------------------------------------------------

def _round_cuda(rnd: Rounder, site: str, x: Any) -> Any:
    """A CuPy array (samples, rows, columns) at a site; x itself where its dtype says that it is in the
    format."""
    here = rnd.rounding(site)
    y = x
    if here.format != "fp32" and x.dtype != storage_dtype(here.format):
        x = launch.flat(x)
        y = launch.empty(x.shape, launch.storage(here.format))
        name = site.replace(".", "_")
        launch.run("round", "round_site", launch.elementwise(x.size), 256,
                   (x, y, np.int64(x.size), launch.place(x.shape, rnd)),
                   {"ROUNDED": name, "X_T": launch.c_type(x),
                    "Y_T": launch.c_type(y)}, ((site, launch.checked(rnd, site)),))
    if rnd.watch is not None:
        rnd.device = "gpu"
        rnd.watch(rnd, site, x.get().astype(np.float32), y.get().astype(np.float32))
    return y
