"""Fixtures that several files share."""
import pytest

from cuflash.model.run import Run
from cuflash.model.runner import Task, work
from tests.tiny_study import CRITERION, TINY


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """bf16 at a high rate, so that attention is not flat."""
    path = tmp_path_factory.mktemp("states") / "run"
    work(Task(str(path), TINY | {"precision": "bf16", "lr": 3e-2, "checkpoint_every": 4, "keep": 0}, CRITERION,
              stop_early=False, keep=True))
    return Run(path)
