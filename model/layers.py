"""layers.h5 of a run: spectral norms of the weights and what watched sites measured, by step, layer, head."""
import io
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from cuflash.dump import place_name
from cuflash.dump_file import datasets
from cuflash.errors import unknown
from cuflash.launch import on_gpu
from cuflash.model.gpt import GPT
from cuflash.statistics import SiteStatistics
from cuflash.whole_file import whole_file

LAYERS = "layers.h5"
FORMAT = "cuflash layers 1"
MEASURES = ("count", "mean", "se", "away", "away_se", "max", "overflow", "underflow", "ties", "changed",
            "nonfinite")
ITERATIONS = 30


class Layers(Mapping[str, np.ndarray]):
    """Series over `steps`, NaN where a step has no value.

    `spectral/L01/q` (n,), `spectral/L01/q_heads` (n, heads), `sites/fwd/L01/attn.pv/mean` (n, heads).
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._series: dict[str, list[tuple[int, np.ndarray]]] = {}  # (index of the step, value)

    @classmethod
    def load(cls, path: pathlib.Path, after: int | None = None) -> "Layers":
        """From a file; only steps up to `after`, as a resume wants it.

        Raises:
            ValueError: not such a file, or damaged.
        """
        import h5py
        self = cls()
        try:
            with h5py.File(path, "r") as f:
                if f.attrs.get("format") != FORMAT:
                    raise ValueError(f"{path}: an HDF5 file, but not {FORMAT!r}")
                steps = f["steps"][:]
                keep = len(steps) if after is None else int(np.searchsorted(steps, after, side="right"))
                self._steps = steps[:keep].tolist()
                for dataset in datasets(f):
                    if dataset.name != "/steps" and keep:
                        self._series[dataset.name.lstrip("/")] = list(enumerate(dataset[:keep]))
        except (OSError, KeyError) as e:
            raise ValueError(f"{path}: damaged, cut short or not HDF5 ({e})") from e
        return self

    def __repr__(self) -> str:
        return f"<Layers: {len(self._series)} series, {len(self._steps)} steps>"

    @property
    def steps(self) -> np.ndarray:
        return np.array(self._steps, np.int64)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """The values of a step, after those before."""
        self._steps.append(step)
        for name, value in values.items():
            self._series.setdefault(name, []).append((len(self._steps) - 1, np.asarray(value, np.float64)))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._series:
            raise unknown("series", name, self._series)
        found = self._series[name]
        out = np.full((len(self._steps), *found[0][1].shape), np.nan)
        for i, value in found:
            out[i] = value
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def save(self, path: pathlib.Path) -> None:
        """Writes the file whole; made in memory first, because HDF5 cannot close a file on a full disk."""
        import h5py
        image = io.BytesIO()
        with h5py.File(image, "w") as f:
            f.attrs["format"] = FORMAT
            f["steps"] = self.steps
            for name in self:
                f.create_dataset(name, data=self[name], shuffle=True, compression=1)
        with whole_file(path) as partial:
            partial.write_bytes(image.getbuffer())


def spectral_norm(w: Any) -> np.ndarray:
    """The largest singular values of a stack of matrices (B, m, n), NumPy or CuPy: (B,) on the host.

    From below, by power iteration from a fixed start, so a function of the weights alone.
    """
    v = w.swapaxes(1, 2) @ (w.sum(axis=2, keepdims=True) + w[:, :, :1])
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(ITERATIONS):
            norm = np.sqrt((v * v).sum(axis=1, keepdims=True))
            v = w.swapaxes(1, 2) @ (w @ (v / np.maximum(norm, np.float32(1e-30))))
        norm = np.sqrt(np.sqrt((v * v).sum(axis=(1, 2))))
    return norm.get() if on_gpu(norm) else norm


def spectral_norms(model: GPT) -> dict[str, Any]:
    """Of every matrix in the blocks, W_Q, W_K and W_V each by itself, W_Q also by head.

    Source: arXiv 2510.04212, figures 3 and 11.
    """
    n_layer, n_head, n_embd = model.config.n_layer, model.config.n_head, model.config.n_embd

    def stacked(name: str) -> Any:
        return np.stack([model.params[f"h.{i}.{name}.weight"] for i in range(n_layer)])

    qkv = stacked("attn.c_attn").reshape(n_layer, 3, n_embd, n_embd)
    found = dict(zip("qkv", spectral_norm(qkv.reshape(-1, n_embd, n_embd)).reshape(n_layer, 3).T, strict=True))
    found["q_heads"] = spectral_norm(qkv[:, 0].reshape(n_layer * n_head, -1, n_embd)).reshape(n_layer, n_head)
    found |= {name: spectral_norm(stacked(name)) for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    return {f"spectral/L{i:02d}/{name}": values[i] for i in range(n_layer) for name, values in found.items()}


def site_series(by_head: Iterable[SiteStatistics]) -> dict[str, Any]:
    """What sites measured, one value a head."""
    heads: dict[str, list[SiteStatistics]] = {}
    for s in by_head:
        heads.setdefault("sites/" + place_name(s.direction, s.layer, s.module, s.site), []).append(s)
    return {
        f"{name}/{measure}": [getattr(s, measure) for s in some]
        for name, some in heads.items()
        for measure in MEASURES
    }
