import numpy as np
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.model import checkpoint
from cuflash.model.run import Run

TINY = ("--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--block-size", "16", "--batch-size", "2",
        "--log-every", "1", "--data", "synthetic:words,size=20000", "--warmup-steps", "2", "--device", "cpu")


def train(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["train", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(*TINY, "--steps", 6, "--checkpoint-every", 3, "--keep", 0, "--precision", "bf16", "--round",
          "attn.o=fp32", "--fix", "on", "--out", "a")
    return tmp_path


def rows(name: str) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k not in ("ms", "tokens_per_s", "mfu")} for row in Run(name).metrics]


def same(a: str, b: str, step: int) -> bool:
    x, y = (checkpoint.load(Run(r).checkpoint_path(step))[0] for r in (a, b))
    return all(np.array_equal(p[n], q[n]) for p, q in zip((x.params, x.m, x.v), (y.params, y.m, y.v)) for n in p)


def test_a_fork_that_changes_nothing_is_the_run(run):
    text = train("--fork", "a@3", "--out", "b")
    assert "from step 3 of a, precision bf16-paper+" in text and "step 4/6" in text and "step 3/6" not in text
    np.testing.assert_equal(rows("b"), rows("a")[3:])
    assert same("a", "b", 6) and Run("b").config["train"]["fork"] == "a@3"


def test_another_precision_sees_the_same_batches(run):
    train("--fork", "a@3", "--precision", "fp32", "--out", "b")
    config = Run("b").config["train"]
    assert (config["precision"], config["round"], config["fix"]) == ("fp32", [], "on")
    a, b = rows("a")[3:], rows("b")
    # The same weights on the same text: losses differ by bf16's roundings, of order 2^-8 and averaged over 32 tokens.
    assert 0 < abs(a[0]["loss"] - b[0]["loss"]) < 1e-2 and [r["lr"] for r in a] == [r["lr"] for r in b]
    assert not same("a", "b", 6)
    train("--fork", "a@3", "--fix", "off", "--out", "c")
    assert Run("c").config["train"]["round"] == ["attn.o=fp32"]


def test_a_fork_resumes_without_the_run_that_it_came_from(run):
    train("--fork", "a@3", "--precision", "fp64", "--keep", 0, "--out", "b")
    Run("b").checkpoint_path(6).rename(run / "end.h5")
    (run / "a").rename(run / "elsewhere")
    train("--resume", "--out", "b")
    ours, theirs = (checkpoint.load(p)[0] for p in (Run("b").checkpoint_path(6), run / "end.h5"))
    assert all(np.array_equal(p, theirs.params[n]) and p.dtype == np.float64 for n, p in ours.params.items())


@pytest.mark.parametrize("begin", [("--fork", "a@3"), (*TINY, "--steps", 6, "--init", "a@3")], ids=["fork", "init"])
def test_a_run_that_lost_its_checkpoints_begins_where_it_began(run, begin):
    """As one that was killed before its first checkpoint was written: not from new weights."""
    for name in ("b", "c"):
        train(*begin, "--out", name)
    for _, file in Run("c").checkpoints():
        file.unlink()
    assert ("from step 3 of a" in train("--resume", "--out", "c")) == ("--fork" in begin)
    np.testing.assert_equal(rows("c"), rows("b"))
    assert same("b", "c", 6)


def test_a_loss_scale_begins_anew_with_the_precision(run):
    train("--fork", "a", "--precision", "fp16-fa2", "--steps", 8, "--out", "b")
    assert Run("b").config["train"]["loss_scale"] == "dynamic"
    assert checkpoint.load(Run("b").checkpoint_path(8))[0].scale.since == 2


@pytest.mark.parametrize("arguments,message", [
    (("--fork", "a@4"), "--fork a@4: no such checkpoint in a; it has 3, 6"),
    (("--fork", "nowhere@4"), "--fork nowhere@4: no such file or run folder"),
    (("--fork", "a@3", "--n-embd", 32), "--fork a@3 continues the same model; changed: --n-embd 16 -> 32"),
    (("--fork", "a@3", "--qk-norm"), "changed: --qk-norm False -> True"),
    (("--fork", "a@3", "--init", "a"), "a run begins from one of them"),
    (("--fork", "a@6"), "--fork a@6: is of step 6; --steps 6 leaves nothing to do: give a larger --steps"),
    (("--fork", "a@3", "--precision", "bf61"), "unknown precision 'bf61'"),
    (("--fork", "loose.h5"), "is not a run folder"),
])
def test_mistakes(run, arguments, message):
    (run / "loose.h5").write_bytes(Run("a").checkpoint_path(3).read_bytes())
    assert message in train(*arguments, "--out", "b", code=2) and not (run / "b").exists()


def test_data_that_have_changed(run):
    (run / "text").write_text("a text " * 200)
    train(*TINY, "--data", "text", "--steps", 2, "--out", "t")
    (run / "text").write_text("another text " * 200)
    assert "--fork t@2: --data text has changed since" in train("--fork", "t@2", "--steps", 4, "--out", "b", code=2)
