"""Figures: what they show, in files that open; and the commands of docs/dumps.md as they are printed."""
import pathlib
import re
import shlex

import h5py
import numpy as np
import pytest

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.audit_map import ErrorMap
from cuflash.dump import read, recording
from cuflash.model.layers import Layers
from cuflash.model.run import Metrics, Run
from cuflash.precision import Precision
from tests.test_cli import run
from tests.test_dump import inputs
from tests.test_statistics import paper_case

pytest.importorskip("matplotlib", reason="matplotlib (extra plot) is not installed")
from cuflash import plot  # noqa: E402

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module", autouse=True)
def short_samples():
    """Training ends with a sample of text; here a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuflash.model.session.SAMPLE_TOKENS", 5)
        yield


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    q, k, v, do = inputs(1, 2, 2, 60, 60, 8, seed=51)
    for name, precision in (("a", "bf16"), ("b", "fp32")):
        with recording(folder / f"{name}.h5"):
            o, saved = flash_attention_forward(q, k, v, causal=True,
                                               precision=Precision.named(precision).replace(tile=(16, 16)))
            flash_attention_backward(do, saved)
    return folder


def texts(figure):
    return " | ".join(t.get_text() for ax in figure.axes
                      for t in (ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label))


def test_runs():
    rows = [{
        "step": s, "loss": 4 - s / 10, "norm": 1.0, "ties": s, "rows": 100,
        "val_loss": 3.0 if s == 4 else np.nan
    } for s in range(5)]
    figure = plot.runs({"one": rows, "two": rows[:3]})
    loss, norm, ties = figure.axes
    assert np.array_equal(loss.lines[0].get_ydata(), [4, 3.9, 3.8, 3.7, 3.6]) and len(loss.lines) == 4
    assert np.array_equal(ties.lines[1].get_ydata(), [0, 1, 2]) and norm.get_yscale() == "log"
    assert [t.get_text() for t in loss.get_legend().get_texts()] == ["one", "two", "validation"]
    assert loss.lines[0].get_color() != loss.lines[-2].get_color() and loss.lines[0].get_linestyle(
    ) != loss.lines[2].get_linestyle()
    (none,) = plot.runs({"none": [row | {"ties": 0} for row in rows]}).axes[2].lines
    low, high = none.axes.get_ylim()
    assert low < 0 == none.get_ydata().max() and high == 1  # above the axis, where it is seen
    for word in ("step", "nats a token", "% of attention's rows"):
        assert word in texts(figure)


def test_spectral():
    norms = {
        f"spectral/L0{i}/{n}": np.arange(3.0) + i
        for i in range(2)
        for n in ("q", "k", "v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    norms |= {f"spectral/L0{i}/q_heads": np.ones((3, 4)) * i for i in range(2)}
    figure = plot.spectral(np.array([10, 20, 30]), norms)
    left, right = figure.axes[:2]
    assert left.images[0].get_array().shape == (12, 3) and [t.get_text() for t in left.get_yticklabels()
                                                            ][:3] == ["L0 q", "L0 k", "L0 v"]
    assert len(right.lines) == 2 and np.array_equal(right.lines[1].get_ydata(), [1, 1, 1, 1])
    with pytest.raises(ValueError, match="no spectral norms"):
        plot.spectral(np.array([1]), {})
    sparse = {n: np.where(np.reshape([1, 0, 0], (-1, *[1] * (x.ndim - 1))), x, np.nan) for n, x in norms.items()}
    left, right = plot.spectral(np.array([10, 20, 30]), sparse).axes[:2]  # the other steps have statistics of sites
    assert left.images[0].get_array().shape == (12, 1) and "step 10" in right._left_title.get_text()
    assert np.array_equal(right.lines[1].get_ydata(), [1, 1, 1, 1])


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """`r`, that logged steps 10, 20 and 30."""
    monkeypatch.chdir(tmp_path)
    folder = Run.create("r", {})
    metrics = Metrics(folder.path / "metrics.csv", ["step", "loss", "norm", "ties", "rows", "val_loss"])
    layers = Layers()
    for step in (10, 20, 30):
        metrics.write({"step": step, "loss": 4.0, "norm": 1.0, "ties": 0, "rows": 100})
        layers.add(step, {f"spectral/L00/{n}": step for n in ("q", "k", "v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
                   | {"spectral/L00/q_heads": [step, step]})
    metrics.close()
    layers.save(folder.path / "layers.h5")
    return folder


def test_a_run_up_to_a_step(small_run, monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, *rest: figures.append(figure))
    run("plot", "r@20", "r", "-o", "x.png")
    run("plot", "r@20", "--kind", "spectral", "-o", "x.png")
    curves, spectral = figures
    assert [list(line.get_xdata()) for line in curves.axes[0].lines] == [[10, 20], [10, 20, 30]]
    assert [t.get_text() for t in curves.axes[0].get_legend().get_texts()] == ["r@20", "r"]
    assert np.array_equal(spectral.axes[1].lines[0].get_ydata(), [20, 20])
    for name, message in (("r@40", "r@40: the run has logged steps 10 to 30"), ("r@x", "r@x: no such file or run folder"),
                          ("s@20", "s@20: no such file or run folder")):
        assert message in run("plot", name, "-o", "x.png", code=2)


@pytest.mark.parametrize("name, kind", [("metrics.csv", "curves"), ("layers.h5", "spectral")])
def test_a_damaged_file_of_a_run_is_named(small_run, name, kind):
    data = (small_run.path / name).read_bytes()
    (small_run.path / name).write_bytes(data[:len(data) // 2] if kind == "spectral" else data.replace(b"4.0", b"4.x"))
    text = run("plot", "r", "--kind", kind, "-o", "x.png", code=2)
    assert f"r/{name}" in text and "damaged" in text


def test_sites_by_their_places(dumps, tmp_path):
    a, b = str(dumps / "a.h5"), str(dumps / "b.h5")
    for sources, sites in (((a,), "fwd/L00/attn.p"), ((a,), "L00/attn.s,attn.p"), ((a, b), "fwd/L00/attn.p,attn.o")):
        run("plot", *sources, "--sites", sites, "-o", str(tmp_path / "x.svg"))
        assert all(site in (tmp_path / "x.svg").read_text(encoding="utf-8") for site in sites.split(","))
    assert "fwd/L00/attn.p is not in" in run("plot", a, "--sites", "fwd/L00/attn.p", "--layer", "1", "-o", "x.svg", code=2)


def test_heat_maps(dumps):
    d = read(dumps / "a.h5")
    figure = plot.heat_maps(d, head=1)
    s, p = (ax.images[0].get_array() for ax in figure.axes[:2])
    hidden = ~np.tril(np.ones((60, 60), bool))
    assert np.array_equal(np.ma.getmaskarray(p), hidden)
    assert np.array_equal(p[~hidden], d.read("attn.p", head=1, sample=0).astype(float)[~hidden])
    assert s.min(
    ) < 0 and figure.axes[0].images[0].cmap.name == "PuOr" and figure.axes[1].images[0].cmap.name == "cividis"
    assert "attn.s in bf16, layer 0, head 1, sample 0" in texts(figure)
    with pytest.raises(ValueError, match="attn.o has axes sample, head, query, feature; a heat map"):
        plot.heat_maps(d, sites=["attn.o"])


def test_chosen_rows_of_a_heat_map_have_their_numbers(tmp_path):
    q, k, v, _ = inputs(1, 1, 1, 40, 40, 8, seed=55)
    for rows, shown in (([0, 7, 30], ["0", "7", "30"]), (range(20, 40), None)):
        with recording(tmp_path / "x.h5", rows=rows):
            flash_attention_forward(q, k, v, precision="bf16")
        figure = plot.heat_maps(read(tmp_path / "x.h5"))
        labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
        top, bottom = figure.axes[0].images[0].get_extent()[:1:-1]
        assert labels == shown if shown else (top, bottom) == (19.5, 39.5)
        assert bottom - top == len(rows)


@pytest.mark.parametrize("precision", ["bf16", "bf16-fa2"])
def test_a_row_is_rescaled_to_its_final_maximum(tmp_path, precision):
    q, k, v, _ = inputs(1, 1, 1, 60, 60, 8, seed=52)
    p = Precision.named(precision).replace(tile=(16, 16))
    with recording(tmp_path / "x.h5", layers=[0]):
        flash_attention_forward(q * 3, k, v, causal=True, precision=p)
    d = read(tmp_path / "x.h5")
    figure = plot.row(d, query=50, feature=3)
    top, bottom = figure.axes[0], figure.axes[1]
    shown = top.lines[0].get_ydata()
    s = (3 * q[0, 0, 50].astype(np.float64)) @ k[0, 0].T.astype(np.float64) / np.sqrt(8)
    expected = np.exp(s[:51] - s[:51].max())
    assert np.abs(shown - expected).max() < 0.05  # S, P̄ in bf16 at |S| up to 20: an ulp of S is 1/16
    assert len(shown) == 51 and shown.max() == 1
    error = bottom.lines[1].get_ydata()
    exact = np.cumsum(shown * d.read("attn.v", sample=0, head=0)[:51, 3].astype(float))
    assert (np.abs(error) <= np.maximum(np.abs(exact), 2**-126) * 2**-8).all() and np.abs(error).max() > 0
    with pytest.raises(ValueError,
                       match="query 60, feature 3: the dump has queries 0 to 59 and features 0 to 7"):
        plot.row(d, query=60, feature=3)
    with recording(tmp_path / "y.h5", "attn.p,attn.v,attn.m"):
        flash_attention_forward(q, k, v, precision=p)
    with pytest.raises(ValueError, match="several tiles and no attn.alpha"):
        plot.row(read(tmp_path / "y.h5"), query=3, feature=0)


def test_histograms_and_differences(dumps, tmp_path):
    q, k, v = paper_case(64, seed=53)
    for precision in ("bf16", "fp32"):
        with recording(tmp_path / f"{precision}.h5"):
            flash_attention_forward(q, k, v, precision=precision)
    figure = plot.histograms(read(tmp_path / "bf16.h5"), read(tmp_path / "fp32.h5"), ["attn.pv", "attn.v"])
    pv, same = figure.axes
    assert pv._left_title.get_text().startswith(
        "attn.pv: -0.2") and same._left_title.get_text() == "attn.v: +0.000"
    assert sum(p.get_height() for p in pv.patches) == pytest.approx(100)
    from cuflash.diff import diff
    figure = plot.differences(diff(dumps / "a.h5", dumps / "b.h5"))
    assert figure.axes[0].get_yticklabels()[0].get_text() == "fwd/L00/attn.q"
    with pytest.raises(ValueError, match="differ at no site: there is nothing"):
        plot.differences(diff(dumps / "a.h5", dumps / "a.h5"))
    with recording(tmp_path / "other.h5", "attn.o,attn.v"):
        flash_attention_forward(*inputs(1, 2, 2, 50, 50, 8, seed=53)[:3], precision="bf16")
    found = diff(dumps / "a.h5", tmp_path / "other.h5")
    with pytest.raises(ValueError, match="differ at no site that has an error in ulp, but in fwd/L00/attn.v, fwd/L00/attn"):
        plot.differences(found)
    with pytest.raises(ValueError, match="which sites.* share none of those drawn by default: name some by --sites"):
        plot.histograms(read(dumps / "a.h5"), read(dumps / "b.h5"), [])


def test_a_diffs_json(dumps, tmp_path):
    a, b, file = str(dumps / "a.h5"), str(dumps / "b.h5"), str(tmp_path / "x.json")
    run("diff", a, b, "--json", file, code=1)
    run("plot", a, b, "--kind", "diff", "-o", str(tmp_path / "x.svg"))
    run("plot", file, "-o", str(tmp_path / "y.svg"))
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "y.svg").read_bytes()
    options = ("--sites", "attn.s,attn.o", "--layer", "0", "-o")
    run("plot", a, b, "--kind", "diff", *options, str(tmp_path / "x.svg"))
    run("plot", file, *options, str(tmp_path / "z.svg"))
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "z.svg").read_bytes()
    assert (tmp_path / "z.svg").read_bytes() != (tmp_path / "y.svg").read_bytes()


def test_dumps_of_other_steps_have_a_note_in_the_figure_and_in_the_terminal(dumps, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.h5").write_bytes((dumps / f"{name}.h5").read_bytes())
    with h5py.File(tmp_path / "b.h5", "r+") as f:
        f.attrs["step"] = 7
    a, b, file = (str(tmp_path / name) for name in ("a.h5", "b.h5", "x.json"))
    note = f"note: {a} is of step 0, {b} of step 7"
    run("diff", a, b, "--json", file, code=1)
    for sources in ((a, b), (a, b, "--kind", "diff"), (file,)):
        text = run("plot", *sources, "-o", str(tmp_path / "x.svg"))
        assert text.splitlines()[0] == note and note[6:] in (tmp_path / "x.svg").read_text(encoding="utf-8")


def test_error_maps():
    rng = np.random.default_rng(54)
    o, do = rng.standard_normal((2, 2, 3, 10, 4))
    m = ErrorMap("bf16-paper", "off", (o * do).sum(-1), o, do, (1, 4, 6), (0, 3))
    figure = plot.error_maps(m, layer=2, sample=3, head=4, token=7)
    assert np.array_equal(figure.axes[0].images[0].get_array(), m.delta[1])
    product = next(ax for ax in figure.axes if ax._left_title.get_text().startswith("(d)"))
    assert np.array_equal([p.get_height() for p in product.patches], (o * do)[1, 1, 7])
    largest = np.unravel_index(np.argmax(np.abs(m.delta[0])), m.delta[0].shape)
    assert f"Head {m.heads[largest[0]]}, token {largest[1]}" in texts(plot.error_maps(m, layer=2))
    with pytest.raises(ValueError, match="--head 2: there is 1, 4, 6"):
        plot.error_maps(m, layer=2, head=2)


def test_files(dumps, tmp_path):
    for name, start in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.pdf", b"%PDF")):
        plot.save(plot.heat_maps(read(dumps / "a.h5")), tmp_path / name)
        first = (tmp_path / name).read_bytes()
        assert first.startswith(start)
        plot.save(figure := plot.heat_maps(read(dumps / "a.h5")), tmp_path / name)
        assert (tmp_path / name).read_bytes() == first  # no date in it
    assert "<text" in (tmp_path / "x.svg").read_text(encoding="utf-8")  # text stays text
    with pytest.raises(ValueError, match="x.gif: a plot is written as one of .png, .svg, .pdf"):
        plot.save(figure, tmp_path / "x.gif")


@pytest.mark.parametrize("arguments, message", [
    (("a.h5", "-o", "x.gif"), "is written as one of .png"),
    (("a.h5", "-o", "x.png", "--kind", "heta"), "unknown --kind 'heta': did you mean 'heat'"),
    (("a.h5", "-o", "x.png", "--kind", "curves"), "--kind curves is for runs; these sources give heat, row"),
    (("a.h5", "b.h5", "a.h5", "-o", "x.png"), "3 sources of this sort (dump) do not go into one plot"),
    (("a.h5", "other.h5", "-o", "x.png"), "an HDF5 file, but no dump and no audit"),
    (("a.h5", "-o", "x.png", "--query", "3", "--token", "2"),
     "--query, --token: a plot of kind heat takes --sites, --layer, --sample, --head"),
    (("a.h5", "-o", "x.png", "--layer", "3"), "at layer 3"),
    (("a.h5", "-o", "x.png", "--head", "5"), "head 5 is not in"),
    ((".", "-o", "x.png"), "is not a run folder"),
    (("x.json", "-o", "x.png"), "is not the JSON of cuflash diff (cuflash diff A B --json diff.json) or of cuflash audit"),
    (("audit.json", "-o", "x.png"), "is what --json of an audit wrote; its -o file is drawn: cuflash audit … -o errors.h5"),
    (("weights.json", "-o", "x.png"), "is the diff of two runs' weights, which is not drawn"),
    (("x.csv", "-o", "x.png"), "diff's --json is drawn, its --csv is not: cuflash diff A B --json diff.json"),
    (("cut.h5", "-o", "x.png"), "cut.h5: damaged or cut short"),
    (("none.h5", "-o", "x.png"), "none.h5: no such file or run folder"),
    (("a.h5", "bias.json", "-o", "x.png"), "are of several sorts"),
    (("bias.json", "-o", "x.png", "--layer", "1"), "a plot of kind bias takes none of these options"),
])
def test_mistakes(dumps, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(dumps)
    pathlib.Path("x.json").write_text("{}")
    pathlib.Path("audit.json").write_text('{"audits": []}')
    pathlib.Path("weights.json").write_text('{"weights": []}')
    pathlib.Path("bias.json").write_text('{"bias": []}')
    pathlib.Path("x.csv").write_text("name,site\n")
    pathlib.Path("cut.h5").write_bytes(pathlib.Path("a.h5").read_bytes()[:3000])
    with h5py.File("other.h5", "w") as f:
        f["x"] = np.zeros(1)
    text = " ".join(run("plot", *arguments, code=2).split())
    assert message in text and "Traceback" not in text and not pathlib.Path("x.png").exists()


@pytest.mark.parametrize("site, options, message", [
    ("attn.o", (), "has neither attn.s nor attn.p, which are drawn by default: name others with axes query and key by"),
    ("attn.p", ("--kind", "row"), "draws a row of attn.p and a column of attn.v, and x.h5 has no attn.v: dump both"),
    ("attn.o", ("--kind", "row"), "x.h5 has no attn.p and no attn.v: dump both"),
    ("attn.p", (), None),
])
def test_a_dump_without_the_sites_drawn_by_default(tmp_path, monkeypatch, site, options, message):
    monkeypatch.chdir(tmp_path)
    with recording("x.h5", site):
        flash_attention_forward(*inputs(1, 1, 1, 8, 8, 8, seed=57)[:3], precision="bf16")
    text = run("plot", "x.h5", *options, "-o", "x.png", code=2 if message else 0)
    assert message is None or message in " ".join(text.split())


def test_the_page_as_printed(tmp_path, monkeypatch):
    """Every command and the snippet of docs/dumps.md, in order; training is cut short."""
    page = (DOCS / "dumps.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = 0
    for kind, block in re.findall(r"```(console|python)\n(.*?)```", page, re.S):
        if kind == "python":
            namespace = {}
            exec(block, namespace)
            assert namespace["pv"].shape == (64, 1, 1, 1, 64) and namespace["p"].shape == (1, 3)
            continue
        for line in block.splitlines():
            command = shlex.split(line.removeprefix("$ cuflash "))
            shorter = {"300": "6", "100": "3", "bf16@300": "bf16@6", "bf16@200": "bf16@3"}
            command = [shorter.get(c, c) for c in command]
            code = int(command[0] == "diff")
            text = run(*command, *(["--device", "cpu"] if command[0] == "train" else []), code=code)
            if "built-bf16.h5" in command:
                assert re.search(r"attn.pv .* -0\.2[4-6]", text)
            ran += 1
    assert ran >= 18
    for image in re.findall(r"!\[[^\]]+\]\((.*?)\)", page):
        assert (DOCS / image).is_file() and (tmp_path / pathlib.Path(image).name).is_file(), image
