"""The audit on cases whose answer is known, and the files it reads."""
import json

import h5py
import ml_dtypes
import numpy as np
import pytest

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.audit import Capture, audit
from cuflash.precision import Precision
from cuflash.site_table import SITES
from cuflash.statistics import SIGNIFICANT
from cuflash.tensor_file import read_tensors
from cuflash.watching import Only, wants
from tests.test_statistics import paper_case

BF16 = ml_dtypes.bfloat16


def normal(*shape, seed=0, heads=None):
    rng = np.random.default_rng(seed)
    kv = shape if heads is None else (*shape[:-3], heads, *shape[-2:])
    return [rng.standard_normal(s).astype(np.float32) for s in (shape, kv, kv, shape)]


@pytest.fixture(scope="module")
def paper():
    q, k, v = paper_case(512, seed=11)
    do = -np.abs(np.random.default_rng(12).standard_normal(q.shape)).astype(np.float32) * 1e-3
    return Capture.of(q, k, v, do)


# ---- what it finds ------------------------------------------------------------------------------

def test_the_papers_case(paper):
    found = audit(paper, "bf16")
    first = found.sites[0]
    assert first.site == "attn.pv" and first.mean == pytest.approx(-0.25, abs=0.01)
    # dO and the error of O are negative, so δ comes out too large, in every row
    assert found.judged is found.delta
    assert found.delta.z > 20 and found.delta.positive > 0.99
    removed = {c.change for c in found.cures if c.removes}
    assert {
        "--set delta_from=p_dp",
        "--set delta_from=o_fp32",
        "--round attn=fp32",
    } <= removed  # the paper's cures
    left = {c.change: c.left for c in found.cures}
    # Ō rounded anywhere on its way keeps the bias, and so does S in fp32
    for change in ("--round attn.pv=fp32", "--round attn.o_acc=fp32", "--round attn.s=fp32"):
        assert left[change] == pytest.approx(1, abs=0.05) and change not in removed
    assert left["--fix on"] < 0.2
    assert [c.left for c in found.cures] == sorted(c.left for c in found.cures)


def test_a_pass_asks_for_what_it_keeps(monkeypatch):
    """On a GPU the rest would be brought to the host."""
    asked = []

    def launched(*args, watch, **options):
        asked.append({site for site in SITES for d in ("fwd", "bwd") if wants(watch, d, 0, "", site, 0)})
        return flash_attention_forward(*args, watch=watch, **options)
    monkeypatch.setattr("cuflash.audit.flash_attention_forward", launched)
    capture, kept = Capture.of(*normal(1, 1, 4, 4)), {"attn.delta", "attn.lse", "attn.dq"}
    capture.run(Precision.named("bf16"))
    capture.run(Precision.named("bf16"), watch=Only(lambda *value: None, lambda *place: place[3] == "attn.p"))
    capture.run(Precision.named("bf16"), watch=lambda *value: None)
    assert asked == [kept, kept | {"attn.p"}, set(SITES)]


def test_first_row_and_keys_of_the_papers_case(paper):
    found = audit(paper, "bf16", cures=False)
    assert found.cures == [] and found.judged is found.delta
    n, f = found.tied_rows, found.first
    assert n["rows"] == 512 and n["values"] == 512 * 64
    assert n["away"] == n["ties"] and n["toward"] == 0  # the rest has the sign of V everywhere
    assert n["ties"] == pytest.approx(
        512 * 64 / 2, rel=0.05
    )  # half of the sums: ±2 % is four standard errors
    assert (f.site, f.sample, f.head, f.row, f.keys) == ("attn.pv", 0, 0, 0, (0, 1))
    assert f.v == tuple(paper.v[0, 0, :2, f.feature]) and f.tied == sum(f.v)
    assert abs(f.tied / f.ulp % 1) == 0.5 and abs(f.exact) > abs(f.tied)
    assert f.rounded == f.tied - f.ulp / 2  # away from zero: V is negative
    before = [sum(paper.v[0, 0, :2, d]) / f.ulp % 1 == 0.5 for d in range(f.feature)]
    assert not any(before)


def test_ties_are_found_over_tiles_and_only_where_the_maximum_stays():
    """Keys 3 and 40 tie in different tiles of 16, later 20 and 40, until key 40 is the only maximum."""
    q, k = np.ones((1, 1, 1, 16), np.float32), np.full((1, 1, 48, 16), -3, np.float32)
    k[..., 3, :] = k[..., 40, :] = 1
    k[..., 20, :] = -1
    v = np.full((1, 1, 48, 16), -2 - 2**-6, np.float32)
    v[..., 3, :] = -2
    precision = Precision.named("bf16").replace(tile=(16, 16))
    assert audit(Capture.of(q, k, v), precision).tied_rows["rows"] == 0  # attn.pv sees a tile at a time
    f = audit(Capture.of(q, k, v), precision.round("attn.pv=fp32", "attn.o_scaled=fp32")).first
    assert (f.site, f.keys, f.v) == ("attn.o_acc", (3, 40), (-2.0, -2 - 2**-6))
    k[..., 20, :] = 1
    k[..., 3, :] = 0.5
    assert audit(Capture.of(q, k, v), "bf16-fa2").tied_rows["rows"] == 1
    k[..., 40, :] = 2
    assert audit(Capture.of(q, k, v), "bf16-fa2").tied_rows["rows"] == 0


@pytest.mark.parametrize("precision", ["bf16", "bf16-fa2"])
def test_normal_inputs(precision):
    q, k, v, do = normal(1, 4, 128, 32, seed=13)
    found = audit(Capture.of(q, k, v, do, causal=True), precision)
    assert found.judged is None and found.cures == []
    for s in found.sites:  # P is one-signed and S in bf16 discrete, so a small bias of P is real
        assert abs(s.z) < SIGNIFICANT or s.site in ("attn.p", "attn.p_bwd") and abs(s.mean) < 0.02, s
    assert found.sites == sorted(found.sites, key=lambda s: -s.bias)
    assert all(1e-4 < e < 2e-2 for e in found.errors.values())


def test_fp32_is_near_golden_and_rounds_at_no_site():
    q, k, v, do = normal(2, 2, 40, 16, seed=14)
    found = audit(Capture.of(q, k, v, do), "fp32")
    assert found.sites == [] and found.exact == []
    assert all(e < 1e-5 for e in found.errors.values())


def test_without_do():
    q, k, v, _ = normal(1, 2, 40, 16, seed=15)
    found = audit(Capture.of(q, k, v), "bf16")
    assert found.delta is None and found.judged is None and found.cures == [] and list(found.errors) == ["o"]
    assert {s.direction for s in found.sites} == {"fwd"}


def test_golden_delta_is_what_backward_uses():
    q, k, v, do = normal(1, 2, 20, 8, seed=16)
    capture = Capture.of(q, k, v, do, causal=True, scale=0.3)
    o, saved = flash_attention_forward(*(x.astype(np.float64) for x in (q, k, v)), causal=True, scale=0.3)
    assert np.allclose(capture.golden.delta, (do * o).sum(-1), rtol=1e-12)
    for got, expected in zip(
        (capture.golden.dq, capture.golden.dk), flash_attention_backward(do.astype(float), saved)
    ):
        assert np.array_equal(got, expected)


def test_narrowing_and_layouts_give_the_same_audit():
    q, k, v, do = normal(3, 4, 24, 16, seed=17, heads=2)
    precision = Precision.named("bf16").round("H2/attn.s=fp32", "L5/attn.o=fp32")
    narrow = Capture.of(q, k, v, do, heads=[2], batch=[1], layer=5)
    sliced = Capture.of(q[1:2, 2:3], k[1:2, 1:2], v[1:2, 1:2], do[1:2, 2:3])
    same = audit(sliced, Precision.named("bf16").round("attn.s=fp32", "attn.o=fp32"))
    found = audit(narrow, precision)
    assert found.errors == same.errors and found.delta == same.delta
    assert {s.head for s in found.sites_by_head} == {2} and found.delta_heads[0].head == 2
    turned = [x.swapaxes(1, 2) for x in (q, k, v, do)]
    assert (
        audit(Capture.of(*turned, layout="bthd"), "bf16").errors
        == audit(Capture.of(q, k, v, do), "bf16").errors
    )
    three = [x[0] for x in (q, k, v, do)]
    two = [x[0, 0] for x in (q, k, v, do)]
    assert Capture.of(*three).q.shape == (1, 4, 24, 16) and Capture.of(*two).k.shape == (1, 1, 24, 16)


def test_samples_in_groups_or_one_by_one_are_the_same(monkeypatch):
    q, k, v, do = normal(5, 1, 12, 8, seed=18)
    capture = Capture.of(q, k, v, do, batch=[0, 1, 3, 4])
    together = list(capture._together())
    assert together == [(0, 2), (2, 4)]
    whole = capture.run(Precision.named("bf16").round("attn.o=bf16:sr"))
    monkeypatch.setattr(Capture, "_together", lambda self: iter([(i, i + 1) for i in range(4)]))
    single = capture.run(Precision.named("bf16").round("attn.o=bf16:sr"))
    for name in ("o", "delta", "dq", "dk", "dv"):
        assert np.array_equal(getattr(whole, name), getattr(single, name)), name


def test_progress_ends_at_its_total():
    q, k, v, do = normal(2, 2, 20, 8, seed=19)
    ends = {}
    audit(
        Capture.of(q, k, v, do),
        "bf16",
        progress=lambda phase, done, total: ends.update({phase: (done, total)}),
    )
    assert list(ends)[:2] == ["golden", "bf16-paper"] and all(done == total for done, total in ends.values())


def test_json(paper):
    text = json.dumps(audit(paper, "bf16").to_dict(), default=float)
    data = json.loads(text)
    assert (
        data["sites"][0]["site"] == "attn.pv"
        and data["delta"]["rows"] == 512
        and data["first"]["keys"] == [0, 1]
    )
    assert Precision.from_toml(data["precision"]["toml"]) == Precision.named("bf16")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layout": "bhdt"}, "unknown layout 'bhdt'"),
        ({"heads": [4]}, "heads 4: valid: 0 to 1"),
        ({"batch": []}, r"batch none: valid: 0 to 0"),
        ({"do": np.zeros((1, 2, 9, 8), np.float32)}, r"do has shape \(1, 2, 9, 8\)"),
        ({"k": np.zeros((1, 2, 9, 4), np.float32)}, r"k and v differ in shape: \(1, 2, 9, 4\) and"),
        ({n: np.zeros((1, 2, 9, 4), np.float32) for n in "kv"}, r"k \(1, 2, 9, 4\) must agree in batch and head_dim"),
        ({"q": np.zeros(3, np.float32)}, r"q has shape \(3,\); layout bhtd needs"),
        (
            {"v": np.full((1, 2, 10, 8), np.nan, np.float32)},
            r"v holds 160 NaN or Inf, the first at \[0, 0, 0, 0\]",
        ),
        ({"q": np.zeros((1, 2, 0, 8), np.float32), "do": None}, "nothing to audit"),
    ],
)
def test_mistakes(change, message):
    q, k, v, do = normal(1, 2, 10, 8)
    with pytest.raises(ValueError, match=message):
        Capture.of(**({"q": q, "k": k, "v": v, "do": do} | change))


def test_integers_and_fp64_are_refused():
    q, k, v, do = normal(1, 2, 10, 8)
    with pytest.raises(TypeError, match="q has dtype int64|dtype int64"):
        Capture.of(q.astype(int), k.astype(int), v.astype(int))
    with pytest.raises(ValueError, match="golden itself"):
        audit(Capture.of(q, k, v, do), "fp64")


# ---- files --------------------------------------------------------------------------------------

def safetensors(path, arrays, **header_changes):
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}
    header, data = {"__metadata__": {"from": "test"}}, b""
    for name, a in arrays.items():
        header[name] = {
            "dtype": names[a.dtype.name],
            "shape": list(a.shape),
            "data_offsets": [len(data), len(data) + a.nbytes],
        }
        data += a.tobytes()
    for name, change in header_changes.items():
        header[name] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def arrays():
    q, k, v, do = normal(1, 2, 6, 4, seed=20)
    return {"q": q.astype(BF16), "k": k.astype(BF16), "v": v.astype(BF16), "do": do}


def test_three_formats_hold_the_same(tmp_path):
    given = arrays()
    safetensors(tmp_path / "a.safetensors", given)
    np.savez(tmp_path / "a.npz", **given)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        bf16 = h5py.h5t.IEEE_F32LE.copy()
        bf16.set_fields(15, 7, 8, 0, 7)
        bf16.set_size(2)
        bf16.set_ebias(127)
        for name in "qkv":
            a = given[name]
            d = h5py.h5d.create(f.id, name.encode(), bf16, h5py.h5s.create_simple(a.shape))
            d.write(h5py.h5s.ALL, h5py.h5s.ALL, a.view(np.uint16).copy(), mtype=bf16)
        f["do"] = given["do"]
    for name in ("a.safetensors", "a.npz", "a.h5"):
        found = read_tensors(tmp_path / name, ("q", "k", "v"), ("do", "lse"))
        assert list(found) == ["q", "k", "v", "do"]
        assert all(np.array_equal(found[n].astype(np.float32), given[n].astype(np.float32)) for n in given)


def test_what_the_safetensors_package_writes(tmp_path):
    package = pytest.importorskip("safetensors.numpy", reason="the safetensors package is not installed")
    given = arrays()
    package.save_file(given, tmp_path / "a.safetensors")
    found = read_tensors(tmp_path / "a.safetensors", ("q", "k", "v", "do"))
    assert all(found[n].dtype == a.dtype and np.array_equal(found[n], a) for n, a in given.items())


def test_empty_and_scalar_tensors(tmp_path):
    given = {"q": np.zeros((0, 3), np.float32), "k": np.float32(7).reshape(())}
    found = read_tensors(safetensors(tmp_path / "a", given), ("q", "k"))
    assert found["q"].shape == (0, 3) and found["k"].shape == () and found["k"] == 7


@pytest.mark.parametrize("change, message", [
    ({"q": {"shape": [1, 2, 6, 5]}}, r"'q' has shape \[1, 2, 6, 5\] of BF16 in 96 bytes; it takes 120"),
    ({"q": {"dtype": "F4"}}, "'q' has dtype 'F4'; valid: F64"),
    ({"q": {"shape": [-1, 6]}}, "does not describe 'q'"),
    ({"q": {"data_offsets": [96]}}, "does not describe 'q'"),
    ({"do": {"data_offsets": [10**9, 10**9 + 192]}}, "is truncated: 'do' ends at byte"),
])
def test_damaged_safetensors(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_tensors(safetensors(tmp_path / "a", arrays(), **change), ("q", "do"))


def test_truncated_and_foreign_files(tmp_path):
    whole = safetensors(tmp_path / "a", arrays()).read_bytes()
    cases = {
        "header": (whole[:40], "is truncated: its safetensors header takes"),
        "empty": (b"", "is not a safetensors"),
        "data": (whole[:-1], "is truncated: 'do' ends at"),
        "text": (b"hello, world, hello", "is not a safetensors"),
        "json": ((20).to_bytes(8, "little") + b"{" + b"x" * 30, "header is not JSON"),
        "list": ((2).to_bytes(8, "little") + b"[]" + b"x" * 30, "is not a safetensors"),
        "zip": (b"PK\x03\x04" + b"x" * 40, "damaged npz"),
        "h5": (b"\x89HDF\r\n\x1a\n" + b"x" * 40, "damaged HDF5"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_tensors(tmp_path / name, ("q", "k", "v", "do"))


def test_missing_keys_are_listed_with_what_the_file_has(tmp_path):
    path = safetensors(tmp_path / "a", {n: np.zeros(1, np.float32) for n in ("query", "k", "w")})
    with pytest.raises(
        ValueError, match=r"has no q, v: it must have q, k, v and may have do; it has query, k, w"
    ):
        read_tensors(path, ("q", "k", "v"), ("do",))
    np.savez(tmp_path / "a.npz", k=np.zeros(1))
    with pytest.raises(ValueError, match="has no q: it must have q; it has k"):
        read_tensors(tmp_path / "a.npz", ("q",))


def test_integers_are_refused_before_they_could_be_widened():
    x = np.ones((1, 1, 4, 8), np.float32)
    with pytest.raises(TypeError, match="q has dtype int32; valid: float32"):
        Capture.of(np.full(x.shape, 2**24 + 1, np.int32), x, x)
