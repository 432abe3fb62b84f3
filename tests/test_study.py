"""cuflash study as a user types it: the folder it leaves, and that its report says what its tables say."""
import csv
import re

import h5py
import numpy as np

from cuflash.attention import flash_attention
from cuflash.deviation import Row
from cuflash.deviation_report import claims
from cuflash.dump import recording
from cuflash.model.run import Run
from cuflash.report import read_csv
from tests.test_cli import mistake, run

SMALL = [
    "--length", "64", "--queries", "16", "--head-dim", "8", "--draws", "1", "--lengths", "32,64", "--tiles",
    "32", "--inputs", "normal", "--formats", "bf16,fp16,fp32,fp64"
]


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_deviation(tmp_path, monkeypatch):
    rng = np.random.default_rng(54)
    with recording(tmp_path / "a.h5", "attn.q,attn.k,attn.v"):
        flash_attention(*rng.standard_normal((3, 1, 2, 32, 8), dtype=np.float32), precision="fp32")
    words = ["study", "deviation", *SMALL, "--activations", str(tmp_path / "a.h5"), "-o", str(tmp_path / "s")]
    monkeypatch.setattr("sys.argv", ["cuflash", *words])
    text = run(*words)
    folder = tmp_path / "s"
    assert {f.name for f in folder.iterdir()} == {"report.md", "deviation.csv", "claims.csv", "study.h5"} | {
        f"figure_{n}.{s}" for n in (3, 4, 5, 6, "sites") for s in ("png", "svg")}
    report, said = (folder / "report.md").read_text(), rows_of(folder / "claims.csv")
    assert "$ cuflash study deviation --length 64" in report and "| numerics_version | " in report
    assert re.search(r"\| SHA-256 of activations \(a.h5, layer 0\) \| [0-9a-f]{64} \|", report)
    assert re.search(r"\| per-tile bf16 \| all-bf16 with accumulator=sequential \| [0-9a-f]{16} \|", report)
    again = claims(read_csv(folder / "deviation.csv", Row))  # 7 digits of each number decide the same
    assert [(c.figure, c.verdict) for c in again] == [(r["figure"], r["verdict"]) for r in said]
    for r in said:
        assert f"**{r['verdict']}**" in report and f"{r['paper']}: {r['verdict']}" in text
    with h5py.File(folder / "study.h5") as f:
        assert len(f["deviation/ratio"]) == len(rows_of(
            folder / "deviation.csv")) and "precision fa2 bf16" in f.attrs
        assert f.attrs["command"].startswith("cuflash study deviation")


def test_stable(tmp_path):
    (tmp_path / "tiny.toml").write_text("n_layer = 1\nn_head = 2\nn_embd = 16\nblock_size = 32\n")
    words = [
        "study", "stable", *SMALL, "--model",
        str(tmp_path / "tiny.toml"), "--block-size", "32", "--batch-size", "1", "--steps", "1", "--every",
        "1", "--data", "synthetic:words,seed=1,size=20000", "-o",
        str(tmp_path / "s")
    ]
    text = run(*words)
    folder = tmp_path / "s"
    drift, trained = rows_of(folder / "drift.csv"), rows_of(folder / "trained.csv")
    assert len(trained) == 15 and {r["step"] for r in drift} == {"0", "1"}
    assert {r["input"] for r in rows_of(folder / "deviation.csv")} == {"normal", "activations"}
    assert (folder / "figure_7.png").stat().st_size and (folder / "figure_8.svg").stat().st_size
    report = (folder / "report.md").read_text()
    sha = Run(folder / "runs" / "bf16-flash-1").config["data"]["sha256"]
    assert f"| SHA-256 of the trainings' data | {sha} |" in report
    assert "bf16-plain-2: step 1/1" in text and "fp16-flash-1" in report
    assert "of another study: " in mistake(*words, "--lr", "0.5")


def test_mistakes(tmp_path):
    out = ["-o", str(tmp_path / "s")]
    assert "unknown input 'norml': did you mean 'normal'" in mistake("study", "deviation", "--inputs",
                                                                     "norml", *out)
    assert "--tiles" in mistake("study", "deviation", "--tiles", "32;64", *out)
    assert "tile is 8; valid: 16 or more" in mistake("study", "deviation", "--tile", "8", *out)
    assert "no such file" in mistake("study", "deviation", "--activations", str(tmp_path / "x.h5"), *out)
    assert not (tmp_path / "s").exists()
