import os
import subprocess
import sys

import pytest

from cuflash.model import blas


def threads_after(width: int, **environment: str) -> str:
    code = f"from cuflash.model import blas; blas.one_thread_if_small({width}); print(blas.threads())"
    kept = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment)
    return output.stdout.strip()


@pytest.mark.skipif(blas.threads() == "unknown", reason="this NumPy's BLAS is not OpenBLAS")
def test_a_small_model_takes_one_thread_unless_told():
    assert threads_after(blas.SMALL) == "1"
    assert threads_after(blas.SMALL + 1) == threads_after(10 * blas.SMALL)
    if (os.cpu_count() or 1) > 1:
        assert threads_after(blas.SMALL, OPENBLAS_NUM_THREADS="2") == "2"


def test_another_blas_is_left_alone(monkeypatch):
    monkeypatch.setattr(blas, "_NAMES", ("no_such_{}_function",))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    blas.one_thread_if_small(1)
    assert blas.threads() == "unknown"
