"""The README's Python runs as printed, and its test command is the one that CI runs."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if "cupy" not in s], ids=lambda s: s.splitlines()[-1][:40])
def test_snippet_runs(snippet):
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr


def test_ci_runs_the_test_command():
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2]
    assert commands[0].endswith("cuflash train --precision bf16 --fix on")
    assert commands[1].endswith("-m pytest") and "'.[test]'" in commands[1]
    assert "grep -m1 -F \"'.[test]'\" README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_file_it_points_to_exists():
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
