"""One rounding, one sum or one dot product, shown bit by bit as text.

    print(explain())                                    # the example of arXiv 2510.04212, section 3.3.2
    print(explain("1.2345", format="bf16"))             # one rounding
    print(explain("-2.40711546 + -2.296875"))           # an fp32 sum, stored in bf16
    print(explain("1.5*2.25 3e-5*1", accumulator="hopper"))

Everything drawn is computed from exact rationals, apart from the code it explains; results come
from that code (`round_to`, `dot`).
"""
import math
import re
import textwrap
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np

from cuflash.accumulators import ACCUMULATORS, common_format, dot
from cuflash.errors import unknown
from cuflash.formats import MODES, Format, Mode, format_named, round_to
from cuflash.philox import Key
from cuflash.precision import Rounding
from cuflash.tensor_core import TENSOR_CORES

_FP32 = format_named("fp32")
_DEFINED = tuple(a for a in ACCUMULATORS if a != "library")
_DIGITS = 62  # binary digits drawn behind the point at most


def explain(text: str = "", *, format: str = "bf16", mode: str = "rne", accumulator: str | None = None,
            seed: int = 0) -> str:
    """The arithmetic of `text`, at most 100 columns wide.

    Args:
        text: `X`, one rounding; `A + B - C …`, fp32 sums from left to right, then a rounding;
            `A*B C*D … [START]`, a dot product of operands in `format`; nothing, the paper's example.
            Numbers are decimal, `inf`, `nan`, or bits: `0xC097` of the format, `0xC01A0E2E` of fp32.
        format, mode: of the rounding; a dot product has no mode, the example is in bf16.
        accumulator: of a dot product and of nothing else: hopper (the default), ampere, sequential, exact.
        seed: of mode sr.

    Raises:
        ValueError: the text cannot be read, a name is unknown, or an argument has nothing to act on.
    """
    f, m = format_named(format), Rounding(mode=mode).rule
    if accumulator == "library":
        raise ValueError(f"accumulator 'library' is BLAS and not defined to the bit; valid: {', '.join(_DEFINED)}")
    if accumulator not in (None, *_DEFINED):
        raise unknown("accumulator", accumulator, _DEFINED)
    terms = _terms(text)
    product = any(len(factors) > 1 for _, factors in terms)
    if accumulator is not None and not product:
        raise ValueError(f"accumulator {accumulator!r} is for products, A*B C*D; there is none here")
    if not terms:
        if f.name != "bf16":
            raise ValueError(f"format {format!r}: the paper's example is in bf16; give a number for another format")
        return _example(m, seed)
    if product:
        if m.name != "rne":
            raise ValueError(f"mode {mode!r} is for one rounding, X, or a sum, A + B; a dot product has an accumulator")
        return _dot(terms, f, accumulator or "hopper")
    numbers = [_signed(operator, factors[0], f) for operator, factors in terms]
    if len(numbers) == 1:
        x = numbers[0]
        return "\n".join([f"{_decimal(x)} to {_name(f)}, mode {m.name}", "", *_rounding(x, f, m, seed)])
    if not all(operator for operator, _ in terms[1:]):
        raise ValueError(f"{text!r} cannot be read: write X, A + B, A - B, or A*B C*D")
    return "\n".join(_sum(numbers, f, m, seed))


# ---- numbers ------------------------------------------------------------------------------------

def _terms(text: str) -> list[tuple[str, list[str]]]:
    """The terms as (`+`, `-` or nothing before it, factors)."""
    found: list[tuple[str, list[str]]] = []
    operator = ""
    for word in re.sub(r"\s*[*×]\s*", "*", text.strip()).split():
        if word in ("+", "-", "−"):
            if operator or not found:
                raise ValueError(f"{text!r} cannot be read: {word} stands between two numbers")
            operator = "+" if word == "+" else "-"
            continue
        factors = word.split("*")
        if "" in factors:
            raise ValueError(f"{text!r} cannot be read: * stands between two numbers, as in 1.5*2.25")
        found.append((operator, factors))
        operator = ""
    if operator:
        raise ValueError(f"{text!r} cannot be read: {operator} stands between two numbers")
    return found


def _signed(operator: str, text: str, format: Format) -> float:
    x = _number(text, format)
    return -x if operator == "-" else x



def _number(text: str, format: Format) -> float:
    if text[:2].lower() == "0x" and "." not in text:
        digits = -(-format.bits // 4)
        f = format if len(text) - 2 == digits else _FP32 if len(text) == 10 else None
        try:
            bits = int(text, 16)
        except ValueError:
            bits = -1
        if f is None or not 0 <= bits < 1 << f.bits:
            also = "" if format == _FP32 else ", fp32 takes 8"
            raise ValueError(f"{text!r} is no bit pattern: {format.name} takes {digits} hexadecimal digits "
                             f"({format.bits} bits){also}")
        return from_pattern(bits, f)
    try:
        x = float(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no number: write a decimal, inf, nan, or a bit pattern like 0xC097"
        ) from None
    if math.isinf(x) and "inf" not in text.lower() or x == 0 and not Decimal(text).is_zero():
        raise ValueError(f"{text!r} is beyond fp64, in which numbers are read: 5e-324 to 1.8e308, 0 or inf")
    return x


def pattern(x: float, format: Format) -> int:
    """The bits of a value of the format."""
    sign = int(math.copysign(1, x) < 0) << format.bits - 1
    ones = (1 << format.exponent_bits) - 1
    if math.isnan(x):
        mantissa = (1 << format.mantissa_bits) - 1 if format.saturates else 1 << format.mantissa_bits - 1
        return sign | ones << format.mantissa_bits | mantissa
    if math.isinf(x):
        return sign | ones << format.mantissa_bits
    exponent = _exponent(x, format)
    # The mantissa, with the leading 1 if x is normal.
    units = int(abs(Fraction(x)) / Fraction(2)**(exponent - format.mantissa_bits))
    return sign | units + (exponent - format.emin << format.mantissa_bits)


def from_pattern(bits: int, format: Format) -> float:
    """The value of a bit pattern of the format."""
    sign = -1.0 if bits >> format.bits - 1 else 1.0
    field = bits >> format.mantissa_bits & (1 << format.exponent_bits) - 1
    mantissa = bits & (1 << format.mantissa_bits) - 1
    if field == (1 << format.exponent_bits) - 1:
        if not format.saturates:
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << format.mantissa_bits) - 1:
            return math.nan
    units = mantissa + (1 << format.mantissa_bits if field else 0)
    return sign * math.ldexp(units, format.emin + max(field - 1, 0) - format.mantissa_bits)


def _exponent(x: float, format: Format) -> int:
    """Exponent of a finite x, no lower than the format's smallest."""
    return max(math.frexp(x)[1] - 1, format.emin) if x else format.emin


def _round(x: float, format: Format, mode: Mode, seed: int) -> float:
    key = Key(seed) if mode.needs_key else None
    return float(round_to(np.float64(x), format, mode, key))


def _to_fp32(x: float) -> float:
    return float(round_to(np.float64(x), _FP32))


# ---- drawing ------------------------------------------------------------------------------------

def _name(f: Format) -> str:
    return f"{f.name} ({f.exponent_bits} exponent, {f.mantissa_bits} mantissa bits)"


def _decimal(x: float) -> str:
    """The shortest decimal of x, integers without a point."""
    return f"{x:.0f}" if math.isfinite(x) and x == int(x) and abs(x) < 1e16 else repr(x)


def _fields(label: str, x: float, f: Format) -> str:
    """sign exponent mantissa, the pattern, the value."""
    bits = f"{pattern(x, f):0{f.bits}b}"
    e = 1 + f.exponent_bits
    digits = -(-f.bits // 4)
    return (f"  {label:<6} {f.name:<8} {bits[0]} {bits[1:e]} {bits[e:]:<23}  0x{pattern(x, f):0{digits}X}"
            f"  {_decimal(x)}")


def _header(f: Format) -> str:
    return f"  {'':<6} {'':<8} ± {'exponent':<{f.exponent_bits}} mantissa"


def _binary(x: Fraction, places: int, width: int = 1) -> str:
    """x ≥ 0 with `width` digits before the point (spaces lead) and `places` behind it, cut."""
    n = x * 2**places
    digits = f"{n.numerator // n.denominator:0{places + 1}b}"
    head, tail = (digits[:-places], digits[-places:]) if places else (digits, "")
    return f"{head:>{width}}" + (f".{tail}" if places else "")


def _places(x: Fraction) -> int:
    """Binary digits behind the point that x has."""
    return x.denominator.bit_length() - 1


def _drawn(x: Fraction, places: int, width: int = 1) -> str:
    """`_binary`, cut where there are too many digits to draw."""
    if places <= _DIGITS:
        return _binary(x, places, width)
    return _binary(x, _DIGITS, width) + ("…" if x % Fraction(1, 2**_DIGITS) else "")


def _rounding(x: float, f: Format, mode: Mode, seed: int) -> list[str]:
    """x to the format: significand as kept | guard | sticky, what the mode decides, the result, the error."""
    y = _round(x, f, mode, seed)
    if not math.isfinite(x):
        verb = f"becomes {_decimal(y)}: {f.name} has no Inf" if math.isfinite(y) else f"stays {y}"
        return [f"  {x} {verb}", _fields("result", y, f)]
    exponent = _exponent(x, f)
    unit = Fraction(2)**(exponent - f.mantissa_bits)
    units = abs(Fraction(x)) / unit
    kept, rest = units.numerator // units.denominator, units % 1
    lines = []
    if rest:
        left = _binary(Fraction(kept, 2**f.mantissa_bits), f.mantissa_bits)
        digits = _drawn(rest, _places(rest)).partition(".")[2]
        guard, sticky = digits[0], digits[1:]
        lines += [f"  {left} {guard} {sticky or '0'}  × 2^{exponent}",
                  f"  {_brace('kept', len(left))} {'│'} {_brace('sticky', len(sticky or '0'))}",
                  f"  {'':<{len(left)}} guard", ""]
    lines += _decision(x, y, kept, rest, f, mode, seed)
    lines += ["", _header(f), _fields("result", y, f)]
    if math.isfinite(y) and rest:
        error = Fraction(y) - Fraction(x)
        lines.append(f"  error  {_error(error, x)} = {float(error / unit):+.4f} ulp, "
                     f"1 ulp = 2^{exponent - f.mantissa_bits} = {float(unit)!r}")
    return lines


def _error(error: Fraction, x: float) -> str:
    """An error of x in the fewest digits that are right: of an x that fp32 does not hold, and so was given as
    a decimal, no more is known than that it is within half an ulp of fp64."""
    sure = Fraction(math.ulp(x)) / 2 if _to_fp32(x) != x else Fraction(0)
    texts = (f"{float(error):.{digits}g}" for digits in range(1, 17))
    return next((t for t in texts if abs(Fraction(t) - error) <= sure), _decimal(float(error)))


def _brace(label: str, width: int) -> str:
    if width < 2:
        return "│" if label == "sticky" else label[:width]
    return "└" + (label if width > len(label) + 1 else "").center(width - 2, "─") + "┘"


def _decision(x: float, y: float, kept: int, rest: Fraction, f: Format, mode: Mode, seed: int) -> list[str]:
    if not rest and abs(x) <= f.max:
        return [f"  {_decimal(x)} is a value of {f.name}: nothing is rounded"]
    way = "away from zero" if abs(y) > abs(x) else "toward zero"
    if abs(x) > f.max:
        return [f"  beyond the largest number of {f.name}, {f.max!r}: {mode.name} gives {_decimal(y)}"]
    half = Fraction(1, 2)
    size = "exactly half" if rest == half else "above half" if rest > half else "below half"
    bits = f"guard {int(rest >= half)}, sticky {int(rest % half != 0)}: {size} an ulp is discarded"
    odd = f"the last kept bit is {kept & 1}"
    reason = {
        "rne": f"a tie goes to the even neighbour, and {odd}" if rest == half else "the nearer neighbour",
        "rna": "a tie goes away from zero" if rest == half else "the nearer neighbour",
        "rz": "always", "rd": "toward −Inf", "ru": "toward +Inf",
        "sr": f"with probability {float(rest):.6g} it goes away; the random word of seed {seed} decides",
    }.get(mode.name, "as its rule says")
    return [f"  {bits}", f"  {mode.name} goes {way}: {reason}"]


# ---- sums ---------------------------------------------------------------------------------------

def _sum(given: Sequence[float], f: Format, mode: Mode, seed: int, labels: Sequence[str] = ()) -> list[str]:
    """fp32 additions from left to right, then one rounding to the format."""
    terms = [_to_fp32(x) for x in given]
    lines = [f"fp32 sum, stored in {_name(f)}, mode {mode.name}", "", _header(_FP32)]
    for i, (x, t) in enumerate(zip(given, terms)):
        lines.append(_fields(labels[i] if labels else f"x{i + 1}", t, _FP32))
        if x != t and not math.isnan(x):
            lines.append(f"         ({_decimal(x)} is no fp32 number: read as the nearest)")
    total = terms[0]
    for t in terms[1:]:
        lines += ["", *_addition(total, t)]
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.float32(total) + np.float32(t))
        lines.append(_fields("sum", total, _FP32))
    if f != _FP32:
        lines += ["", f"Stored in {f.name}", "", *_rounding(total, f, mode, seed)]
        if math.isfinite(total):
            exact = sum(map(Fraction, terms))
            y = _round(total, f, mode, seed)
            if exact != Fraction(total) and math.isfinite(y):
                lines.append(f"  against the exact sum of all terms: {float(Fraction(y) - exact)!r}")
    return lines


def _addition(a: float, b: float) -> list[str]:
    """a + b aligned, its exact sum, and what fp32 keeps of it."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return [f"  {a} + {b}"]
    top = max(_exponent(a, _FP32), _exponent(b, _FP32))
    x, y = (Fraction(v) / Fraction(2)**top for v in (a, b))
    total = x + y
    places = max(_places(x), _places(y), 1)
    lines = [f"  significands, aligned to 2^{top}"]
    for sign, v in (("", x), ("+", y), ("=", total)):
        minus = "−" if v < 0 else " "
        lines.append(f"  {sign:>1} {minus}{_drawn(abs(v), places, 2)}")
    result = float(np.float32(a) + np.float32(b))
    if total and math.isfinite(result):
        exponent = _exponent(float(total * Fraction(2)**top), _FP32)
        if exponent > top:
            lines[-1] += f"   a carry: shift right, exponent {exponent}"
        elif exponent < top:
            lines[-1] += f"   cancelled: shift left, exponent {exponent}"
    if not math.isfinite(result):
        verdict = "the sum overflows fp32"
    else:
        error = Fraction(result) - total * Fraction(2)**top
        rounds = f"fp32 rounds the sum (rne), error {float(error)!r}"
        verdict = rounds if error else "fp32 holds the sum exactly"
    return [*lines, "", f"  {verdict}", _header(_FP32)]


def _example(mode: Mode, seed: int) -> str:
    """The paper's worked example."""
    bf16 = format_named("bf16")
    acc, v = from_pattern(0xC01A0E2E, _FP32), from_pattern(0xC013, bf16)
    without = from_pattern(pattern(_round(acc, bf16, MODES["rne"], 0), bf16), bf16)
    lines = ["The example of arXiv 2510.04212, section 3.3.2: an element of Ō = P̄V at a key with P̄ = 1",
             "", *_sum([acc, v], bf16, mode, seed, labels=["acc", "v"]), "", "─" * 100,
             f"The same without the small rest of acc: {acc!r} becomes {without!r}", "",
             *_sum([without, v], bf16, mode, seed, labels=["acc", "v"]), "", "─" * 100]
    if mode.name == "rne":
        lines += textwrap.wrap(
            "Without the rest the sum is a tie, and rne sends as many ties up as down. A rest of the same "
            "sign sets the sticky bit and turns every tie away from zero. Rows with two or more keys at P̄ = 1 "
            "and V of one sign make ties in half of their sums: their Ō is off by a quarter of an ulp on "
            "average.",
            100)
    return "\n".join(lines)


# ---- dot products -------------------------------------------------------------------------------

def _dot(terms: list[tuple[str, list[str]]], f: Format, accumulator: str) -> str:
    """A dot product under an accumulator."""
    starts = [(operator, t[0]) for operator, t in terms if len(t) == 1]
    if any(len(t) > 2 for _, t in terms) or len(starts) > 1:
        raise ValueError("a dot product is written A*B C*D …, with at most one number alone, its start value")
    common = common_format(f, f)
    if accumulator in TENSOR_CORES and common is None:
        raise ValueError(f"accumulator {accumulator!r} cannot take {f.name} operands; "
                         "valid with it: sequential, exact")
    given = [[_signed(operator, t[0], f), _number(t[1], f)] for operator, t in terms if len(t) == 2]
    pairs = [[_round(n, f, MODES["rne"], 0) for n in t] for t in given]
    start = _to_fp32(_signed(*starts[0], _FP32)) if starts else 0.0
    notes = [f"  {_decimal(n)} is no {f.name} number: read as {_decimal(r)}"
             for t, s in zip(given, pairs) for n, r in zip(t, s) if n != r and not math.isnan(n)]
    a, b = (np.array([t[i] for t in pairs], np.float32) for i in (0, 1))
    c = np.float32(start)

    def result(name: str) -> float:
        return float(dot(a[None], b[:, None], c.reshape(1, 1), accumulator=name, format=f)[0, 0])

    finite = all(map(math.isfinite, [*a.tolist(), *b.tolist(), start]))
    count = f"{len(pairs)} pair" + "s" * (len(pairs) != 1)
    title = f"Dot product of {count} in {f.name}, accumulator {accumulator}"
    lines = [title, *notes, ""]
    if not finite:
        lines.append("  a term is Inf or NaN")
    elif accumulator in TENSOR_CORES:
        lines += _groups(pairs, start, accumulator, common)
    elif accumulator == "sequential":
        lines += _steps(pairs, start)
    lines += ["", _header(_FP32), _fields("result", result(accumulator), _FP32)]
    if finite:
        exact = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(start))
        lines += ["", f"  exact sum  {float(exact)!r}"]
        for name in ("exact", "sequential", *(n for n in TENSOR_CORES if common is not None)):
            r = result(name)
            unit = Fraction(2)**(_exponent(float(exact), _FP32) - 23)
            ulps = f"{float((Fraction(r) - exact) / unit):+.4f} ulp of fp32" if math.isfinite(r) else ""
            lines.append(f"  {name:<10} {_decimal(r):<24} {ulps}")
    return "\n".join(lines)


def _groups(pairs: list[list[float]], start: float, accumulator: str, f: Format) -> list[str]:
    """Numerics section 5, group by group: the terms on a common grid, what is cut off, the sum."""
    core = TENSOR_CORES[accumulator]
    length = core.products // 2 if f.name == "tf32" else core.products
    lines = [f"  {length} products and the accumulator at once, each cut toward zero to a multiple of "
             f"2^(e_max − {core.fraction_bits})"]
    acc = start
    for k0 in range(0, len(pairs), length):
        group = pairs[k0:k0 + length]
        terms = [("acc", Fraction(acc), _exponent(acc, _FP32) if acc else core.zero_exponent)]
        for x, y in group:
            exponent = _exponent(x, f) + _exponent(y, f) if x * y else core.zero_exponent
            terms.append((f"{_short(x)} × {_short(y)}", Fraction(x) * Fraction(y), exponent))
        if len(group) < length:
            terms.append((f"{length - len(group)} × padding", Fraction(0), core.zero_exponent))
        e_max = max(e for _, _, e in terms)
        scale = Fraction(2)**e_max
        heading = f"{'significand in 2^e_max, cut':<{core.fraction_bits + 6}} cut off"
        lines += ["", f"  k = {k0} to {k0 + len(group) - 1}, e_max = {e_max}",
                  f"  {'term':<26} {'exponent':>8}   {heading}"]
        total = Fraction(0)
        for label, value, exponent in terms:
            cut = _toward_zero(value, e_max - core.fraction_bits)
            total += cut
            lines.append(f"  {label:<26} {exponent:>8}  {'−' if cut < 0 else ' '}"
                         f"{_binary(abs(cut) / scale, core.fraction_bits, 3):<{core.fraction_bits + 6}}"
                         f"{_lost(value - cut)}".rstrip())
        last = max(_exponent(float(total), _FP32) - 23, -149) if total else 0
        kept = _toward_zero(total, last)
        lines.append(f"  {'sum, exact':<26} {'':>8}  {'−' if total < 0 else ' '}"
                     f"{_binary(abs(total) / scale, core.fraction_bits, 3)}")
        lines.append(
            f"  {'cut to 24 bits':<26} {'':>8}  {'−' if kept < 0 else ' '}"
            f"{_binary(abs(kept) / scale, core.fraction_bits, 3):<{core.fraction_bits + 6}}"
            f"{_lost(total - kept)}".rstrip())
        acc = math.copysign(math.inf, kept) if abs(kept) >= 2**128 else float(kept)
        if math.isinf(acc):
            stays = ", and stays so" if k0 + length < len(pairs) else ""
            lines.append(f"  2^128 or more: the result is infinite{stays}")
            break
    return lines


def _steps(pairs: list[list[float]], start: float) -> list[str]:
    """acc = fma(a, b, acc) in fp32, one by one."""
    lines = [f"  {'fma':<30} {'fp32 result':<26} rounding error"]
    acc = np.float32(start)
    for x, y in pairs:
        exact = Fraction(x) * Fraction(y) + Fraction(float(acc))
        label = f"{_short(x)} × {_short(y)} + {_short(float(acc))}"
        acc = dot(np.float32([[x]]), np.float32([[y]]), acc.reshape(1, 1))[0, 0]
        if not np.isfinite(acc):
            lines.append(f"  {label:<30} {float(acc)}: overflow")
            break
        lines.append(f"  {label:<30} {_decimal(float(acc)):<26} {_lost(Fraction(float(acc)) - exact) or '0'}")
    return lines


def _toward_zero(x: Fraction, exponent: int) -> Fraction:
    """x cut to a multiple of 2^exponent."""
    unit = Fraction(2)**exponent
    return (abs(x) // unit) * unit * (-1 if x < 0 else 1)


def _short(x: float) -> str:
    return f"{x:.5g}"


def _lost(x: Fraction) -> str:
    return f"{float(x):+.4g}" if x else ""
