"""What a study leaves in its folder: tables of rows as CSV and HDF5, figures, and report.md."""
import csv
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.precision import Precision
from cuflash.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICTS = ("confirmed", "in part", "not confirmed", "undecided")


@dataclass(frozen=True)
class Claim:
    """What a paper says, what was measured, and whether they agree by a rule that the report states.

    `why` is the reason found, from measured values.
    """

    figure: str
    paper: str
    measured: str
    verdict: str
    why: str

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r}; valid: {', '.join(VERDICTS)}")


def verdict(parts: Iterable[bool]) -> str:
    """Confirmed where all parts of a claim hold, in part where some do."""
    found = list(parts)
    return VERDICTS[0] if all(found) else VERDICTS[1] if any(found) else VERDICTS[2]


def as_row(x: Any, extra: Sequence[str] = ()) -> dict[str, Any]:
    """A dataclass as a row, with these of its properties as further columns."""
    return dataclasses.asdict(x) | {name: getattr(x, name) for name in extra}


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Numbers with 7 significant digits."""
    with whole_file(path) as partial, open(partial, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({
            k: f"{v:.7g}" if isinstance(v, float) else v
            for k, v in row.items()
        } for row in rows)


def read_csv(path: str | os.PathLike[str], kind: type) -> list[Any]:
    """Rows of a dataclass of str, int, bool and float fields, as `write_csv` wrote them."""
    fields: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(kind)}
    parse: dict[Any, Any] = {bool: lambda text: text == "True"}
    with open(path, newline="", encoding="utf-8") as f:
        return [kind(**{k: parse.get(t, t)(row[k]) for k, t in fields.items()}) for row in csv.DictReader(f)]


def write_hdf5(path: str | os.PathLike[str], tables: Mapping[str, Sequence[Mapping[str, Any]]],
               attributes: Mapping[str, Any]) -> None:
    """A group for each table, in it a dataset for each column."""
    import h5py
    with whole_file(path) as partial, h5py.File(partial, "w") as f:
        f.attrs.update({"format": "cuflash study 1"} | dict(attributes))
        for name, rows in tables.items():
            for column in rows[0]:
                values = [row[column] for row in rows]
                text = isinstance(values[0], str)
                f.create_dataset(f"{name}/{column}", data=values if text else np.array(values),
                                 dtype=h5py.string_dtype() if text else None)


def write_figures(folder: pathlib.Path, figures: Mapping[str, "Figure"]) -> None:
    """NAME.png and NAME.svg of each."""
    from cuflash import plot
    for name, figure in figures.items():
        plot.save(figure, folder / f"{name}.png", dpi=150)
        plot.save(figure, folder / f"{name}.svg")


# ---- Markdown -------------------------------------------------------------------------------------

def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [list(map(str, header)), ["---"] * len(header), *(list(map(str, row)) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                     for line in lines) + "\n"


def claims_table(claims: Iterable[Claim]) -> str:
    return table(("figure", "the paper", "measured", "verdict", "why"),
                 [(c.figure, c.paper, c.measured, f"**{c.verdict}**", c.why) for c in claims])


def reproduce(command: str, environment: Mapping[str, Any], data: Mapping[str, str],
              precisions: Mapping[str, Precision]) -> str:
    """The block that lets another repeat a study.

    Args:
        environment: versions, numerics version, commit, device.
        data: SHA-256 by name.
    """
    rows = [*environment.items(), *((f"SHA-256 of {name}", digest) for name, digest in data.items())]
    digests = [(name, text if len(text := p.describe()) <= 80 else f"{p.name}, whole in study.h5",
                p.digest[:16]) for name, p in precisions.items()]
    return (f"## Reproduce\n\n```console\n$ {command}\n```\n\n" + table(("", ""), rows) + "\n"
            + table(("precision", "what it is", "digest"), digests))


def write_report(path: str | os.PathLike[str], text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
