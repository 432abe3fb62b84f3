"""The README's CuPy program runs as printed, on a GPU."""
import subprocess
import sys

import pytest

from tests.test_readme import ROOT, SNIPPETS


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if "cupy" in s])
def test_snippet_runs(snippet):
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
