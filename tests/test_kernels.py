"""Compile and cache, without a GPU: only NVRTC is needed."""
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cuflash import kernels

SOURCE = '''#include "double.cuh"
extern "C" __global__ void scale(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]) * FACTOR; }
extern "C" __global__ void zero(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[1];
    __syncthreads();
    x[0] = s[63];
}
'''
HEADER = "#pragma once\ninline float twice(float x) { return x + x; }\n"


@pytest.fixture(autouse=True)
def fresh_caches():
    memos = (kernels.cache_dir, kernels.gpu_reason, kernels.nvrtc_reason, kernels.import_cupy)
    for memo in memos:
        memo.cache_clear()
    yield
    for memo in memos:
        memo.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two sources in place of cuda/, and an empty cache."""
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "double.cuh").write_text(HEADER)
    monkeypatch.setattr(kernels, "source_dir", lambda: tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_nvrtc_is_there():
    assert kernels.nvrtc_reason() is None


def test_cubin_is_a_whole_elf_file(folder):
    cubin = kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2}).read_bytes()
    assert cubin[:4] == b"\x7fELF"
    section_offset = int.from_bytes(cubin[40:48], "little")
    section_bytes = int.from_bytes(cubin[58:60], "little") * int.from_bytes(cubin[60:62], "little")
    program_offset = int.from_bytes(cubin[32:40], "little")
    program_bytes = int.from_bytes(cubin[54:56], "little") * int.from_bytes(cubin[56:58], "little")
    assert len(cubin) == max(section_offset + section_bytes, program_offset + program_bytes)


def test_a_second_call_does_not_compile(folder, monkeypatch):
    first = kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2})
    monkeypatch.setattr(kernels, "_nvrtc", None)  # a call would raise
    assert kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2}) == first


@pytest.mark.parametrize("kept", [0, 40, 1000, -1])
def test_a_cubin_that_was_cut_off_is_compiled_again(folder, kept):
    path = kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2})
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2}) == path and path.read_bytes() == whole


def test_every_part_of_the_program_is_in_the_key(folder):
    def path(arch="sm_80", factor=2, **headers):
        return kernels.compile_cubin("scale", arch, {"FACTOR": factor}, headers)

    seen = [path(), path("sm_90a"), path(factor=3), path(**{"double.cuh": HEADER.replace("x + x", "x")})]
    (folder / "double.cuh").write_text(HEADER.replace("x + x", "2 * x"))
    seen.append(path())
    (folder / "scale.cu").write_text(SOURCE + "\n")
    seen.append(path())
    (folder / "unrelated.cuh").write_text("nothing")
    assert path() == seen[-1]
    assert len(set(seen)) == len(seen)


def test_headers_in_memory_may_include_files_and_each_other(folder):
    (folder / "scale.cu").write_text(
        '#include "sites.cuh"\nextern "C" __global__ void k(float* x) { *x = site(*x); }')
    headers = {"sites.cuh": '#include "mode.cuh"\n#include "double.cuh"\n'
                            "inline float site(float x) { return mode(twice(x)); }",
               "mode.cuh": "inline float mode(float x) { return -x; }"}
    assert "k" in kernels.resources("scale", "sm_80", headers=headers)


def test_a_define_is_passed_as_it_is(folder):
    expression = 'x[0] > 1 ? x[1] * 2.0f : "a b"[0]'
    assert "scale" in kernels.resources("scale", "sm_80", {"FACTOR": f"({expression})"})
    assert kernels.compile_cubin("scale", "sm_80", {"FACTOR": True}) == kernels.compile_cubin(
        "scale", "sm_80", {"FACTOR": 1})


def test_toolkit_headers_are_found(folder):
    (folder / "scale.cu").write_text(
        '#include <cuda_bf16.h>\nextern "C" __global__ void k(__nv_bfloat16* x) { x[0] = x[1]; }')
    assert "k" in kernels.resources("scale", "sm_80")


def test_resources(folder):
    found = kernels.resources("scale", "sm_90a", {"FACTOR": 2})
    assert set(found) == {"scale", "zero"}
    assert found["zero"].shared == 256 and found["scale"].shared == 0
    assert all(0 < kernel.registers < 32 for kernel in found.values())
    assert all(kernel[1:4] == (0, 0, 0) for kernel in found.values())


def test_resources_tell_spills(folder):
    (folder / "scale.cu").write_text('''extern "C" __global__ void __launch_bounds__(1024) k(float* x) {
        float v[128];
        for (int i = 0; i < 128; i++) v[i] = x[i * blockDim.x + threadIdx.x];
        for (int i = 0; i < 128; i++) for (int j = 0; j < 128; j++) v[i] += v[j] * v[(i + j) % 128];
        for (int i = 0; i < 128; i++) x[i * blockDim.x + threadIdx.x] = v[i]; }''')
    found = kernels.resources("scale", "sm_80")["k"]
    assert found.registers <= 64 and found.spill_stores > 0 and found.spill_loads > 0 and found.stack > 0


def test_the_options_keep_every_rounding(folder):
    """A product and a sum stay two operations, and subnormals are not flushed: no fma and no .ftz in the PTX."""
    from cupy.cuda import nvrtc
    (folder / "scale.cu").write_text(
        'extern "C" __global__ void k(float* x) { x[0] = x[1] * x[2] + x[3] / sqrtf(x[4]); }')
    program = kernels._program("scale", "compute_80", {}, {})
    handle = nvrtc.createProgram(program.texts["scale.cu"], "scale.cu", (), ())
    nvrtc.compileProgram(handle, program.options)
    ptx = nvrtc.getPTX(handle).decode()
    nvrtc.destroyProgram(handle)
    assert "fma" not in ptx and "ftz" not in ptx and "approx" not in ptx
    assert all(word in ptx for word in ("mul.", "add.", "div.rn.f32", "sqrt.rn.f32"))


def test_a_compiler_error_shows_the_line(folder):
    (folder / "double.cuh").write_text("#pragma once\n\ninline float twice(float x) { return xx + x; }\n")
    with pytest.raises(kernels.KernelCompileError) as error:
        kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2})
    lines = str(error.value).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith('double.cuh(3): error: identifier "xx"'))
    assert "return xx + x" in lines[at + 1]
    assert lines[at + 2].index("^") == lines[at + 1].index("xx")


def test_wrong_names_are_told(folder):
    with pytest.raises(ValueError, match="did you mean 'scale'"):
        kernels.compile_cubin("scael", "sm_80")
    (folder / "double.cuh").unlink()
    with pytest.raises(kernels.KernelCompileError, match="includes 'double.cuh'"):
        kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2})
    with pytest.raises(kernels.KernelCompileError, match=r"sm_81(.|\n)*gpu-architecture"):
        kernels.compile_cubin("scale", "sm_81", {"FACTOR": 2}, {"double.cuh": HEADER})


def test_architecture():
    assert kernels.architecture(80) == "sm_80" and kernels.architecture(90) == "sm_90a"
    assert int(kernels.newest_architecture().removeprefix("sm_")) >= 120


def stands_alone(name):
    try:
        kernels._read(name, {})
    except kernels.KernelCompileError:
        return False  # it takes a precision as a header: compiled by its operation's own tests
    return True


@pytest.mark.parametrize("name", list(filter(stands_alone, kernels.source_names())))
def test_sources_that_stand_alone_compile(name):
    for arch in ("sm_80", "sm_90a", kernels.newest_architecture()):
        assert kernels.compile_cubin(name, arch).exists()


# ---- the cache's folder

def test_cache_dir_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "höme"))
    monkeypatch.delenv("CUFLASH_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert kernels.cache_dir() == tmp_path / "höme" / ".cache" / "cuflash"
    kernels.cache_dir.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernels.cache_dir() == tmp_path / "xdg" / "cuflash"
    kernels.cache_dir.cache_clear()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "own"))
    assert kernels.cache_dir() == tmp_path / "own"


def test_a_path_that_is_no_utf8_is_passed_over(tmp_path, monkeypatch):
    """As /home/ren\xe9 of Latin-1 days: CuPy could not name it to CUDA."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / os.fsdecode(b"ren\xe9")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.cache_dir() == tmp_path / "cuflash"
    assert os.listdir(tmp_path) == ["cuflash"]


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """HOME below a file, where no folder can be made, even by root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME", "CUPY_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_without_a_home_the_cache_is_private_and_said_once(no_home):
    with pytest.warns(UserWarning, match="CUFLASH_CACHE_DIR") as caught:
        folder = kernels.cache_dir()
        assert kernels.cache_dir() == folder
    assert len(caught) == 1
    assert folder == no_home / f"cuflash-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_not_trusted(no_home):
    planted = no_home / f"cuflash-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.warns(UserWarning):
        folder = kernels.cache_dir()
    assert folder != planted and stat.S_IMODE(folder.stat().st_mode) == 0o700


CHILD = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from cuflash import kernels
kernels.source_dir = lambda: Path(sys.argv[1])
kernels.import_cupy()
print(kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2}))
"""


def _child(folder, **environment):
    root = Path(__file__).parents[1]
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], cwd=root, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, encoding="utf-8",
                            env={**os.environ, "PYTHONPATH": str(root), **environment})


def test_cupy_imports_and_kernels_compile_without_a_home(folder, no_home, monkeypatch):
    child = _child(folder)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert Path(out.strip()).parent == no_home / f"cuflash-{os.getuid()}"


def test_processes_compile_at_once_in_a_non_ascii_folder(folder):
    cache = folder / "größe 缓存"
    children = [_child(folder, CUFLASH_CACHE_DIR=str(cache)) for _ in range(4)]
    paths = set()
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        paths.add(out.strip())
    assert len(paths) == 1
    assert [str(path) for path in cache.iterdir()] == list(paths)  # no temporary file is left


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space.*set CUFLASH_CACHE_DIR.*cache/scale-sm_80"):
        kernels.compile_cubin("scale", "sm_80", {"FACTOR": 2})
    assert list((folder / "cache").iterdir()) == []


# ---- the device

def test_gpu_reason_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # import raises
    monkeypatch.setattr(kernels, "_has_driver", lambda: True)
    assert "install the extra cuda12 or cuda13: pip install '.[cuda12]'" in kernels.gpu_reason()


def test_without_a_driver_nothing_is_to_be_installed(monkeypatch):
    asked = []

    def missing(name):
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(kernels.ctypes, "CDLL", missing)
    assert "no NVIDIA driver" in kernels.gpu_reason() and "pip" not in kernels.gpu_reason() and len(asked) == 1


@pytest.mark.parametrize("capability, words", [(75, "7.5 is too old: the kernels need 8.0"),
                                               (999, "NVRTC .* does not know compute capability 99.9: install a newer")])
def test_a_device_that_cannot_run_kernels_is_told(folder, monkeypatch, capability, words):
    monkeypatch.setattr(kernels.import_cupy().cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(kernels, "capability", lambda device: capability)
    monkeypatch.setattr(kernels, "device_name", lambda: "GPU X")
    with pytest.raises(ValueError, match=f"GPU X: .*{words}"):
        kernels.kernel("scale", "scale", {"FACTOR": 2})


def test_gpu_reason_is_a_sentence_or_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reason = kernels.gpu_reason()
    assert reason is None or "nvidia-smi" in reason or "compute capability" in reason
