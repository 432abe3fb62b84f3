"""docs/torch.md as printed: gradients through torch's autograd are those of the CuPy call."""
import re
from pathlib import Path

import numpy as np
import pytest

from cuflash.attention import flash_attention_backward, flash_attention_forward
from cuflash.kernels import import_cupy
from cuflash.testing import Case, equal
from cuflash import Precision

torch = pytest.importorskip("torch", reason="docs/torch.md is about torch")
DOC = Path(__file__).parent.parent.parent / "docs" / "torch.md"


def test_the_function_of_the_page(seed):
    namespace: dict = {}
    exec(re.search(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[1], namespace)
    cupy = import_cupy()
    p = Precision.named("bf16-fa2")
    q, k, v, do = (cupy.asarray(x) for x in Case(4, 4, 130, 130, 64, True, p).inputs(np.random.default_rng(seed)))
    o, saved = flash_attention_forward(q, k, v, causal=True, precision=p, fix="on")
    expected = [o, *flash_attention_backward(do, saved)]
    stream = torch.cuda.Stream()  # not the default one: what is queued elsewhere would be wrong here
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        tq, tk, tv = (torch.from_dlpack(x).clone().requires_grad_() for x in (q, k, v))
        to = namespace["scaled_dot_product_attention"](tq, tk, tv, is_causal=True, fix="on")
        to.backward(torch.from_dlpack(do))
    torch.cuda.synchronize()
    for a, b in zip(expected, (to.detach(), tq.grad, tk.grad, tv.grad)):
        assert equal(cupy.asnumpy(a), cupy.asnumpy(cupy.from_dlpack(b.contiguous())))
