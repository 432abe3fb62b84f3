import os
import platform
import subprocess
import sys

import pytest

from cuflash.model import memory

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
