"""cuflash bench, as far as no GPU is needed: its table, its mistakes, and the paper's attention in torch."""
import importlib.util
import math
import types

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from cuflash import bench, kernels
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.cli.main import main
from cuflash.precision import Precision


@pytest.fixture
def gpu(monkeypatch):
    """As if there were a GPU, beside torch."""
    runtime = types.SimpleNamespace(getDeviceProperties=lambda i: {"name": b"A GPU"}, runtimeGetVersion=lambda: 13000)
    cuda = types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(id=0))
    timer = types.SimpleNamespace(cupy=types.SimpleNamespace(cuda=cuda, __version__="14.2.0"))
    monkeypatch.setattr(kernels, "gpu_reason", lambda: None)
    monkeypatch.setattr(bench, "Timer", lambda repeats: timer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench, "paper_both", lambda row, timer: 11.1e-3)
    seconds = {"bf16-paper": 1.48e-3, "bf16-fa2": 1.11e-3}
    monkeypatch.setattr(bench, "own_both", lambda row, precision, timer, fix: seconds[precision.name])
    return monkeypatch


def attention(*arguments):
    return CliRunner().invoke(main, ["bench", "attention", *arguments])


def test_against_paper(gpu):
    lines = attention("--against", "paper").output.splitlines()
    assert lines[0].startswith("A GPU, CUDA 13000, CuPy 14.2.0")
    assert lines[-3:] == ["| shape | the paper's, eager torch | bf16 |", "|---|---|---|",
                          "| D 64  T 1024  B×H 32×12  causal | 11.10 | 1.48 (7.5 ×) |"]
    assert "| 1.48 (7.5 ×) | 1.11 (10.0 ×) |" in attention(
        "--against", "paper", "--precision", "bf16", "--precision", "bf16-fa2").output


@pytest.mark.parametrize("arguments, words", [
    (["--against", "paper", "--row", "3"], "--row 3: --against paper has one shape"),
    (["--row", "8"], "--row (8,): valid are 0 to 7"),
    (["--precision", "bf61"], "unknown precision 'bf61': did you mean 'bf16'"),
    (["--precision", "bf16/mufo"], "unknown exp 'mufo': did you mean 'mufu'"),
])
def test_mistakes(gpu, arguments, words):
    found = attention(*arguments)
    assert found.exit_code == 2 and words in found.output, found.output


@pytest.mark.parametrize("against", ["torch", "paper"])
def test_without_torch_says_what_to_install(gpu, against):
    gpu.setattr(importlib.util, "find_spec", lambda name: None)
    found = attention("--against", against)
    assert found.exit_code == 2
    assert f"--against {against}: torch is not installed here: pip install torch" in found.output


def test_the_papers_attention_rounds_as_precision_bf16_does():
    """All bits are equal where torch sums as BLAS does here; another order of a sum may change a few."""
    torch = pytest.importorskip("torch", reason="the paper's attention is torch code")
    arrays = np.random.default_rng(7).standard_normal((4, 2, 3, 96, 32), np.float32).astype(ml_dtypes.bfloat16)
    q, k, v, do = arrays
    p = Precision.named("bf16").replace(tile=(None, None))
    o, saved = flash_attention_forward(q, k, v, causal=True, precision=p)
    ours = (o, *flash_attention_backward(do, saved))

    tq, tk, tv, tdo = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in arrays)
    mask, scale = torch.ones(96, 96, dtype=torch.bool).triu(1), 1 / math.sqrt(32)
    to, lse = bench.paper_forward(tq, tk, tv, mask, scale)
    theirs = (to, *bench.paper_backward(tdo, tq, tk, tv, to, lse, mask, scale))
    assert lse.dtype == torch.float32
    np.testing.assert_allclose(lse[..., 0].numpy(), saved.lse, rtol=1e-6)  # of two programs' log
    for mine, other in zip(ours, theirs):
        other = other.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        assert other.shape == mine.shape and np.mean(mine == other) > 0.99
