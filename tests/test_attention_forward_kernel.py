"""Launches of the forward kernel, without a GPU: what is packed, compiled and kept."""
import re

import numpy as np
import pytest

from cuflash import attention_forward, kernels
from cuflash.fixes import Capped, QiuB7, as_fix
from cuflash.precision import Precision


def test_parameters_are_packed_as_the_kernel_reads_them():
    text = (kernels.source_dir() / "attention_forward.cu").read_text(encoding="utf-8")
    body = re.sub(r"//.*", "", re.search(r"struct Parameters \{(.*?)\};", text, re.S)[1])
    packed = ""
    for line in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"(Array<.*?>|(?:unsigned )?long long\*?|float)\s*(.*)", line).groups()
        for name in names.split(","):
            packed += ("Pqqq" if kind.startswith("Array") else "P" if "*" in kind + name
                       else {"long long": "q", "unsigned long long": "Q", "float": "f"}[kind])
    assert "@" + packed == attention_forward._PARAMETERS.format


@pytest.fixture
def headers(monkeypatch):
    """precision.cuh of each kernel that a plan asks for, on a device that is not there."""
    asked = []
    monkeypatch.setattr(attention_forward, "_plans", {})
    monkeypatch.setattr(kernels, "capability", lambda device: 90)
    monkeypatch.setattr(kernels, "kernel", lambda *args, **kwargs: asked.append(args[3]["precision.cuh"]))
    return asked


def plan(fix, precision="fp16-fa2"):
    return attention_forward._plan(Precision.named(precision), as_fix(fix), 64, 2, 0, "float16", "float16", True, True, 0,
                                   True, False)


class Toleranced(QiuB7):
    name, parameters = "toleranced", {"beta": 7.0}

    def __init__(self, tolerance):
        super().__init__()
        self.epsilon = tolerance


def test_a_plan_serves_its_own_fix_alone(headers):
    """A default cap shrinks with fp16 and a given one of the same value does not: two kernels."""
    fixes = ["off", "capped", "capped:cap=80", "capped:cap=9", "qiu-b7", "qiu-b7:beta=2", Toleranced(0.0), Toleranced(0.5)]
    for fix in fixes:
        plan(fix)
    caps = [np.float32(float.fromhex(x)) for text in headers for x in re.findall(r"float cap = (\S+)f;", text)]
    assert len(headers) == len(fixes) and caps == [9, 80, 9]
    for fix in (*fixes, Capped, "on", "capped:beta=2"):
        plan(fix)
    assert len(headers) == len(fixes)  # all known
