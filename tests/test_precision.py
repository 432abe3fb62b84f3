"""Precisions: the site table, the `--round` grammar, switches, TOML, digests, messages."""
import re
from pathlib import Path

import pytest

from cuflash import Precision
from cuflash.precision import CANONICAL, Override, Rounding, as_precision
from cuflash.site_table import FA2_MERGED, PLAIN_MERGED, SITES

ROOT = Path(__file__).parent.parent


def sites(p):
    return {n: str(r) for n, r in p.table().items()}


def test_canonical_precisions_round_as_the_table_says():
    assert set(sites(Precision.named("fp32")).values()) == {"fp32"}
    bf16, fa2 = sites(Precision.named("bf16")), sites(Precision.named("bf16-fa2"))
    assert bf16["attn.pv"] == "bf16" and bf16["attn.l"] == "bf16" and bf16["attn.alpha"] == "fp32"
    assert fa2["attn.o_acc"] == "fp32" and fa2["attn.p"] == fa2["attn.o"] == "bf16"
    fp16 = sites(Precision.named("fp16-fa2"))
    assert {n for n in fa2 if fa2[n] == "bf16"} == {n for n in fp16 if fp16[n] == "fp16"}
    every = sites(Precision.named("all-e5m7"))
    assert all((f == "e5m7") == n.startswith("attn.") for n, f in every.items())
    stream = Precision.named("bf16").diff(Precision.named("bf16-stream"))
    assert set(stream) == {"embed", "residual.y", "residual.dx"}


def test_names():
    assert Precision.named("bf16") == Precision.named("bf16-paper")
    assert Precision.named("bf16").name == "bf16-paper"
    changed = Precision.named("bf16").round("attn.o=fp32")
    assert changed.name.startswith("bf16-paper+") and changed.describe() == "bf16-paper with attn.o=fp32"
    assert changed.round("attn.o=bf16") == Precision.named("bf16")


@pytest.mark.parametrize("name", [*CANONICAL, "all-fp8_e4m3"])
def test_toml_and_digest(name):
    p = Precision.named(name)
    if name != "fp64":
        p = p.round("bwd/L1/H0,6-8/attn.s=fp16:rz", "L0-2/c_fc/linear.y=fp32", "attn.o=e4m3")
    p = p.replace(tile=((64, 128), (128, 64), (None, None)), delta_from="p_dp")
    again = Precision.from_toml(p.to_toml())
    assert again == p and again.digest == p.digest and hash(again) == hash(p)
    other = p.replace(tile=(128, 128))
    assert other.digest != p.digest and p.diff(other) == {"tile": ("64,128/128,64/none,none", "128,128")}


def test_digest_does_not_depend_on_how_it_was_said():
    plain = [Precision.named(n).replace(algorithm="plain").digest for n in ("fp32", "fp64", "all-fp32")]
    assert plain[0] == plain[2] != plain[1]
    a = Precision.named("fp32").replace({"attn.o": "bf16"})
    b = Precision.from_toml('base = "fp32"\n[sites]\n"attn.o" = "bf16:rne"\n')
    assert a == b and a.digest == b.digest


def test_round_texts_apply_in_order():
    p = Precision.named("bf16")
    assert sites(p.round("attn=fp32")) | {n: "" for n in SITES if not n.startswith("attn.")} == \
        {n: "fp32" if n.startswith("attn.") else "" for n in SITES}
    scoped = p.round("L1/attn.o=fp32", "attn.o=fp16")
    assert scoped.sites_for("fwd", 1)["attn.o"] == Rounding("fp16")
    scoped = p.round("attn.o=fp16", "L1/H2/attn.o=fp32:rz")
    assert scoped.sites_for("fwd", 1, "", 2)["attn.o"] == Rounding("fp32", "rz")
    assert scoped.sites_for("fwd", 1, "", 1)["attn.o"] == scoped.sites_for("fwd", 0, "", 2)["attn.o"] == Rounding("fp16")
    module = p.round("L1/c_fc/linear.y=fp32")
    assert module.sites_for("fwd", 1, "c_fc")["linear.y"].format == "fp32"
    assert module.sites_for("fwd", 1, "c_attn")["linear.y"].format == "bf16"


@pytest.mark.parametrize("text", ["attn.o=bf16", "fwd/L1/attn.s=fp16:rz", "L0,2-4/H0,6-8/attn.o=fp32", "c_fc/linear.y=e5m3:sr"])
def test_overrides_print_as_they_are_written(text):
    assert str(Override.parse(text)) == text


def test_merged_sites():
    fa2 = Precision.named("bf16-fa2")
    assert fa2.merged == FA2_MERGED == {"attn.s_scaled", "attn.l_tile", "attn.l_scaled", "attn.pv", "attn.dk_tile", "attn.dv_tile"}
    with pytest.raises(ValueError, match="attn.pv does not exist on its own under order=fa2"):
        fa2.round("attn.pv=bf16")
    with pytest.raises(ValueError, match="attn.dm does not exist on its own under order=eager, algorithm=plain"):
        Precision.named("bf16").replace({"attn.dm": "bf16"}, algorithm="plain")
    plain = Precision.named("bf16").replace(algorithm="plain")
    assert plain.merged == PLAIN_MERGED and "attn.pv" not in plain.to_toml()
    assert fa2.round("attn=fp32").table()["attn.o"].format == "fp32"  # a prefix passes over merged sites
    assert fa2.replace({"attn.pv": "bf16"}, order="eager").table()["attn.pv"].format == "bf16"


def test_tiles_by_head_dim():
    fa2 = Precision.named("bf16-fa2")
    assert [fa2.tiles(d).forward for d in (64, 65, 192, 193)] == [(128, 128), (128, 64), (128, 64), (64, 64)]
    assert [fa2.tiles(d).dq for d in (64, 128, 129)] == [(128, 128), (64, 128), (64, 64)]
    assert Precision.named("bf16").tiles(256).dkdv == (128, 128)
    assert Precision.named("bf16").set("tile=none,none").tiles(64).forward == (None, None)


@pytest.mark.parametrize("make, match", [
    (lambda p: p.round("atn.o=bf16"), "unknown site 'atn.o': did you mean 'attn.o'"),
    (lambda p: Precision.named("bf16-fa2").round("attn.pv=fp32"), "order=eager has it, as in precision bf16"),
    (lambda p: p.round("attn.o=bf61"), "unknown format 'bf61': did you mean 'bf16'"),
    (lambda p: p.round("attn.o=bf16:rnd"), "unknown mode 'rnd'"),
    (lambda p: p.round("attn.o=fp64"), "fp64 is a precision, not a site's format"),
    (lambda p: p.round("attn.o"), "write .fwd/.bwd/"),
    (lambda p: p.round("fwdd/attn.o=bf16"), "unknown scope 'fwdd': did you mean 'fwd'"),
    (lambda p: p.round("H1/ln.y=bf16"), "only attention's sites have heads"),
    (lambda p: p.round("c_fc/attn.o=bf16"), "belong to no module"),
    (lambda p: p.round("fwd/attn.ds=bf16"), "attn.ds exists in bwd only"),
    (lambda p: p.round("attn.o=bf16:nofile.py:Mine"), "nofile.py: no such file"),
    (lambda p: p.round("L3-1/attn.o=fp32"), "range 3-1: write the smaller number first"),
    (lambda p: p.round("L1/L2/attn.o=fp32"), "two scopes of one kind"),
    (lambda p: p.round("L1/attn.pv=fp32").replace(algorithm="plain"), "attn.pv does not exist on its own"),
    (lambda p: Precision.named("fp64").replace(accumulator="hopper"), "precision fp64 has NumPy's own products"),
    (lambda p: Precision.from_toml("sites = 3"), "sites must be a table"),
    (lambda p: Precision.from_toml("base = 5"), "base must be a name"),
    (lambda p: Precision.from_toml('round = "attn=fp32"'), "round must be a list"),
    (lambda p: p.replace(tile=(128, 2**31 - 16)), r"a positive multiple of 16 up to 2\*\*20"),
    (lambda p: p.replace(tile=5), "give .Br, Bc. or three such pairs"),
    (lambda p: p.replace(tile=(128, 128, 128)), "give .Br, Bc. or three such pairs"),
    (lambda p: p.set("delta_frm=o"), "unknown switch 'delta_frm': did you mean 'delta_from'"),
    (lambda p: p.set("delta_from=p_d"), "unknown delta_from 'p_d': did you mean 'p_dp'"),
    (lambda p: p.set("tile=100,128"), "each a positive multiple of 16"),
    (lambda p: p.set("tile=128"), "write Br,Bc"),
    (lambda p: p.set("tile"), "write NAME=VALUE"),
    (lambda p: p.set("algorithm=plain", "l_from=rounded"), "l_from='rounded' has no meaning"),
    (lambda p: Precision.named("fp64").round("attn.o=bf16"), "precision fp64 rounds at no site"),
    (lambda p: Precision.named("all-bf61"), "unknown format 'bf61'"),
    (lambda p: Precision.from_toml("sites ="), "precision is not valid TOML"),
    (lambda p: Precision.from_toml("numerics_version = 99"), "numerics version 99"),
    (lambda p: as_precision("missing.toml"), "precision missing.toml: no such file"),
])
def test_messages(make, match):
    with pytest.raises(ValueError, match=match):
        make(Precision.named("bf16"))


@pytest.mark.parametrize("sites, example", [
    ("attn.o=fp16", "{'attn.o': 'fp16'}"), ("attn.o", "{'attn.o': 'fp32'}"), (["attn.o"], "{'attn.o': 'fp32'}")])
def test_replace_shows_how_sites_are_written(sites, example):
    with pytest.raises(TypeError) as e:
        Precision.named("bf16").replace(sites)
    assert f"sites must be a dict, not {sites!r}: write replace({example}), and switches by name" in str(e.value)


USER = """
from cuflash import Fix, Mode
import numpy as np

Dither = Mode("Dither", up=lambda fraction, rest, odd, negative, word: word < fraction, cuda="word < fraction", needs_key=True)

class Shift(Fix):
    name = "Shift"
    parameters = {"by": 1.0}
    cuda_rule = "__fadd_rn(r_m, by)"
    def rule(self, r_m, ties):
        return r_m + self.by
"""


def test_users_modes_and_fixes(tmp_path):
    import numpy as np

    from cuflash import Key
    from cuflash.attention import flash_attention, flash_attention_forward
    from cuflash.fixes import as_fix
    from cuflash.testing import equal
    file = tmp_path / "my.py"
    file.write_text(USER)
    x = np.random.default_rng(0).standard_normal((1, 2, 20, 16)).astype(np.float32)
    mine, sr = (Precision.named("fp32").replace({"attn.o": f"bf16:{mode}"}, accumulator="sequential") for mode in (f"{file}:Dither", "sr"))
    assert equal(flash_attention(x, x, x, precision=mine, key=Key(1)), flash_attention(x, x, x, precision=sr, key=Key(1)))
    assert Precision.from_toml(mine.to_toml()) == mine
    digest = mine.digest
    file.write_text(USER + "\n# another\n")
    assert mine.digest == digest != Precision.from_toml(mine.to_toml()).digest
    assert str(as_fix(f"{file}:Shift:by=3")) == "Shift:by=3"
    q = x.copy()
    q[:, :, 3] = 0  # a row of equal logits
    _, off = flash_attention_forward(q, x, x, precision="fp32")
    _, saved = flash_attention_forward(q, x, x, precision="fp32", fix=f"{file}:Shift:by=3")
    assert saved.stats.tolist() == [2, 2, 0] and off.stats.tolist() == [2, 0, 0]
    with pytest.raises(ValueError, match="has no 'Shft'; it has: Shift$"):
        as_fix(f"{file}:Shft")


@pytest.mark.parametrize("text, name, match", [
    ("syntax err(", "X", r"SyntaxError: .*\(line 1\)"),
    ("import no_such_module", "X", "ModuleNotFoundError: No module named 'no_such_module'.*line 1"),
    ("from cuflash import Fix\nclass X(Fix):\n    def rule(self, r_m, ties):\n        return 1 / 0", "X", "ZeroDivisionError.*line 4"),
    ("from cuflash import Fix\nclass X(Fix):\n    def rule(self, r_m, ties):\n        return r_m[:1]", "X",
     r"rule gave float32 of shape \(1,\) for three rows"),
    ("from cuflash import Fix\nclass X(Fix):\n    pass", "X", "X has no rule"),
    ("from cuflash import Fix\nclass X(Fix):\n    pass", "", "write FILE.py:NAME"),
    ("from cuflash import Fix\nclass X(Fix):\n    pass", "Y", r"has no 'Y'; it has: X$"),
])
def test_mistakes_in_a_users_fix_are_told_at_once(tmp_path, text, name, match):
    from cuflash.fixes import as_fix
    file = tmp_path / "my.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        as_fix(f"{file}:{name}")


@pytest.mark.parametrize("up, match", [
    ("lambda fraction: fraction > 0", "TypeError"), ("lambda fraction, rest, odd, negative, word: 1", r"up gave int64 of shape \(\)"),
])
def test_mistakes_in_a_users_mode_are_told_at_once(tmp_path, up, match):
    file = tmp_path / "my.py"
    file.write_text(f"from cuflash import Mode\nX = Mode('X', up={up})")
    with pytest.raises(ValueError, match=match):
        Precision.named("fp32").round(f"attn.o=bf16:{file}:X")


def test_an_edited_mode_is_loaded_again_and_known_by_its_text(tmp_path):
    import numpy as np
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    text = "from cuflash import Mode\nimport numpy as np\nX = Mode('X', up=lambda fraction, rest, odd, negative, word: {})"
    a.write_text(text.format("np.ones_like(rest)"))
    b.write_text(a.read_text())
    of = lambda file: Precision.named("fp32").round(f"attn.o=bf16:{file}:X")  # noqa: E731
    assert of(a).digest == of(b).digest
    from cuflash.attention import flash_attention
    v = np.full((1, 16), 1 + 2.0**-20, np.float32)
    assert (flash_attention(v, v, v, precision=of(a)).astype(float) == 1 + 2.0**-7).all()
    digest = of(a).digest
    a.write_text(text.format("np.zeros_like(rest)"))
    assert (flash_attention(v, v, v, precision=of(a)).astype(float) == 1).all() and of(a).digest != digest


def test_one_set_of_values_has_one_name():
    assert Precision.named("all-e5m10").table() == Precision.named("all-fp16").table()
    assert Precision.named("fp32").replace({"attn.o": "e8m7"}).digest == Precision.named("fp32").replace({"attn.o": "bf16"}).digest


def test_scopes_that_match_nothing_are_refused():
    p = Precision.named("bf16").round("L1/H0,6-8/attn.o=fp32")
    p.check_scopes(2, 9)
    p.check_scopes()
    with pytest.raises(ValueError, match="there is no head 6-8; the heads are 0 to 1"):
        p.check_scopes(2, 2)
    with pytest.raises(ValueError, match="there is no layer 1; the layers are 0 to 0"):
        p.check_scopes(1, 9)


def test_what_is_said_twice_is_kept_once():
    p = Precision.named("bf16")
    assert p.round("L1/attn.o=fp32", "attn=bf16", "attn.o=fp16").overrides == ()
    assert len(p.round("L1/attn.o=fp32", "L1/attn.o=fp16").overrides) == 1
    late = p.round("L1/attn=fp32", "attn.o=fp16")
    assert late.sites_for("fwd", 1)["attn.o"].format == "fp16" and late.sites_for("fwd", 1)["attn.p"].format == "fp32"
    assert late.describe() == "bf16-paper with attn.o=fp16, L1/attn=fp32"
    assert Precision.from_toml(late.to_toml()) == late and repr(late) == f"<cuflash.Precision {late.describe()}>"


@pytest.mark.parametrize("fix, match", [("capped:cap=-3", "cap is -3; valid: a finite number, 0 or more"),
                                        ("qiu-b2:beta=nan", "beta is nan"), ("capped:beta=0.5", "beta is 0.5")])
def test_parameters_of_fixes_have_bounds(fix, match):
    from cuflash.fixes import as_fix
    with pytest.raises(ValueError, match=match):
        as_fix(fix)


def test_table_reference_and_docs_name_the_same_sites():
    """A reader finds a rounding by its name: in the table, in the reference, in docs."""
    attention = {n for n in SITES if n.startswith("attn.")}
    code = "".join((ROOT / "cuflash" / f"{f}.py").read_text() for f in ("attention_forward", "attention_backward", "attention"))
    assert set(re.findall(r'rnd\("(attn\.\w+)"', code)) | {"attn.dk", "attn.dv"} == attention
    assert '"attn.dk")' in code and '"attn.dv")' in code
    docs = (ROOT / "docs" / "numerics.md").read_text()
    named = set(re.findall(r"`([a-z]+(?:\.[a-z_]+)?)`", docs))
    assert set(SITES) <= named
