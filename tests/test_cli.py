"""info, sites, explain and audit as a user types them."""
import json
import sys
import unicodedata

import numpy as np
import pytest
from click.testing import CliRunner

import cuflash
from cuflash.cli.main import main
from cuflash.precision import Precision
from cuflash.site_table import SITES
from tests.test_audit import arrays, safetensors
from tests.test_statistics import paper_case


def run(*args, code=0):
    found = CliRunner().invoke(main, list(args))
    assert found.exit_code == code, found.output
    if code == 0:
        assert found.exception is None
    return found.output


def columns(text):
    """The widest line in terminal columns: combining marks take none."""
    return max(sum(not unicodedata.combining(c) for c in line) for line in text.splitlines())


def mistake(*args):
    """The one line of a user's mistake."""
    text = run(*args, code=2)
    assert "Traceback" not in text
    return next(line for line in text.splitlines() if line.startswith("Error: "))


# ---- info ---------------------------------------------------------------------------------------

def test_info():
    text = run("info")
    assert f"numerics version {cuflash.NUMERICS_VERSION}" in text and "numpy" in text
    for accumulator in ("sequential", "hopper", "ampere", "library", "exact"):
        assert accumulator in text
    assert columns(text) <= 100


@pytest.mark.parametrize("driver", [True, False])
def test_info_without_cupy_says_what_to_install(driver, monkeypatch):
    from cuflash import kernels
    monkeypatch.setattr(kernels, "_has_driver", lambda: driver)
    for f in (kernels.import_cupy, kernels.gpu_reason, kernels.nvrtc_reason):
        f.cache_clear()
        monkeypatch.setattr(kernels, f.__name__, f.__wrapped__)
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = cuflash.info()
    assert found.device is None and "pip install '.[cuda12]'" in found.compiler_reason
    assert ("pip install" if driver else "no NVIDIA driver") in found.device_reason
    assert all(where == {"cpu": "yes", "gpu": "no GPU"} for where in found.accumulators.values())
    text = " ".join(run("info").split())
    assert text.count("pip install '.[cuda12]'") == 1 and ("cannot be compiled: for the same reason" in text) == driver


def test_dump_sites_without_dumps_is_an_error(tmp_path):
    text = run("train", "--dump-sites", "attn", "--out", str(tmp_path / "a"), code=2)
    assert "say when there is one: --dump-every 100" in text and not (tmp_path / "a").exists()


def test_info_shows_of_a_long_banner_its_last_line_once(monkeypatch):
    from cuflash import kernels

    def fails():
        bar = "=" * 64
        raise ImportError(f"\n{bar}\nFailed to import CuPy.\n\nadvice\n\n"
                          f"Original error:\n  ImportError: libx.so: no\n{bar}\n")

    for f in (kernels.gpu_reason, kernels.nvrtc_reason):
        monkeypatch.setattr(kernels, f.__name__, f.__wrapped__)
    monkeypatch.setattr(kernels, "import_cupy", fails)
    text = run("info")
    assert text.count("(ImportError: libx.so: no)") == 1 and "advice" not in text and "====" not in text


@pytest.mark.parametrize(
    "capability, hopper, ampere",
    [
        (90, "yes", "no: it needs"),
        (80, "no: it needs", "yes"),
        (86, "no: it needs", "yes"),
        (120, "not checked", "no: it needs"),
    ],
)
def test_accumulators_of_a_device(monkeypatch, capability, hopper, ampere):
    from cuflash import environment, kernels
    monkeypatch.setattr(kernels, "gpu_reason", lambda: None)
    monkeypatch.setattr(
        environment, "_device", lambda: environment.Device("Test GPU", capability, 8 << 30, 10)
    )
    found = cuflash.info()
    assert found.accumulators["hopper"]["gpu"].startswith(hopper)
    assert found.accumulators["ampere"]["gpu"].startswith(ampere)
    assert found.accumulators["exact"]["gpu"].startswith("no")
    assert f"compute capability {capability / 10}, 8 GiB" in str(found)


# ---- sites --------------------------------------------------------------------------------------

def test_sites_side_by_side():
    text = run("sites")
    assert "\naxes: q query, k key, d head dim; " in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert all(site in rows for site in SITES)
    assert rows["attn.o_acc"].split()[1:6] == ["fwd", "qd", "fp32", "bf16", "fp32"]
    assert rows["attn.pv"].split()[3:6] == ["fp32", "bf16", "–"]
    assert rows["order"].split() == ["order", "eager", "eager", "fa2"]
    assert columns(text) <= 100


def test_sites_of_one_precision_with_changes():
    text = run(
        "sites",
        "bf16-fa2",
        "--round",
        "attn.o=fp16:rz",
        "--round",
        "L1/H0,6-8/attn.q=fp32",
        "--set",
        "delta_from=p_dp",
    )
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["attn.o"][3] == "fp16:rz" and rows["delta_from"] == ["delta_from", "p_dp"]
    assert "L1/H0,6-8/attn.q=fp32" in text
    assert columns(text) <= 100


def test_sites_toml_is_read_back(tmp_path):
    changes = ("--round", "attn.o=fp32", "--set", "tile=64,64")
    file = tmp_path / "mine.toml"
    file.write_text(run("sites", "bf16", *changes, "--toml"), encoding="utf-8")
    expected = Precision.named("bf16").set("tile=64,64").round("attn.o=fp32")
    assert Precision.from_toml(file.read_text(encoding="utf-8")) == expected
    assert run("sites", "bf16", "--diff", str(file)).split() == [
        "bf16-paper", expected.name, "attn.o", "bf16", "fp32", "tile", "default", "64,64"]
    assert "are the same" in run("sites", str(file), "--diff", str(file))


def test_sites_mistakes():
    assert "unknown precision 'bf61': did you mean 'bf16'" in mistake("sites", "bf61")
    assert "--toml needs a PRECISION" in mistake("sites", "--toml")
    assert "unknown site 'attn.pw': did you mean" in mistake("sites", "bf16", "--round", "attn.pw=fp32")
    assert "attn.pv does not exist on its own under order=fa2" in mistake(
        "sites", "bf16-fa2", "--round", "attn.pv=fp32"
    )
    assert "give one of them" in mistake("sites", "bf16", "--toml", "--diff", "fp32")


# ---- explain ------------------------------------------------------------------------------------

def test_explain_example_and_negative_numbers():
    assert "-0.014759540557861328" in run("explain")
    text = run("explain", "-2.40711546", "+", "-2.296875", "--format", "bf16")
    assert "-4.71875" in text and columns(text) <= 100
    assert run("explain", "--format", "bf16", "--", "-2.40711546", "+", "-2.296875") == text
    assert run("explain", "-2.40711546 + -2.296875") == text
    assert "-1e-05" in run("explain", "-1e-5") and "-inf stays -inf" in run("explain", "-inf")
    assert "accumulator hopper" in run("explain", "1.5*2.25", "-3e-5*1", "--accumulator", "hopper")


def test_explain_mistakes():
    assert "No such option '--fromat'. Did you mean '--format'?" in mistake(
        "explain", "1", "--fromat", "bf16"
    )
    assert "unknown format 'bf61'" in mistake("explain", "1", "--format", "bf61")
    assert "'one' is no number" in mistake("explain", "one")


# ---- audit --------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def paper_file(tmp_path_factory):
    q, k, v = paper_case(128, seed=21)
    do = -np.abs(np.random.default_rng(22).standard_normal(q.shape)).astype(np.float32) * 1e-3
    path = tmp_path_factory.mktemp("audit") / "paper.npz"
    np.savez(path, q=q, k=k, v=v, do=do)
    return str(path)


def test_audit_of_the_papers_case(paper_file, tmp_path):
    out = tmp_path / "audit.json"
    text = run("audit", paper_file, "--json", str(out))
    lines = text.splitlines()
    assert columns(text) <= 100
    first = next(i for i, line in enumerate(lines) if line.startswith("  site ")) + 1
    assert lines[first].split()[0] == "attn.pv" and lines[first].split()[3].startswith("-0.2")
    assert "first: batch 0, head 0, row 0" in text and "midway between two bf16" in text
    assert any("--set delta_from=p_dp" in line and line.endswith("removes") for line in lines)
    command = next(line for line in lines if "cuflash explain" in line).partition("cuflash ")[2].split()
    assert "guard 1, sticky 1" in run(*command)
    data = json.loads(out.read_text())
    assert [a["precision"]["name"] for a in data["audits"]] == ["bf16-paper", "bf16-fa2"]


def test_audit_options(tmp_path):
    given = arrays()
    path = str(safetensors(tmp_path / "a.safetensors", given))
    toml = tmp_path / "mine.toml"
    toml.write_text('base = "bf16"\n[sites]\n"attn.o" = "fp32"\n')
    text = run(
        "audit",
        path,
        "--precision",
        str(toml),
        "--precision",
        "all-fp16",
        "--causal",
        "--heads",
        "1",
        "--fix",
        "on",
        "--set",
        "delta_from=p_dp",
        "--no-cures",
        "--scale",
        "0.5",
    )
    assert (
        "attn.o=fp32" in text
        and "all-fp16" in text
        and "fix capped" in text
        and "heads 1" in text
        and "scale 0.5" in text
    )
    del given["do"]
    text = run("audit", str(safetensors(tmp_path / "b.safetensors", given)))
    assert "no do in the file, so left out: backward's sites, delta, the gradients" in text


def test_more_heads_than_tokens_are_noted(tmp_path):
    q, k, v = np.random.default_rng(4).standard_normal((3, 1, 12, 4, 8), dtype=np.float32)  # (batch, T, heads, head_dim)
    np.savez(tmp_path / "a.npz", q=q, k=k, v=v)
    note = "note: read as 12 heads of 4 tokens; if it is 4 heads of 12 tokens, say --layout bthd"
    path = str(tmp_path / "a.npz")
    assert note in run("audit", path, "--precision", "bf16").splitlines()
    assert "note: " not in run("audit", path, "--precision", "bf16", "--layout", "bthd")


def test_errors_that_are_all_alike_are_called_constant(tmp_path):
    q, k, do = np.random.default_rng(3).standard_normal((3, 1, 2, 64, 16), dtype=np.float32)
    np.savez(tmp_path / "a.npz", q=q, k=k, v=np.full_like(k, 1.3), do=do)
    lines = run("audit", str(tmp_path / "a.npz"), "--no-cures", "--precision", "bf16").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Constant errors: alike in all rows"))
    (row,) = (i for i, line in enumerate(lines) if line.split()[:1] == ["attn.v"])
    assert row > start and lines[row].split().count("const") == 2
    assert not [line for line in lines if "inf" in line]


def test_audit_says_why_sites_help_together_only(paper_file):
    text = " ".join(run("audit", paper_file, "--precision", "bf16").split())
    assert "attn.pv, attn.o_scaled, attn.o_acc, attn.o help together and not alone: the sum is rounded again" in text


def test_audit_mistakes(tmp_path, paper_file):
    given = arrays()
    path = str(safetensors(tmp_path / "a", given))
    assert "unknown precision 'bf61'" in mistake("audit", path, "--precision", "bf61")
    assert "unknown fix 'onn'" in mistake("audit", path, "--fix", "onn")
    assert "--heads 'x': write numbers" in mistake("audit", path, "--heads", "x")
    assert "heads 7: valid: 0 to 1" in mistake("audit", path, "--heads", "7")
    assert "unknown layout 'bthb'" in mistake("audit", path, "--layout", "bthb")
    assert "--scale is -1.0" in mistake("audit", path, "--scale", "-1")
    assert "fp64" in mistake("audit", path, "--precision", "fp64")
    assert "no such file or run folder" in mistake("audit", str(tmp_path / "none"))
    (tmp_path / "text").write_text("hello, world, hello, world")
    assert "is not a safetensors, npz or HDF5 file" in mistake("audit", str(tmp_path / "text"))
    del given["v"]
    assert "has no v: it must have q, k, v and may have do; it has q, k, do" in mistake(
        "audit", str(safetensors(tmp_path / "b", given)))
    missing = str(tmp_path / "no" / "folder.json")
    assert missing in mistake("audit", paper_file, "--json", missing, "--no-cures")
