"""`cuflash audit FILE|RUN`: which roundings of attention are biased on captured q, k, v and dO."""
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

from cuflash.audit import Audit, Capture, Cure, DeltaError, audit as run_audit
from cuflash.audit_map import ErrorMap, error_map, write_maps
from cuflash.cli.main import UserError, user_errors
from cuflash.cli.numbers import numbers
from cuflash.cli.outputs import OUT_HDF5, OUT_TEXT, STDOUT, written
from cuflash.cli.progress import Progress
from cuflash.errors import ranges
from cuflash.fixes import Fix, as_fix
from cuflash.monte_carlo import RESTS, TIES, table
from cuflash.precision import Precision, as_precision
from cuflash.statistics import SIGNIFICANT, SiteStatistics
from cuflash.tensor_file import read_tensors

WIDTH = 100
CONSTANT = 1e9  # a z beyond it: the errors are all the same, up to the rounding of their sums
KEYS, OPTIONAL = ("q", "k", "v"), ("do",)
_MONTE_CARLO = ("source", "monte_carlo", "precisions", "rounds", "settings", "fix", "json_file")  # what it takes


@click.command()
@click.argument("source", metavar="FILE|RUN", required=False)
@click.option("--precision", "precisions", multiple=True, metavar="NAME|TOML",
              help="What to audit; repeatable.  [default: bf16 and bf16-fa2; of a run its own]")
@click.option(
    "--round", "rounds", multiple=True, metavar="[SCOPE/]SITE=FORMAT[:MODE]", help="Round a site otherwise."
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a switch, as delta_from=p_dp."
)
@click.option("--fix", help="A fix of the row maximum: off, on, qiu-b2, …  [default: off; of a run its own]")
@click.option("--causal", is_flag=True, help="Query i sees keys up to i + Tk − Tq.")
@click.option("--scale", type=float, help="Factor of S; default 1/√head_dim.")
@click.option(
    "--layout", default="bhtd", show_default=True, help="bhtd, or bthd for (batch, T, heads, head_dim)."
)
@click.option("--heads", metavar="LIST", help="Only these query heads, as 0,6-8.")
@click.option("--batch", metavar="LIST", help="Only these samples, as 0-3.")
@click.option("--layer", type=click.IntRange(min=0), default=0, show_default=True,
              help="The layer of a FILE's capture, for roundings scoped to layers.")
@click.option("--layers", metavar="LIST", help="Of a RUN: only these layers.")
@click.option("--step", type=click.IntRange(min=0), help="Of a RUN: the checkpoint.  [default: the last]")
@click.option("--data", help="Of a RUN: another text for the batch; a file needs one.")
@click.option(
    "--cures/--no-cures", default=True, help="Try what removes the bias of delta (most of the time)."
)
@click.option("--monte-carlo", is_flag=True,
              help="The bias of Ō and O against the number of ties and the size of the rest; needs no FILE.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="Where the audited precisions run; golden, which is fp64, on the CPU.")
@click.option("-o", "--out", type=OUT_HDF5,
              help="Write the errors of δ and O by token and feature here, in HDF5, for cuflash plot.")
@click.option("--json", "json_file", type=OUT_TEXT,
              help="Write everything here, by head too; - is stdout, in place of the report.")
@click.pass_context
def audit(ctx: click.Context, source: str | None, **options: Any) -> None:
    """Which roundings are biased on captured q, k, v and dO, what they do to delta and dQ, what removes it.

    FILE is a safetensors, npz or HDF5 file with arrays q, k, v and, for all that concerns gradients, do:
    (batch, heads, T, head_dim), (heads, T, head_dim) or (T, head_dim). RUN is a run folder, RUN@STEP, a checkpoint,
    or GPT-2's weights as safetensors: what its attention takes in training's next pass is audited, layer by
    layer.

    \b
    cuflash audit qkv.safetensors --causal
    cuflash audit qkv.npz --layout bthd --heads 0,6-8 --precision bf16 --set delta_from=p_dp
    cuflash audit runs/nano-bf16-off@800 --layers 1 --json audit.json -o errors.h5
    cuflash audit --monte-carlo --json bias.json
    """
    if options["monte_carlo"]:
        given = [p for p in ctx.command.params if ctx.get_parameter_source(p.name) is ParameterSource.COMMANDLINE]
        extra = [*filter(None, [source]), *(p.opts[-1] for p in given if p.name not in _MONTE_CARLO)]
        if extra:
            raise UserError(f"--monte-carlo draws its own inputs: drop {', '.join(extra)}")
        _monte_carlo(options)
    elif source is None:
        raise UserError("name a FILE with q, k, v and do, a RUN, or --monte-carlo")
    else:
        with user_errors():
            work = _of_run(source, options) if _is_run(source) else _of_file(source, options)
        _audit(source, work, options)


@dataclass
class _Work:
    """Captures by layer, what to audit them under, the lines about them, their tokens if known."""

    captures: dict[int, Capture]
    precisions: list[Precision]
    fix: Fix
    inputs: list[str]
    tokens: np.ndarray | None = None
    kind: str = ""


def _is_run(source: str) -> bool:
    """Whether it is a run folder, RUN@STEP, a checkpoint or a model's weights.

    Raises:
        ValueError: there is no such file, folder or step.
    """
    from cuflash.model.run import checkpoint_of
    from cuflash.model.weights import is_gpt2
    if os.path.isdir(source):
        return True
    if not os.path.exists(source):
        if "@" not in source:
            raise ValueError(f"{source}: no such file or run folder")
        return checkpoint_of(source).is_file()
    import h5py
    if not h5py.is_hdf5(source):
        return source.endswith(".safetensors") and is_gpt2(source)
    try:
        with h5py.File(source, "r") as f:
            format, checkpoint = str(f.attrs.get("format", "")), f.attrs.get("checkpoint", "STEP")
    except OSError as e:
        raise ValueError(f"{source} is a damaged HDF5 file: {e}") from e
    if format.startswith("cuflash dump"):
        raise ValueError(f"{source} is a dump; audit its run: cuflash audit RUN@{checkpoint} (or a file of the "
                         "arrays q, k, v, do, where it is of calls in no run)")
    if format.startswith("cuflash audit"):
        raise ValueError(f"{source} is what audit -o wrote: cuflash plot {source} -o errors.png draws it")
    return format.startswith("cuflash checkpoint")


def _precisions(given: Sequence[str | Precision], options: dict[str, Any]) -> list[Precision]:
    found = [
        as_precision(p).set(*options["settings"]).round(*options["rounds"])
        for p in options["precisions"] or given
    ]
    for p in found:
        if p.is_fp64:
            raise ValueError("--precision fp64 is what the others are compared with; name another one")
        if p.order == "fa2" and options["scale"] is not None and options["scale"] <= 0:
            raise ValueError(
                f"--scale is {options['scale']}; valid under order=fa2 ({p.name}): a number above 0")
    return found


def _device(options: dict[str, Any]) -> str:
    from cuflash.kernels import gpu_reason
    if options["device"] == "gpu" and (reason := gpu_reason()):
        raise ValueError(f"--device gpu: {reason}")
    return options["device"]


def _of_file(file: str, options: dict[str, Any]) -> _Work:
    for option in ("layers", "step", "data"):
        if options[option] is not None:
            raise ValueError(f"--{option} is for a run; {file} holds one layer's arrays")
    precisions, fix = _precisions(("bf16", "bf16-fa2"), options), as_fix(options["fix"] or "off")
    arrays = read_tensors(file, KEYS, OPTIONAL)
    if options["out"] and "do" not in arrays:
        raise ValueError(f"-o {options['out']}: the errors of δ need do, which {file} does not have; drop -o or save "
                         "do")
    capture = Capture.of(**arrays, **{name: options[name]
                                      for name in ("causal", "scale", "layout", "layer")},
                         heads=numbers("--heads",
                                       options["heads"]), batch=numbers("--batch", options["batch"]),
                         device=_device(options))
    return _Work({options["layer"]: capture}, precisions, fix, _inputs(file, arrays, capture, options["layout"]))


def _of_run(run: str, options: dict[str, Any]) -> _Work:
    from cuflash.model.passes import captures, one_pass
    if options["causal"] or options["scale"] is not None or options["layout"] != "bhtd" or options["layer"]:
        raise ValueError(
            f"--causal, --scale, --layout and --layer are for a file of arrays; {run} knows its own "
            "(and takes --layers)")
    samples = numbers("--batch", options["batch"])
    p = one_pass(run, step=options["step"], data=options["data"], samples=samples, device=_device(options))
    count = p.header.model.n_layer
    layers = numbers("--layers", options["layers"]) or list(range(count))
    if layers[-1] >= count:
        raise ValueError(f"--layers {layers[-1]}: the model has layers 0 to {count - 1}")
    precisions, fix = _precisions([p.model.precision], options), as_fix(options["fix"] or p.model.fix)
    found = captures(p, layers, heads=numbers("--heads", options["heads"]), samples=samples)
    inputs = [f"{run}: attention's inputs in step {p.step}, {len(p.x)} samples of {p.x.shape[1]} tokens, "
              f"{p.header.model.n_head} heads; compared with golden, plain fp64"]
    return _Work(found, precisions, fix, inputs, p.x[samples or slice(None)], p.header.tokens)


def _audit(source: str, work: _Work, options: dict[str, Any]) -> None:
    echo = _echo(options)
    echo("\n".join(work.inputs))
    results: dict[int, list[Audit]] = {}
    maps: dict[int, list[ErrorMap]] = {}
    for layer, capture in work.captures.items():
        for precision in work.precisions:
            with _Bar() as bar:
                results.setdefault(layer, []).append(
                    run_audit(capture, precision, fix=work.fix, cures=options["cures"], progress=bar))
            title = f"layer {layer}: " if len(work.captures) > 1 else ""
            echo("\n" + "\n".join(report(results[layer][-1], title)))
            if options["out"]:
                with user_errors():
                    maps.setdefault(layer, []).append(error_map(capture, precision, work.fix))
    with user_errors():
        if options["out"]:
            write_maps(options["out"], maps, work.tokens, work.kind)
        if options["json_file"]:
            data = [{"file": source, "causal": c.causal, "scale": c.scale, "layer": layer,
                     "audits": [r.to_dict() for r in results[layer]]} for layer, c in work.captures.items()]
            _write_json(options["json_file"], data[0] if len(data) == 1 else {"layers": data})


def _echo(options: dict[str, Any]) -> Callable[[str], None]:
    """Prints the report, unless stdout has the JSON."""
    return (lambda text: None) if options["json_file"] == STDOUT else click.echo


def _monte_carlo(options: dict[str, Any]) -> None:
    echo = _echo(options)
    with user_errors():
        precisions = _precisions(("bf16", "bf16-fa2"), options)
        rows = list(table(precisions, fix=as_fix(options["fix"] or "off")))
    for p in precisions:
        mine = [b for b in rows if b.precision == p.name]
        echo(
            f"{p.describe()}, fix {as_fix(options['fix'] or 'off')}: mean error in ulp of {mine[0].format}, "
            f"V uniform in [−4, −2], ± {max(b.se for b in mine):.1g} at most")
        for x, label in (("o_bar", "Ō"), ("o", "O")):
            echo(f"  {label}     P̄ of the rest: " + "".join(f"{rest:>10g}" for rest in RESTS))
            for n in TIES:
                values = [b.mean for b in mine if b.x == x and b.ties == n]
                echo(f"    {n} at P̄ = 1         " + "".join(f"{v:>+10.4f}" for v in values))
        echo("")
    if options["json_file"]:
        with user_errors():
            _write_json(options["json_file"],
                        {"fix": str(as_fix(options["fix"] or "off")), "bias": [asdict(b) for b in rows]})


def _write_json(path: str, data: Any) -> None:
    with written(path) as f:
        f.write(json.dumps(data, indent=1) + "\n")


class _Bar:
    """Progress of each phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.bar: Progress | None = None

    def __enter__(self) -> "_Bar":
        return self

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self.phase:
            self.__exit__()
            self.phase, self.bar = phase, Progress(total, "row", phase)
        self.bar.to(done)

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()


# ---- the report ---------------------------------------------------------------------------------

def _inputs(file: str, arrays: dict[str, np.ndarray], capture: Capture, layout: str) -> list[str]:
    shapes = ", ".join(f"{n} {tuple(a.shape)} {a.dtype}" for n, a in arrays.items())
    chosen = [f"{name} {ranges(n)}" for name, n, count in
              (("heads", capture.heads, None), ("samples", capture.batch, None)) if n != tuple(range(len(n)))]
    lines = textwrap.wrap(f"{file}: {shapes}", WIDTH, subsequent_indent="  ")
    if layout == "bhtd" and arrays["q"].ndim > 2 and arrays["q"].shape[-3] > arrays["q"].shape[-2]:
        heads, t = arrays["q"].shape[-3:-1]
        lines.append(f"note: read as {heads} heads of {t} tokens; if it is {t} heads of {heads} tokens, say --layout bthd")
    lines.append("; ".join(["causal" if capture.causal else "not causal", f"scale {capture.scale:g}", *chosen,
                            "compared with golden, plain fp64"]))
    if capture.do is None:
        lines.append(
            "no do in the file, so left out: backward's sites, delta, the gradients, what removes the bias"
        )
    return lines


def report(a: Audit, where: str = "") -> list[str]:
    """The audit of one precision as lines of at most 100 columns."""
    sums = "library (BLAS)" if a.precision.accumulator == "auto" else a.precision.accumulator
    title = f"{where}{a.precision.describe()}, fix {a.fix}, accumulator {sums}"
    head = [*textwrap.wrap(title, WIDTH), "─" * WIDTH]
    return [*head, *_sites(a), "", *_effect(a), *_tied(a), *_cures(a)]


def _sites(a: Audit) -> Iterator[str]:
    constant = [s for s in a.sites if s.bias and _is_constant(s)]
    biased, rest = [s for s in a.sites if s.bias and s not in constant], [s for s in a.sites if not s.bias]
    if not biased:
        yield f"No rounding is biased: no mean error reaches {SIGNIFICANT:g} standard errors"
    if biased:
        yield (f"Biased roundings: mean error in ulp, signed and away from zero, {SIGNIFICANT:g} standard "
               "errors or more")
        yield _SITE_HEADER
        yield from (_site(s) for s in biased)
    if constant:
        yield "Constant errors: alike in all rows, as of one distinct value, which is no evidence of a bias"
        if not biased:
            yield _SITE_HEADER
        yield from (_site(s) for s in constant)
    for label, names in (("not biased", [s.site for s in rest]), ("nothing lost", a.exact)):
        if names:
            yield from textwrap.wrap(f"{label}: {', '.join(n.removeprefix('attn.') for n in names)}", WIDTH,
                                     initial_indent="  ", subsequent_indent="    ")


_SITE_HEADER = (f"  {'site':<15} {'to':<8} {'values':>11}  {'signed':>16} {'z':>6}  {'away':>7} {'z':>6}"
                f"  {'over':>6} {'under':>6}")


def _is_constant(s: SiteStatistics) -> bool:
    """No spread, so that what is significant is so without bound."""
    return all(abs(z) > CONSTANT for z in (s.z, s.away_z) if abs(z) >= SIGNIFICANT)


def _site(s: SiteStatistics) -> str:
    return (f"  {s.site:<15} {s.rounding:<8} {s.count:>11,}  {s.mean:>+7.4f} ± {s.se:.4f} {_z(s.z)}"
            f"  {s.away:>+7.4f} {_z(s.away_z)}  {s.overflow:>6,} {s.underflow:>6,}")


def _z(z: float) -> str:
    if abs(z) > CONSTANT:
        return " const"
    digits = ".1f" if abs(z) < 100 or not math.isfinite(z) else ".0f" if abs(z) < 1e5 else ".0e"
    return f"{z:>+6{digits}}"


def _effect(a: Audit) -> Iterator[str]:
    yield "Relative error:  " + "   ".join(f"{n} {e:.2e}" for n, e in a.errors.items())
    if a.delta is None:
        return
    yield f"Error of delta = rowsum(dO∘O), over {a.delta.rows:,} rows"
    yield f"  {'':<9} {'mean':>21} {'z':>6}  {'sum':>10}  {'positive':>8}  {'rms':>8}"
    yield _delta("all", a.delta)
    if len(a.delta_heads) > 1:
        yield from (_delta(f"head {d.head}", d) for d in a.delta_heads[:3] if d.significant)
    if a.judged is None:
        yield f"  within noise: no mean, of all rows or of one head, reaches {SIGNIFICANT:g} standard errors"


def _delta(name: str, d: DeltaError) -> str:
    return (f"  {name:<9} {d.mean:>+11.3e} ± {d.se:.1e} {_z(d.z)}  {d.sum:>+10.2e}  {d.positive:>8.1%}"
            f"  {d.rms:>8.1e}")


def _tied(a: Audit) -> Iterator[str]:
    n, f = a.tied_rows, a.first
    yield ""
    if not n["rows"]:
        yield "No row has two keys at P̄ = 1"
        return
    yield (f"Two or more keys at P̄ = 1 in {n['rows']:,} rows; at {n['values']:,} of their features V of these keys has "
           "one sign,")
    yield f"  and at {n['ties']:,} of those its sum lies midway between two numbers of the format"
    if n["ties"]:
        yield (f"  the rest of the row turned {n['away']:,} of these sums away from zero and "
               f"{n['toward']:,} toward it")
    if f is None:
        return
    yield (f"  first: batch {f.sample}, head {f.head}, row {f.row}, feature {f.feature}, "
           f"at {f.site} in {f.format}")
    shown = [f"V[{k}] = {v:.9g}" for k, v in zip(f.keys[:4], f.v)]
    more = f" and {len(f.keys) - 4} more" if len(f.keys) > 4 else ""
    kind = "sum" if f.site != "attn.o" else "mean"
    yield f"    {', '.join(shown)}{more}: {kind} {f.tied:.9g}, midway between two {f.format}"
    yield (f"    with the rest of the row {f.exact:.9g}, rounded to {f.rounded:.9g}: "
           f"{(f.rounded - f.exact) / f.ulp:+.4f} ulp")
    yield f"    bit by bit: cuflash explain --format {f.format} -- {np.float32(f.exact)}"


def _cures(a: Audit) -> Iterator[str]:
    if not a.cures:
        return
    where = "all rows" if a.judged.head is None else f"head {a.judged.head}"
    yield ""
    yield f"What removes the bias of delta ({where}; left: share of its mean error; dq: relative error)"
    yield f"  {'change':<46} {'mean':>10} {'z':>6}  {'left':>6}  {'dq':>8}"
    helps = [c for c in a.cures if c.left < 0.9]
    for c in helps:
        yield from _cure(c)
    worse = [f"{c.change} ({c.left:.3g} times)" for c in a.cures if c.left > 1.1]
    rest = [c.change for c in a.cures if 0.9 <= c.left <= 1.1]
    alone = [
        c.removeprefix("--round ").removesuffix("=fp32")
        for c in rest
        if c.startswith("--round") and c.count("=") == 1
    ]
    others = [c for c in rest if c.removeprefix("--round ").removesuffix("=fp32") not in alone]
    for label, some in (
        ("make it worse", worse),
        ("no effect (within 10 %)", others),
        ("no effect of fp32 at any one of", alone),
    ):
        if some:
            text = (
                f"{label}: {', '.join(some)}".replace(" ", "\x00")
                .replace(",\x00", ", ")
                .replace(":\x00", ": ")
            )
            yield from (line.replace("\x00", " ") for line in textwrap.wrap(
                text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    groups = [sites for c in helps if len(sites := _sites_of(c.change)) > 1 and set(sites) <= set(alone)]
    if groups:
        together = groups[0]
        yield from textwrap.wrap(f"{', '.join(together)} help together and not alone: the sum is rounded again at the "
                                 "next of these sites, which meets the same tie.", WIDTH, initial_indent="  ",
                                 subsequent_indent="    ")


def _sites_of(change: str) -> list[str]:
    """Of `--round attn.pv=fp32 --round attn.o=fp32`; of another change none."""
    return [word.removesuffix("=fp32") for word in change.split() if word.endswith("=fp32")]


def _cure(c: Cure) -> Iterator[str]:
    change, *more = textwrap.wrap(c.change.replace("--round ", "--round\x00"), 46, break_on_hyphens=False)
    yield (f"  {change:<46} {c.delta.mean:>+10.2e} {_z(c.delta.z)}  {c.left:>6.1%}  {c.dq_error:>8.2e}"
           f"  {'removes' if c.removes else ''}").replace("\x00", " ").rstrip()
    yield from (f"    {line}".replace("\x00", " ") for line in more)
