"""What an audit says of arrays on a GPU is what it says of the same on a CPU."""
import numpy as np
import pytest

from cuflash import kernels
from cuflash.audit import Capture, audit
from cuflash.precision import Precision
from cuflash.testing import Case


@pytest.mark.parametrize("name", ["bf16", "bf16-fa2"])
def test_an_audit_of_gpu_arrays(name, seed):
    print("seed", seed)
    cupy = kernels.import_cupy()
    p = Precision.named(name)
    p = p.replace(accumulator="hopper" if kernels.capability(cupy.cuda.Device().id) >= 90 else "ampere")
    arrays = Case(2, 1, 200, 200, 64, True, p, distribution="one_sign").inputs(np.random.default_rng(seed))
    cpu, gpu = (audit(Capture.of(*x, causal=True), p, cures=False) for x in (arrays, map(cupy.asarray, arrays)))
    assert gpu.tied_rows == cpu.tied_rows and gpu.first == cpu.first
    assert gpu.errors == cpu.errors and gpu.exact == cpu.exact
    for a, b in zip(cpu.sites_by_head, gpu.sites_by_head, strict=True):
        assert (a.site, a.head, a.count, a.ties, a.changed, a.max) == (b.site, b.head, b.count, b.ties, b.changed, b.max)
        assert np.isclose(a.mean, b.mean, rtol=1e-9, atol=1e-12)  # sums in another order
    assert cpu.delta == gpu.delta
