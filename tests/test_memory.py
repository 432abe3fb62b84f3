import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from cuflash.cli.main import main
from cuflash.model import memory
from cuflash.model.gpt import GPT, GPTConfig, init_params
from cuflash.philox import Key
from cuflash.precision import as_precision

FAULTS = """
import resource, sys
import numpy as np
from cuflash.model import memory
if sys.argv[1:]:
    assert memory.keep_freed()
def once():
    x = [np.ones(1 << 17, np.float32) for _ in range(8)]
for _ in range(5):
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*argument: str) -> int:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return int(subprocess.run([sys.executable, "-c", FAULTS, *argument], capture_output=True, text=True, check=True,
                              env=environment).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_not_fetched_again():
    assert faults() > 1000  # 8 arrays of 128 pages, 20 times
    assert faults("kept") < 100


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_freed()


def out_of_memory(message: str) -> MemoryError:
    """As CuPy raises it."""
    return type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})(message)


@pytest.fixture
def gpu(monkeypatch):
    """2 GiB free of 80, and 1 that CuPy keeps."""
    runtime = SimpleNamespace(memGetInfo=lambda: (2 << 30, 80 << 30))
    pool = SimpleNamespace(free_bytes=lambda: 1 << 30)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    monkeypatch.setattr("cuflash.kernels.import_cupy", lambda: cupy)


def test_the_message_is_that_of_cupy():
    cupy_memory = pytest.importorskip("cupy.cuda.memory", reason="CuPy is not installed")
    assert str(cupy_memory.OutOfMemoryError(2048, 1 << 30)).startswith(
        "Out of memory allocating 2,048 bytes (allocated so far: 1,073,741,824 bytes")
    assert cupy_memory.OutOfMemoryError.__module__.startswith("cupy")


@pytest.mark.parametrize("where", ["init_params", "Trainer.step"])  # before and after the run has begun
def test_too_little_gpu_memory_in_training_is_one_line(gpu, monkeypatch, tmp_path, where):
    def fail(*_: object) -> None:
        raise out_of_memory("Out of memory allocating 5,368,709,120 bytes (allocated so far: 80,530,636,800 bytes).")
    monkeypatch.setattr(f"cuflash.model.train.{where}", fail)
    found = CliRunner().invoke(main, ["train", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "r")])
    assert found.exit_code == 2
    assert found.stderr == (
        "Error: too little GPU memory: 5 GiB more needed beside the 75 GiB that this process has; the GPU has 2 GiB "
        "free of 80 GiB; try a smaller --batch-size, with as much more --grad-accum it trains the same, a shorter "
        "--block-size, --dry-run says what a step takes\n")


def arrays_of(x: object, found: dict[int, int]) -> dict[int, int]:
    """Bytes of all arrays in a nest of tuples and dataclasses, by the identity of their memory."""
    if isinstance(x, np.ndarray):
        while isinstance(x.base, np.ndarray):
            x = x.base
        found[id(x)] = x.nbytes
    else:
        parts = vars(x).values() if hasattr(x, "__dict__") else x if isinstance(x, (tuple, list)) else ()
        for part in parts:
            arrays_of(part, found)
    return found


@pytest.mark.parametrize("config", [GPTConfig(3, 2, 64, 128, 300, False), GPTConfig(2, 4, 32, 64, 50, True)])
def test_gpu_bytes_are_a_little_less_than_what_forward_keeps(config):
    """In fp32, where a CPU keeps what a GPU does."""
    params, p = init_params(config, 1), as_precision("fp32")
    logits, saved = GPT(config, params, p, "off").forward(np.zeros((4, config.block_size), int), Key(0))
    kept = {i: n for i, n in arrays_of((logits, saved), {}).items() if i not in arrays_of(list(params.values()), {})}
    found = memory.gpu_bytes(config, p, 4) - 16 * config.n_params()
    assert 0.9 < found / sum(kept.values()) <= 1


def test_training_that_cannot_fit_is_refused_before_it_allocates(gpu):
    config = GPTConfig(12, 12, 768, 1024, 50304, False)
    memory.check_gpu(config, as_precision("bf16"), 1)
    with pytest.raises(MemoryError) as error:
        memory.check_gpu(config, as_precision("bf16"), 32)
    assert memory.shortage(error.value) == (
        "too little GPU memory: training needs at least 15 GiB; the GPU has 3 GiB free of 80 GiB")


def test_too_little_memory_of_the_host(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        np.empty(1 << 60, np.float32)
    monkeypatch.setattr("cuflash.model.sample.load_model", fail)
    found = CliRunner().invoke(main, ["sample", "r"])
    assert found.exit_code == 2 and found.stderr.startswith("Error: too little memory: Unable to allocate 4.00 EiB")
    assert "--batch-size" not in found.stderr
