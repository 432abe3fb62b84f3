"""Differences of files against direct computation, and the bias that the case built for it has."""
import csv
import json
import math

import h5py
import ml_dtypes
import numpy as np
import pytest

from cuflash import diff as module
from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.diff import diff, matches, ulp_errors
from cuflash.dump import read, recording
from cuflash.formats import round_to, ulp
from cuflash.model import checkpoint
from cuflash.model.gpt import GPTConfig, init_params
from cuflash.model.run import Run
from tests.test_cli import run
from tests.test_dump import inputs
from tests.test_statistics import paper_case


def record(path, q, k, v, do=None, **options):
    with recording(path):
        o, saved = flash_attention_forward(q, k, v, **options)
        if do is not None:
            flash_attention_backward(do, saved)
    return path


def wide(x):
    return x.astype(np.float64)


# ---- dumps --------------------------------------------------------------------------------------

def test_the_papers_case(tmp_path):
    """Two exact ties, V in [−4, −2], a rest of the same sign below 1e-4: half of the sums turn away."""
    q, k, v = paper_case(512, seed=31)
    for precision in ("bf16", "fp32"):
        record(tmp_path / f"{precision}.h5", q, k, v, precision=precision)
    found = diff(tmp_path / "bf16.h5", tmp_path / "fp32.h5")
    pv = next(s for s in found.sites if s.site == "attn.pv")
    assert pv.signed_ulp == pytest.approx(-0.25, abs=0.01) and pv.z < -50 and pv.values == 512 * 64
    assert found.first.site == "attn.p"  # of the rest: the first value that bf16 does not hold
    back = next(s for s in diff(tmp_path / "fp32.h5", tmp_path / "bf16.h5").sites if s.site == "attn.pv")
    assert back.signed_ulp == -pv.signed_ulp and back.se == pv.se
    text = run("diff", str(tmp_path / "bf16.h5"), str(tmp_path / "fp32.h5"), code=1)
    assert "first difference: fwd/L00/attn." in text
    line = next(line for line in text.splitlines() if "attn.pv" in line)
    assert "-0.25" in line or "-0.24" in line


def test_measures_against_direct_computation(tmp_path):
    q, k, v, do = inputs(2, 2, 2, 150, 150, 8, seed=32)
    a = record(tmp_path / "a.h5", q, k, v, do, causal=True, precision="bf16")
    b = record(tmp_path / "b.h5", q, k, v, do, causal=True, precision="fp32")
    found = {s.name: s for s in diff(a, b).sites}
    assert list(found) == list(read(a))
    for name in ("fwd/L00/attn.p", "fwd/L00/attn.o_acc", "bwd/L00/attn.dq", "bwd/L00/attn.dk_acc",
                 "fwd/L00/attn.x", "fwd/L00/attn.lse"):
        x, y = wide(read(a)[name]), wide(read(b)[name])
        shown = read(a).entry(name.rpartition("/")[2]).visible()
        shown = np.broadcast_to(True if shown is None else shown, x.shape)
        s = found[name]
        assert s.values == np.count_nonzero(shown) and (name.endswith(("dq", "lse")) or s.values < x.size)
        assert s.equal == np.mean((x == y)[shown])
        x, y = x[shown], y[shown]
        error = (x - y) / ulp(np.maximum(np.abs(y),
                                         np.abs(x) / 2), "fp32" if name.endswith("lse") else "bf16")
        assert s.max_abs == np.abs(x - y).max() and s.max_ulp == np.abs(error).max()
        # sums of fp64 numbers in another order
        assert s.signed_ulp == pytest.approx(error.mean(), rel=1e-9, abs=1e-12)
        assert s.mean_ulp == pytest.approx(np.abs(error).mean(), rel=1e-9)
        assert s.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
        whole = wide(read(a)[name])
        assert (s.a, s.b) == (whole[s.first], wide(read(b)[name])[s.first]) and s.a != s.b


def test_standard_error_of_independent_errors_and_of_columns_that_err_alike(tmp_path):
    rng = np.random.default_rng(33)
    x = rng.uniform(1, 2, (300, 200)).astype(np.float32)
    column = np.repeat(x[:1], 300, axis=0)
    write(tmp_path / "a.h5", free=round_to(x, "bf16").astype(ml_dtypes.bfloat16).astype(np.float16),
          column=round_to(column, "bf16"))
    write(tmp_path / "b.h5", free=x, column=column)
    found = {s.name: s for s in diff(tmp_path / "a.h5", tmp_path / "b.h5").sites}
    errors = (wide(round_to(x[0], "bf16")) - x[0]) / 2.0**-23
    assert found["column"].se == pytest.approx(errors.std(ddof=1) / math.sqrt(200), rel=1e-9)
    free = (wide(round_to(x, "bf16")) - x) / 2.0**-10
    # The larger of two estimates from 200 and 300 clusters, each good to 5 %
    assert found["free"].se == pytest.approx(free.std() / math.sqrt(x.size), rel=0.2)


def test_the_table_has_the_formats_and_no_z_of_errors_that_are_all_alike(tmp_path):
    q, k, v, _ = inputs(1, 2, 2, 20, 20, 8, seed=44)
    v[...] = 1.3
    a, b = (str(record(tmp_path / f"{p}.h5", q, k, v, precision=p)) for p in ("bf16", "fp32"))
    rows = {line.split()[0]: line.split() for line in run("diff", a, b, code=1).splitlines() if line[:2] == "  "}
    assert rows["A"][3] == "format"
    assert rows["fwd/L00/attn.q"][1] == "bf16/fp32" and rows["fwd/L00/attn.lse"][1] == "fp32"
    assert rows["fwd/L00/attn.v"][-4:-1] == ["±", "0", "–"] and float(rows["fwd/L00/attn.q"][-2])
    found = {s.site: s for s in diff(a, b).sites}
    assert found["attn.v"].se == 0 and math.isinf(found["attn.v"].z)


def test_equal_dumps_and_the_exit_code(tmp_path):
    q, k, v, do = inputs(1, 2, 1, 30, 30, 8, seed=34)
    a = record(tmp_path / "a.h5", q, k, v, do, precision="bf16-fa2")
    b = record(tmp_path / "b.h5", q, k, v, do, precision="bf16-fa2")
    found = diff(a, b)
    assert not found.differs and found.first is None and all(s.equal == 1 for s in found.sites)
    measured = [s for s in found.sites if s.site != "attn.dm"]  # −Inf alone: one tile
    assert all(s.max_abs == s.signed_ulp == s.z == 0 for s in measured)
    assert found.sites[0].cosine == pytest.approx(1, abs=1e-15)  # √Σa²·√Σa² is Σa² to a rounding
    text = run("diff", str(a), str(b))
    assert "the same bits" in text


def test_blocks_do_not_change_the_measures(tmp_path, monkeypatch):
    q, k, v, do = inputs(2, 2, 2, 90, 90, 8, seed=35)
    a = record(tmp_path / "a.h5", q, k, v, do, causal=True, precision="bf16")
    b = record(tmp_path / "b.h5", q, k, v, do, causal=True, precision="bf16-fa2")
    whole = diff(a, b)
    monkeypatch.setattr(module, "BLOCK", 700)
    parts = diff(a, b)
    assert whole.only_a == parts.only_a and "fwd/L00/attn.pv" in whole.only_a and whole.only_b == []
    for x, y in zip(whole.sites, parts.sites):
        for field in ("name", "values", "equal", "max_abs", "max_ulp", "first", "nonfinite"):
            np.testing.assert_equal(getattr(x, field), getattr(y, field), err_msg=f"{x.name} {field}")
        for field in ("signed_ulp", "se", "mean_ulp", "cosine"):  # sums in another order
            assert getattr(x, field) == pytest.approx(getattr(y, field), rel=1e-9, abs=1e-15,
                                                      nan_ok=True), (x.name, field)


# ---- any HDF5 -----------------------------------------------------------------------------------

def write(path, **arrays):
    with h5py.File(path, "w") as f:
        for name, a in arrays.items():
            f[name.replace("__", "/")] = a
    return path


def save(path, changed=None, n_embd=16):
    config = GPTConfig(n_layer=1, n_head=2, n_embd=n_embd, block_size=8)
    params = init_params(config, 1)
    for name, change in (changed or {}).items():
        params[name] = params[name] + change
    zeros = {n: np.zeros_like(p) for n, p in params.items()}
    checkpoint.save(path, checkpoint.State(1, params, zeros, zeros),
                    checkpoint.Header(config, "", "off", 1, "", "bytes"))
    return path


def test_any_two_files(tmp_path):
    nan, inf = np.nan, np.inf
    a = write(tmp_path / "a.h5", g__x=np.float32([1, -0.0, nan, inf, inf, 5]), n=np.int64([2**60, 3]),
              t=b"same", s=np.float64(2), shape=np.zeros(3), mine=np.zeros(2), empty=np.zeros(
                  (0, 3)), flag=np.array([True, False]))
    b = write(tmp_path / "b.h5", g__x=np.float64([1, 0.0, nan, inf, -inf, 5.5]), n=np.int64([2**60 + 1, 3]),
              t=b"same", s=np.float64(2), shape=np.zeros(4), yours=np.zeros(2), empty=np.zeros(
                  (0, 3)), flag=np.array([True, True]))
    found = diff(a, b)
    by = {s.name: s for s in found.sites}
    x = by["g/x"]
    assert x.values == 6 and x.equal == 0.5 and x.first == (1,) and x.nonfinite == 1 and x.max_abs == 0.5
    assert x.max_ulp == 0.5 / 2**-21  # in fp32 ulp of 5.5
    assert by["n"].equal == 0.5 and by["n"].first == (0,) and math.isnan(by["n"].signed_ulp)
    assert not by["t"].differs and not by["s"].differs and not by["empty"].differs
    assert by["shape"].shapes == ((3,), (4,)) and by["shape"].differs and by["flag"].differs
    assert found.only_a == ["mine"] and found.only_b == ["yours"]
    assert [s.name for s in diff(a, b, ["g/*"]).sites] == ["g/x"]


def test_what_holds_no_real_numbers_is_the_same_or_not(tmp_path):
    words = np.array([b"a", b"bc"])
    a = write(tmp_path / "a.h5", c=np.array([1 + 1j, 2, np.nan]), same=np.complex64([1j, 0]), t=words, mixed=words,
              real=np.float32([1, 2]))
    b = write(tmp_path / "b.h5", c=np.array([1 + 5j, 2, np.nan]), same=np.complex128([1j, 0]), t=words,
              mixed=np.zeros(2), real=np.complex64([1, 2 + 1j]))
    found = {s.name: s for s in diff(a, b).sites}
    assert {n: s.equal for n, s in found.items()} == {"c": 2 / 3, "same": 1, "t": 1, "mixed": 0, "real": 0.5}
    assert found["c"].first == (0,) and math.isnan(found["c"].signed_ulp)


@pytest.mark.parametrize("narrow, message", [
    (("heads", [0], [1]), "fwd/L00/attn.q: heads 0 in .*a.h5, 1 in .*b.h5: give two dumps of the same heads"),
    (("batch", [0], [1]), "fwd/L00/attn.q: samples 0 in .*a.h5, 1 in .*b.h5: give two dumps of the same samples"),
    (("rows", [0, 2], [0, 3]), "fwd/L00/attn.q: rows 0, 2 in .*a.h5, 0, 3 in .*b.h5: give two dumps of the same rows"),
    (("heads", [0], None), "fwd/L00/attn.q: heads 0 in .*a.h5, 0, 1 in .*b.h5: give two dumps of the same heads"),
    (("batch", None, [1]), "fwd/L00/attn.q: samples 0, 1 in .*a.h5, 1 in .*b.h5: give two dumps of the same samples"),
    (("rows", [3], None), "fwd/L00/attn.q: rows 3 in .*a.h5, 0-19 in .*b.h5: give two dumps of the same rows"),
    (("rows", [0, 2], [0]), "fwd/L00/attn.q: rows 0, 2 in .*a.h5, 0 in .*b.h5: give two dumps of the same rows"),
    (("rows", None, range(20)), None),
])
def test_other_heads_samples_or_rows_are_not_compared(tmp_path, narrow, message):
    q, k, v, _ = inputs(2, 2, 2, 20, 20, 8, seed=39)
    option, *chosen = narrow
    for name, numbers in zip("ab", chosen):
        with recording(tmp_path / f"{name}.h5", **{option: numbers}):
            flash_attention_forward(q, k, v, precision="bf16")
    if message is None:
        assert not diff(tmp_path / "a.h5", tmp_path / "b.h5").differs
        return
    with pytest.raises(ValueError, match=message):
        diff(tmp_path / "a.h5", tmp_path / "b.h5")
    with pytest.raises(ValueError, match=message):
        ulp_errors(read(tmp_path / "a.h5"), read(tmp_path / "b.h5"), "attn.q")


def test_other_lengths_are_other_shapes(tmp_path):
    for name, length in (("a", 20), ("b", 30)):
        record(tmp_path / f"{name}.h5", *inputs(1, 1, 1, length, length, 8, seed=42)[:3], precision="bf16")
    found = diff(tmp_path / "a.h5", tmp_path / "b.h5")
    assert found.sites[0].shapes == ((1, 1, 20, 8), (1, 1, 30, 8)) and found.notes == []


def test_dumps_of_other_steps_seeds_or_data_are_noted(tmp_path):
    q, k, v, _ = inputs(1, 1, 1, 20, 20, 8, seed=43)
    for name, value in (("a", v), ("b", v + 1)):
        record(tmp_path / f"{name}.h5", q, k, value, precision="bf16")
    a, b, out = (str(tmp_path / name) for name in ("a.h5", "b.h5", "x.json"))
    assert diff(a, b).notes == [] and "note" not in run("diff", a, b, code=1)
    with h5py.File(a, "r+") as f, h5py.File(b, "r+") as g:
        f.attrs.update({"step": 101, "checkpoint": 100, "data_sha256": "0123456789"})
        g.attrs.update({"step": 301, "checkpoint": 300, "data_sha256": "0123456789"})
    note = f"{a} is of step 101, {b} of step 301"
    assert run("diff", a, b, "--json", out, code=1).splitlines()[0] == f"note: {note}"
    assert json.loads((tmp_path / "x.json").read_text())["notes"] == [note] == diff(a, b).notes
    with h5py.File(b, "r+") as g:
        g.attrs.update({"step": 101, "checkpoint": 101, "data_sha256": "abcdefghij", "seed": 7})
    assert diff(a, b).notes == [(f"{a} is of seed 0 and data 01234567 and checkpoint 100, "
                                f"{b} of seed 7 and data abcdefgh and checkpoint 101")]


def test_an_ulp_is_the_larger_one_of_two_formats_that_cover_other_ranges(tmp_path):
    """Among fp16's subnormals bf16 is the finer one, among its normal numbers fp16."""
    values = {"a": np.float16([1, 2**-20]), "b": np.float32([1 + 2**-10, 2**-20 + 2**-27])}
    q, k, v, _ = inputs(1, 1, 1, 2, 2, 1, seed=40)
    for name, precision in (("a", "all-fp16"), ("b", "all-bf16")):
        v[0, 0, :, 0] = values[name]
        with recording(tmp_path / f"{name}.h5", "attn.v"):
            flash_attention_forward(q, k, v, precision=precision)
    x, y = (wide(read(tmp_path / f"{n}.h5").read("attn.v"))[0, 0, :, 0] for n in "ab")
    assert x[1] != y[1] or x[0] != y[0]
    (s,) = diff(tmp_path / "a.h5", tmp_path / "b.h5").sites
    assert s.max_ulp == max(abs(x[0] - y[0]) / 2**-7, abs(x[1] - y[1]) / 2**-24)


def test_bf16_files_differ_in_bf16_ulp(tmp_path):
    q, k, v, _ = inputs(1, 1, 1, 20, 20, 8, seed=36)
    a, b = (record(tmp_path / f"{n}.h5", q, k, x, precision="bf16")
            for n, x in (("a", v), ("b", v * np.float32(1 + 2**-7))))
    s = next(s for s in diff(a, b).sites if s.site == "attn.v")
    x, y = wide(read(a).read("attn.v")), wide(read(b).read("attn.v"))
    assert s.max_ulp == np.abs((x - y) / ulp(np.maximum(np.abs(y), np.abs(x) / 2), "bf16")).max()
    assert s.formats == ("bf16", "bf16")


def test_an_ulp_is_that_of_the_rounded_value_and_bounded_near_zero(tmp_path):
    fine = np.float32([1.9999, 1e-30, 0, 3])
    coarse = np.array([2, 0.5, 0.25, 3], ml_dtypes.bfloat16).astype(np.float16)
    a, b = write(tmp_path / "a.h5", x=coarse), write(tmp_path / "b.h5", x=fine)
    s = diff(a, b).sites[0]
    # 2 is a rounding of 1.9999, whose ulp is half as large; 0.5 − 1e-30 counts in ulp of 0.25
    expected = [float(2 - np.float64(fine[0])) / 2**-10, 0.5 / 2**-12, 0.25 / 2**-13, 0]
    assert s.max_ulp == 2048 and s.signed_ulp == pytest.approx(np.mean(expected), rel=1e-12)


@pytest.mark.parametrize("name, patterns, wanted", [
    ("fwd/L01/attn.p", ["attn.p"], True),
    ("fwd/L01/attn.pv", ["attn.p"], False),
    ("fwd/L01/attn.p", ["attn"], True),
    ("fwd/L01/attn.p", ["fwd/L01"], True),
    ("fwd/L11/attn.p", ["fwd/L1"], False),
    ("fwd/L01/c_fc/linear.y", ["c_fc/linear.y"], True),
    ("fwd/L01/attn.p", ["*/L0[01]/attn.?"], True),
    ("bwd/L01/attn.p", ["fwd/*"], False),
])
def test_names(name, patterns, wanted):
    assert matches(name, patterns) is wanted


# ---- the command --------------------------------------------------------------------------------

def test_csv_json_sorted_filtered(tmp_path):
    q, k, v, do = inputs(1, 1, 1, 40, 40, 8, seed=38)
    a = record(tmp_path / "a.h5", q, k, v, do, precision="bf16")
    b = record(tmp_path / "b.h5", q, k, v, do, precision="fp32")
    text = run("diff", str(a), str(b), "--site", "attn.p", "--site", "fwd/*/attn.o*", "--csv",
               str(tmp_path / "x.csv"), "--json", str(tmp_path / "x.json"), code=1)
    data = json.loads((tmp_path / "x.json").read_text())
    names = [s["name"] for s in data["sites"]]
    assert names == [f"fwd/L00/attn.{s}" for s in ("p", "o_scaled", "o_acc", "o")] and data["differs"] is True
    with open(tmp_path / "x.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [r["name"]
            for r in rows] == names and float(rows[0]["signed_ulp"]) == data["sites"][0]["signed_ulp"]
    assert max(len(line) for line in text.splitlines()) <= 110
    order = [
        line.split()[0] for line in run("diff", str(a), str(b), "--sort", "equal", code=1).splitlines()
        if line.startswith("  fwd/")
    ]
    equal = {s.name: s.equal for s in diff(a, b).sites}
    assert [equal[n] for n in order] == sorted(equal[n] for n in order) and len(order) > 5


def test_mistakes_of_the_command(tmp_path):
    a = write(tmp_path / "a.h5", x=np.zeros(2))
    b = write(tmp_path / "b.h5", y=np.zeros(2))
    (tmp_path / "text.h5").write_text("hello")
    for arguments, message in ((("a.h5", "b.h5"), "no dataset has one name in"),
                               (("a.h5", "none.h5"), "no such file"), (("a.h5", "text.h5"),
                                                                       "not an HDF5 file"),
                               (("a.h5", "."), "is not a run folder"), (("a.h5", "a.h5", "--site", "xx"), "did you mean 'x'?"),
                               (("a.h5", "b.h5", "--sites", "x,y"), "no dataset of those chosen by x, y has one name in"),
                               (("a.h5", "b.h5@3"), "b.h5@3: no such file or run folder")):
        text = run("diff", *(str(tmp_path / x) if x == "." or ".h5" in x else x for x in arguments),
                   code=2)
        assert message in " ".join(text.split()) and "Traceback" not in text, text
    assert a and b


@pytest.mark.parametrize("option", [("--sites", "h.0"), ("--sort", "ulp")])
def test_runs_take_no_options_of_dumps(tmp_path, option):
    folders = []
    for name in "ab":
        folders.append(Run.create(tmp_path / name, {}))
        save(folders[-1].checkpoint_path(3))
    text = run("diff", *(str(r.path) for r in folders), *option, code=2)
    assert f"{option[0]} is for dumps; runs are compared weight by weight" in text


def test_sites_are_named_as_elsewhere(tmp_path):
    q, k, v, do = inputs(1, 2, 1, 30, 30, 8, seed=45)
    a, b = (str(record(tmp_path / f"{p}.h5", q, k, v, do, precision=p)) for p in ("bf16", "fp32"))
    text = run("diff", a, b, "--sites", "attn.p,fwd/*/attn.o", code=1)
    assert text == run("diff", a, b, "--site", "attn.p", "--sites", "fwd/*/attn.o", code=1)
    rows = [line.split()[0] for line in text.splitlines() if line[:2] == "  "]
    assert rows == ["A", "fwd/L00/attn.p", "fwd/L00/attn.o"]
    for name, near in (("attn.oo", "'attn.o'"), ("fwd/L0/attn.p", "'fwd/L00/attn.p'")):
        text = run("diff", a, b, "--sites", f"attn.p,{name}", code=2)
        assert f"unknown site in {a} and {b} '{name}': did you mean " in text and near in text


def test_steps_of_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, steps in (("a", (3, 6, 9)), ("b", (3, 7))):
        folder = Run.create(tmp_path / name, {})
        for step in steps:
            save(folder.checkpoint_path(step), {"ln_f.weight": np.float32(step)})
    text = run("diff", "a@3", "a@6", "--json", "x.json", code=1)
    assert text.startswith("weights at step 3 and 6, A − B")
    (row,) = (line.split() for line in text.splitlines() if line.split()[0] == "ln_f.weight")
    assert float(row[2]) == 3 and json.loads((tmp_path / "x.json").read_text())["step"] == [3, 6]
    assert run("diff", "a@9", "a", "--csv", "x.csv").startswith("weights at step 9: ")  # the last
    assert run("diff", "a@3", "b@3").startswith("weights at step 3: ")
    assert run("diff", "a", "b").startswith("weights at step 3: ")  # the last that both have
    for arguments, message in ((("a@4", "a"), "RUN a@4: no such checkpoint in a; it has 3, 6, 9"),
                               (("a@3", "a", "--step", "6"), "--step 6: a@3 names its step; drop one of them"),
                               (("a", "b@3", "--step", "3"), "--step 3: b@3 names its step"),
                               (("a", "b", "--step", "6"), "--step 6: no such checkpoint in b; it has 3, 7"),
                               (("a@3", "x.json"), "are a file and a run"), (("c@3", "a"), "are a file and a run")):
        assert message in run("diff", *arguments, code=2)


def test_runs_of_the_same_bits_are_one_line_and_only_what_differs_is_listed(tmp_path):
    def folder(name, change=None):
        run = Run.create(tmp_path / name, {})
        save(run.checkpoint_path(3), change)
        return str(run.path)

    a, b, c = folder("a"), folder("b"), folder("c", {"ln_f.weight": np.float32(0.5)})
    (line,) = run("diff", a, b, code=0).splitlines()
    assert line.startswith("weights at step 3: ") and line.endswith(" numbers, all of them the same bits")
    assert len(run("diff", a, b, "--all", code=0).splitlines()) > 10
    text = run("diff", a, c, code=1)
    assert [x.split()[0] for x in text.splitlines()[2:-1]] == ["ln_f.weight", "all"]
    assert text.splitlines()[-1].startswith("the same bits in ")
