"""`explain` shows what the library computes."""
import re

import ml_dtypes
import numpy as np
import pytest

from cuflash.accumulators import dot
from cuflash.explain import explain, from_pattern, pattern
from cuflash.formats import format_named, round_to


def result(text):
    """The value on the last `result` line."""
    return float(re.findall(r"^  result .*  0x[0-9A-F]+  (\S+)$", text, re.M)[-1])


def test_the_papers_example():
    text = explain()
    with_rest, without = text.split("The same without")
    for number in (
        "-2.4071154594421387",
        "-2.296875",
        "-4.703990459442139",
        "-4.71875",
        "-0.014759540557861328",
        "1.0010110 1 000011100010111",
        "1 10000001 00101101000011100010111",
        "0xC097",
    ):
        assert number in with_rest, number
    assert "rne goes away from zero" in with_rest
    for number in ("-2.40625", "-4.703125", "-4.6875", "0.015625", "1.0010110 1 0 ", "0xC096"):
        assert number in without, number
    assert "goes to the even neighbour" in without
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("bf16", ml_dtypes.bfloat16),
        ("fp16", np.float16),
        ("e4m3", ml_dtypes.float8_e4m3),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_patterns_of_every_value(name, dtype):
    f = format_named(name)
    bits = np.arange(1 << f.bits, dtype=f"u{f.bits // 8}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = bits.view(dtype).astype(np.float64)
    for n, x in zip(bits.tolist(), values.tolist()):
        if np.isnan(x):
            assert np.isnan(from_pattern(n, f))
        else:
            assert from_pattern(n, f) == x and np.signbit(from_pattern(n, f)) == np.signbit(x)
            assert pattern(x, f) == n


@pytest.mark.parametrize("mode", ["rne", "rz", "rna", "rd", "ru"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "e3m2", "fp32"])
def test_one_rounding(name, mode):
    rng = np.random.default_rng(len(name) + 7 * len(mode))
    values = [
        *rng.standard_normal(10),
        *(rng.standard_normal(5) * 2.0 ** rng.integers(-160, 140, 5)),
        0.0,
        -0.0,
        1e-50,
        1e39,
    ]
    for x in values:
        text = explain(repr(float(x)), format=name, mode=mode)
        assert result(text) == float(round_to(np.float64(x), name, mode)), text
        drawn = re.search(r"^  ([01]\.[01]+) ([01]) ([01]+)(…?)  × 2\^(-?\d+)$", text, re.M)
        if drawn and not drawn[4]:  # kept, guard and sticky are x, all of it
            digits = drawn[1].replace(".", "") + drawn[2] + drawn[3]
            assert int(digits, 2) * 2.0**(int(drawn[5]) - len(digits) + 1) == abs(x)


def test_patterns_and_special_values_as_input():
    assert result(explain("0xC097")) == -4.71875
    assert result(explain("0xC0968717")) == -4.71875  # eight digits are fp32
    assert result(explain("0x7E", format="fp8_e4m3")) == 448
    assert "inf stays inf" in explain("inf")
    assert "-inf becomes -448" in explain("-inf", format="fp8_e4m3")
    assert "nan stays nan" in explain("nan")
    assert "probability" in explain("1.001", mode="sr")
    assert result(explain("1.001", mode="sr", seed=3)) in (1.0, 1.0078125)


def test_sums_are_fp32_then_rounded():
    rng = np.random.default_rng(8)
    for _ in range(20):
        a, b, c = (np.float32(x) for x in rng.standard_normal(3) * 2.0**rng.integers(-12, 12, 3))
        text = explain(f"{a!r} + {b!r} + {c!r}".replace("np.float32(", "").replace(")", ""))
        total = (a + b) + c
        assert result(text) == float(round_to(total, "bf16")), text
        assert f"{float(total)!r}" in text


@pytest.mark.parametrize("accumulator", ["hopper", "ampere"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp8_e5m2"])
def test_the_drawn_dot_product_is_that_of_the_library(name, accumulator):
    rng = np.random.default_rng(9)
    for trial in range(12):
        k = int(rng.integers(1, 40))
        wide = 2.0**rng.integers(-6 * (trial % 3), 1, (2, k))
        a, b = (round_to((rng.standard_normal(k) * w).astype(np.float32), name) for w in wide)
        c = np.float32(rng.standard_normal() if trial % 2 else 0)
        text = explain(" ".join(f"{float(x)!r}*{float(y)!r}" for x, y in zip(a, b)) + f" {float(c)!r}",
                       format=name, accumulator=accumulator)
        expected = float(
            dot(a[None], b[:, None], c.reshape(1, 1), accumulator=accumulator, format=name)[0, 0]
        )
        assert result(text) == expected
        e_max = int(re.findall(r"e_max = (-?\d+)", text)[-1])
        sign, digits = re.findall(r"cut to 24 bits\s+(−?)\s*([01]+\.[01]+)", text)[-1]
        whole, fraction = digits.split(".")
        drawn = int(whole + fraction, 2) * 2.0**(e_max - len(fraction)) * (-1 if sign else 1)
        assert drawn == expected, text
        assert max(map(len, text.splitlines())) <= 100


def test_sequential_and_exact_dot_products():
    assert result(explain("1*2 3*5 7", accumulator="sequential")) == 24
    assert result(explain("1*1 0.00390625*0.00390625", accumulator="exact")) == 1 + 2.0**-16
    assert "3e-05 is no bf16 number" in explain("3e-5*1")


@pytest.mark.parametrize("text, options, message", [
    ("1 2", {}, "cannot be read: write X, A . B"),
    ("1 +", {}, "cannot be read"),
    ("one", {}, "no number"),
    ("0xC0971", {}, "bf16 takes 4 hexadecimal digits"),
    ("0xZZZZ", {}, "no bit pattern"),
    ("1*2*3", {}, "A.B C.D"),
    ("1*2 3 4", {}, "at most one number alone"),
    ("1", {"format": "bf61"}, "unknown format 'bf61': did you mean 'bf16'"),
    ("1", {"mode": "rnd"}, "unknown mode 'rnd'"),
    ("1*1", {"accumulator": "hooper"}, "unknown accumulator 'hooper': did you mean 'hopper'"),
    ("1*1", {"accumulator": "library"}, "not defined to the bit"),
    ("1*1", {"format": "fp32"}, "'hopper' cannot take fp32"),
])
def test_mistakes(text, options, message):
    with pytest.raises(ValueError, match=message):
        explain(text, **options)


def test_minus_is_plus_the_negative():
    assert explain("1 - 2.5") == explain("1 + -2.5") and result(explain("3 - 0xC010 − 1")) == 3 + 2.25 - 1
    assert explain("2*3 - 1.5*2 - 1") == explain("2*3 -1.5*2 -1") and result(explain("2*3 - 1.5*2 - 1")) == 2
    assert explain("1*2").startswith("Dot product of 1 pair in bf16")


@pytest.mark.parametrize("text, options, message", [
    ("*", {}, r"\* stands between two numbers"), ("1.5*", {}, r"\* stands between two numbers"),
    ("1 -", {}, "- stands between two numbers"), ("1 + - 2", {}, "- stands between two numbers"),
    ("1e400", {}, "'1e400' is beyond fp64"), ("-1e-400", {}, "'-1e-400' is beyond fp64"),
    ("1.5*1e400", {}, "'1e400' is beyond fp64"),
    ("1.5", {"accumulator": "library"}, "not defined to the bit; valid: sequential, hopper, ampere, exact"),
    ("1.5", {"accumulator": "hoper"}, "unknown accumulator 'hoper': did you mean 'hopper'"),
    ("1.5", {"accumulator": "hopper"}, r"'hopper' is for products, A\*B C\*D; there is none here"),
    ("", {"accumulator": "exact"}, "'exact' is for products"),
    ("", {"format": "fp16"}, "the paper's example is in bf16"),
    ("1*2", {"mode": "rz"}, "mode 'rz' is for one rounding"),
])
def test_nothing_is_ignored_or_read_as_something_else(text, options, message):
    with pytest.raises(ValueError, match=message):
        explain(text, **options)
    assert "inf" in explain("inf") and "0x0000" in explain("0e-999")


def test_errors_have_the_fewest_digits_that_are_right():
    assert "error  -0.000125 =" in explain("1.000125")
    assert "error  -0.00390625 =" in explain("1.00390625")  # exact in fp32, so the error is exact, too
    rng = np.random.default_rng(8)
    for x in rng.uniform(-4, 4, 50):
        error = float(re.search(r"error  (\S+) =", explain(repr(float(x))))[1])
        assert abs(error - (float(x.astype(ml_dtypes.bfloat16)) - x)) <= np.spacing(abs(x)) / 2
