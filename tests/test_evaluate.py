import math
import re

import numpy as np
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.fixes import as_fix
from cuflash.kernels import gpu_reason
from cuflash.model import data
from cuflash.model.evaluate import Evaluation, blocks, evaluate
from cuflash.model.sample import load_model
from cuflash.precision import Precision

TINY = ("--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--block-size", "16", "--batch-size", "4", "--device",
        "cpu", "--data", "synthetic:words,size=5000", "--warmup-steps", "1", "--lr", "0.01")


def cuflash(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a"
    cuflash("train", *TINY, "--steps", 20, "--precision", "bf16", "--fix", "on", "--out", path)
    return path


def test_blocks_are_consecutive_and_whole():
    d = data.Data("", "bytes", np.arange(50), np.arange(100, 133), "")
    assert blocks(d, "val", 8, None).tolist() == [list(range(100 + 8 * i, 109 + 8 * i)) for i in range(4)]
    assert len(blocks(d, "train", 8, None)) == 6 and len(blocks(d, "train", 8, 2)) == 2


def test_the_loss_is_that_of_each_block_in_fp64(run):
    model, header, _ = load_model(run)
    text = blocks(data.load("synthetic:words,size=5000"), "val", 16, None)
    found = evaluate(header, model.params, Precision.named("fp64"), as_fix("off"), text, 4)
    assert found.sizes.sum() == len(text) == 31 and len(found.losses) == 8
    one = evaluate(header, model.params, Precision.named("fp64"), as_fix("off"), text, 1)
    assert found.loss == pytest.approx(one.loss, rel=1e-13) == pytest.approx(one.losses.mean(), rel=1e-13)
    assert one.se() == pytest.approx(one.losses.std(ddof=1) / math.sqrt(31))


def test_standard_errors():
    a = Evaluation(None, None, np.array([1.0, 2.0, 3.0]), np.array([2, 2, 2]))
    b = Evaluation(None, None, np.array([1.5, 2.5, 3.5]), np.array([2, 2, 2]))
    assert a.se() == pytest.approx(1 / math.sqrt(3)) and b.se(a) == 0
    assert math.isnan(Evaluation(None, None, np.ones(1), np.ones(1)).se())


def test_the_command(run):
    text = cuflash("eval", run)
    assert f"step 20 of {run} | synthetic:words,size=5000, val: 31 blocks of 16" in text
    nats, bits = (float(x) for x in re.search(r"bf16-paper +(\S+) ± \S+ +(\S+)", text).groups())
    assert bits == pytest.approx(nats / math.log(2), abs=1e-4) and nats < 5.5
    several = cuflash("eval", run, "--precision", "fp32", "--precision", "bf16", "--precision", "fp32", "--blocks", 9)
    assert "9 blocks" in several and "to the first" in several
    first, second, third = several.splitlines()[-3:]
    assert first.startswith("fp32 ") and re.search(r"bf16-paper .* [+-]0\.00\d+ ± 0\.00", second)
    assert third.endswith("+0.000000 ± 0.000000")
    rounded = cuflash("eval", run, "--precision", "fp32", "--round", "logits=e4m3", "--fix", "off")
    assert "fp32+" in rounded
    assert "of " + str(run) + "@20" in cuflash("eval", f"{run}@20", "--split", "train", "--blocks", 2)


def test_bits_per_byte_of_tokens(run, tmp_path):
    np.arange(2000, dtype="<u2").__mod__(50).astype("<u2").tofile(tmp_path / "t.bin")
    text = cuflash("eval", run, "--data", tmp_path / "t.bin")
    assert "bits/token" in text
    nats, bits = (float(x) for x in re.search(r"bf16-paper +(\S+) ± \S+ +(\S+)",
                  cuflash("eval", run, "--data", tmp_path / "t.bin", "--bytes-per-token", 4)).groups())
    assert bits == pytest.approx(nats / math.log(2) / 4, abs=1e-4)


@pytest.mark.parametrize("arguments,message", [
    (("--split", "vall"), "unknown --split 'vall': did you mean 'val'"),
    (("--precision", "bf61"), "unknown precision 'bf61'"),
    (("--round", "attn.oo=fp32"), "unknown site 'attn.oo'"),
    (("--fix", "onn"), "unknown fix 'onn'"),
    (("--device", "gpuu"), "unknown --device 'gpuu': did you mean 'gpu'"),
    (("--step", 7), "--step 7: no such checkpoint"),
    (("--data", "nowhere"), "--data nowhere: no such file or folder"),
    (("--blocks", 0), "'--blocks'"),
    *([(("--device", "gpu"), "--device gpu: ")] if gpu_reason() else []),
])
def test_mistakes(run, arguments, message):
    assert message in " ".join(cuflash("eval", run, *arguments, code=2).split())


def test_a_checkpoint_file_needs_data(run):
    (file,) = (run / "checkpoints").glob("*.h5")
    assert "name some with --data" in cuflash("eval", file, code=2)
    assert "step 20 of" in cuflash("eval", file, "--data", "synthetic:words,size=5000")
