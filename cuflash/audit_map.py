"""What rounding does to δ and O, token by token and feature by feature: arXiv 2510.04212, figures 5 and 12.

δ_lp − δ_hp of a row is, but for the rounding of its own products, Σ over features of dO·(O_lp − O_hp); hp is
golden, plain fp64.
"""
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cuflash.audit import Capture
from cuflash.fixes import Fix
from cuflash.precision import Precision
from cuflash.whole_file import whole_file

FORMAT = "cuflash audit 1"


@dataclass(frozen=True, eq=False)
class ErrorMap:
    """Of one attention under one precision, fp64.

    Attributes:
        delta: δ_lp − δ_hp, (batch, heads, T).
        o: O_lp − O_hp, (batch, heads, T, head_dim).
        do: dO, (batch, heads, T, head_dim).
        heads, batch: the numbers of heads and samples.
    """

    precision: str
    fix: str
    delta: np.ndarray
    o: np.ndarray
    do: np.ndarray
    heads: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def by_feature(self) -> np.ndarray:
        """dO·(O_lp − O_hp): what each feature gives to `delta`."""
        return self.do * self.o


def error_map(capture: Capture, precision: Precision, fix: Fix) -> ErrorMap:
    """The errors of O and δ, for which the capture must have dO.

    Raises:
        ValueError: it has none.
    """
    if capture.do is None:
        raise ValueError("a map of the error of delta needs do, and the capture has none")
    found, golden = capture.run(precision, fix), capture.golden
    assert found.delta is not None and golden.delta is not None
    return ErrorMap(precision.name, str(fix), found.delta - golden.delta,
                    found.o.astype(np.float64) - golden.o, capture.do.astype(np.float64), capture.heads,
                    capture.batch)


def write_maps(path: str | os.PathLike[str], maps: Mapping[int, list[ErrorMap]],
               tokens: np.ndarray | None = None, kind: str = "") -> None:
    """HDF5: `/L01/bf16-paper/delta`, `/L01/bf16-paper/o`, `/L01/do`, and the tokens (batch, T) if known.

    Args:
        maps: for each layer, one for each precision.
        kind: what the tokens are, `bytes` or `tokens`.
    """
    import h5py
    with whole_file(path) as partial, h5py.File(partial, "w") as f:
        f.attrs["format"] = FORMAT
        if tokens is not None:
            f["tokens"] = tokens
            f["tokens"].attrs["kind"] = kind
        for layer, some in maps.items():
            for m in some:
                group = f.create_group(f"L{layer:02d}/{m.precision}")
                group.attrs.update(
                    {"precision": m.precision, "fix": m.fix, "heads": m.heads, "batch": m.batch})
                for name in ("delta", "o"):
                    group.create_dataset(name, data=getattr(m, name), shuffle=True, compression=1)
            f.create_dataset(f"L{layer:02d}/do", data=some[0].do, shuffle=True, compression=1)


def read_maps(path: str | os.PathLike[str]) -> tuple[dict[int, list[ErrorMap]], np.ndarray | None]:
    """What `write_maps` wrote: maps by layer, tokens.

    Raises:
        ValueError: another file, or a damaged one.
    """
    import h5py
    try:
        with h5py.File(path, "r") as f:
            if f.attrs.get("format") != FORMAT:
                raise ValueError(f"{path} is an HDF5 file, but not {FORMAT!r}")
            found: dict[int, list[ErrorMap]] = {}
            for layer in sorted(name for name in f if name != "tokens"):
                do = f[layer]["do"][...]
                found[int(layer[1:])] = [
                    ErrorMap(g.attrs["precision"], g.attrs["fix"], g["delta"][...], g["o"][...], do,
                             tuple(g.attrs["heads"].tolist()), tuple(g.attrs["batch"].tolist()))
                    for name, g in f[layer].items() if name != "do"]
            return found, f["tokens"][...] if "tokens" in f else None
    except (OSError, KeyError) as e:
        raise ValueError(f"{path}: damaged, cut short or not HDF5 ({e})") from e
