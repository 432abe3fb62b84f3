"""What installs, and which way imports point."""
import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cuflash", "model", "cli")


def imports(file):
    """Modules imported at any depth of a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports break where cuda/, model/, cli/ are mapped"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module in ("cuflash", "cuda"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder):
    """cli → model → cuflash → cuda, and never the folders' top-level names (`cuda` is NVIDIA's)."""
    forbidden = {"cuflash": ("cuflash.model", "cuflash.cli"), "model": ("cuflash.cli",), "cli": ()}[folder]
    for file in (ROOT / folder).glob("*.py"):
        for name in imports(file) if file.name != "__main__.py" else ():  # which is the command itself
            assert name.split(".")[0] not in ("model", "cli"), (file, name)
            assert not name.split(".")[0] == "cuda" or name.startswith("cuda.pathfinder"), (file, name)
            assert not name.startswith(forbidden or "-"), (file, name)


@pytest.mark.parametrize("module", ["formats", "philox", "functions", "errors"])
def test_numeric_core_needs_numpy_alone(module):
    core = {"numpy", "ml_dtypes", "cuflash"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name in imports(ROOT / "cuflash" / f"{module}.py")} <= core


def test_cuda_stays_a_namespace():
    """A cuda/__init__.py here would hide NVIDIA's cuda.pathfinder from CuPy."""
    assert not (ROOT / "cuda" / "__init__.py").exists() and not (ROOT / "cuda.py").exists()


def test_import_is_quiet_and_light():
    code = "import cuflash, sys; print([m for m in ('cupy', 'h5py', 'click', 'tqdm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_dir_lists_the_public_names_and_imports_none_of_them():
    code = ("import cuflash, sys; assert {*cuflash.__all__} <= {*dir(cuflash)}, dir(cuflash); "
            "assert 'cuflash.precision' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_package_runs_as_the_command():
    command = [sys.executable, "-m", "cuflash"]
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Train a GPT, every rounding as chosen." in done.stdout
    done = subprocess.run([*command, "trian"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean 'train'" in done.stderr


def test_wheel_holds_everything(tmp_path):
    source = tmp_path / "source"  # a copy, so that no build/ is left behind
    for folder in (*FOLDERS, "cuda"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("cuflash-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [f for folder in (*FOLDERS, "cuda") for f in (ROOT / folder).iterdir() if f.suffix in (".py", ".cu", ".cuh")]
    for file in sources:
        inside = file.relative_to(ROOT).as_posix()
        assert (inside if inside.startswith("cuflash/") else f"cuflash/{inside}") in names
    assert "cuflash/py.typed" in names and any(n.endswith("licenses/LICENSE") for n in names)
    assert all(n.startswith("cuflash") for n in names)  # no top-level cuda, model or cli
