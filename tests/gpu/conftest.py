"""Tests that need a GPU: skipped with the reason where there is none, drawn afresh on every run.

CUFLASH_TEST_SEED repeats a run. CUFLASH_TEST_RECORD names a folder: the tests also write there what
tests/record/ keeps for machines without a GPU.
"""
import os
import secrets
from pathlib import Path

import pytest

from cuflash.kernels import gpu_reason

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents]
    if here and (reason := gpu_reason()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture(scope="session")
def seed() -> int:
    return int(os.environ.get("CUFLASH_TEST_SEED") or secrets.randbits(32))


@pytest.fixture(scope="session")
def record_folder() -> Path | None:
    folder = os.environ.get("CUFLASH_TEST_RECORD")
    return Path(folder) if folder else None
