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


@pytest.mark.parametrize("stream", ["default", "own", "of another device"])
def test_the_function_of_the_page(stream, seed):
    namespace: dict = {}
    exec(re.search(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[1], namespace)
    cupy = import_cupy()
    p = Precision.named("bf16-fa2")
    inputs = Case(4, 4, 130, 130, 64, True, p).inputs(np.random.default_rng(seed))
    inputs[3][...] = inputs[3][:, :, :1]  # dO comes as autograd hands on a sum's: expanded, with strides of 0
    q, k, v, do = (cupy.asarray(x) for x in inputs)
    o, saved = flash_attention_forward(q, k, v, causal=True, precision=p, fix="on")
    expected = [o, *flash_attention_backward(do, saved)]
    device = int(stream == "of another device")  # which is not the current one
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    torch.cuda.synchronize()
    there = torch.cuda.Stream(device) if stream != "default" else torch.cuda.default_stream(device)
    with torch.cuda.stream(there), torch.cuda.device(0):
        tq, tk, tv, tdo = (torch.from_dlpack(x).to(f"cuda:{device}", copy=True) for x in (q, k, v, do))
        for x in (tq, tk, tv):
            x.requires_grad_()
        to = namespace["scaled_dot_product_attention"](tq, tk, tv, is_causal=True, fix="on")
        to.backward(tdo[:, :, :1].expand(tdo.shape))
    torch.cuda.synchronize(device)
    for a, b in zip(expected, (to.detach(), tq.grad, tk.grad, tv.grad)):
        assert b.device.index == device
        assert equal(cupy.asnumpy(a), cupy.asnumpy(cupy.from_dlpack(b.to("cuda:0").contiguous())))
