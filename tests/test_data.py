import hashlib
import re
import sys
import sysconfig

import numpy as np
import pytest

from cuflash.model import data
from cuflash.model.data import batch, load, synthetic


def test_the_default_is_pythons_own_language_reference():
    topics = pytest.importorskip("pydoc_data.topics", reason="this Python lacks pydoc_data").topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    d = load("pydoc")
    assert bytes(d.train) + bytes(d.val) == text and d.kind == "bytes"
    assert d.sha256 == hashlib.sha256(text).hexdigest()
    assert len(d.val) == len(text) // 10
    d.check(vocab_size=256, block_size=64)


def test_synthetic_where_a_python_lacks_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert load("pydoc").name == "synthetic:words"


def test_the_standard_library_is_text_of_every_distribution(tmp_path, monkeypatch):
    for name in ("ast.py", "json/decoder.py", "json/tests/no.py", "test/no.py", "site-packages/no.py", "json/no.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name * 9)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": tmp_path}.get)
    data._stdlib.cache_clear()
    d = load("stdlib")
    data._stdlib.cache_clear()
    assert bytes(d.train) + bytes(d.val) == b"\n".join(n.encode() * 9 for n in ("ast.py", "json/decoder.py"))
    assert sys.version.split()[0] in d.name and d.kind == "bytes"
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": tmp_path / "none"}.get)
    with pytest.raises(ValueError, match="this Python has no sources"):
        load("stdlib")
    data._stdlib.cache_clear()


@pytest.mark.parametrize("spec,digest", [
    ("synthetic:words,seed=5,size=100000", "19bdb4c6"),
    ("synthetic:words,seed=5,size=100000,repeat=40", "33a1bb28"),
    ("synthetic:bytes,size=1000", "dcee8285"),
])
def test_synthetic_text_is_the_same_bytes_everywhere(spec, digest):
    text = synthetic(spec)
    assert len(text) == int(re.search(r"size=(\d+)", spec)[1])
    assert hashlib.sha256(text).hexdigest()[:8] == digest


@pytest.mark.parametrize("repeat", [0, 30, 90])
def test_repeat_sets_how_many_words_repeat_the_one_before(repeat):
    words = synthetic(f"synthetic:words,repeat={repeat}").decode().replace(".\n", " ").split(" ")
    share = 100 * np.mean([a == b for a, b in zip(words, words[1:])])
    assert repeat <= share + 1 and share - repeat < 8  # frequent words follow themselves by chance too


def test_text_file_folder_and_entropy(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"abab" * 100)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"cdcd" * 100)
    (tmp_path / ".hidden").write_bytes(b"x" * 100)
    (tmp_path / "binary").write_bytes(b"x\0" * 100)
    one = load(str(tmp_path / "b.txt"))
    assert bytes(one.train) + bytes(one.val) == b"abab" * 100
    assert one.unigram_entropy() == pytest.approx(np.log(2))
    folder = load(str(tmp_path))
    assert bytes(folder.train) + bytes(folder.val) == b"abab" * 100 + b"\n" + b"cdcd" * 100


def test_nanogpts_bin_with_its_val_file(tmp_path):
    tokens = np.arange(3000, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    tokens[:500].tofile(tmp_path / "val.bin")
    for spec in (tmp_path, tmp_path / "train.bin"):
        d = load(str(spec))
        assert d.kind == "tokens" and np.array_equal(d.train, tokens) and np.array_equal(d.val, tokens[:500])
        assert d.sha256 == hashlib.sha256(tokens.tobytes() + tokens[:500].tobytes()).hexdigest()
    (tmp_path / "val.bin").unlink()
    d = load(str(tmp_path / "train.bin"))
    assert len(d.train) == 2700 and np.array_equal(d.val, tokens[2700:])


@pytest.mark.parametrize("magic,dtype", [(20240520, "<u2"), (20240801, "<u4")])
def test_llmcs_bin_is_told_by_its_magic(tmp_path, magic, dtype):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 2000
    tokens = np.arange(2000).astype(dtype)
    path = tmp_path / "tiny.bin"
    path.write_bytes(header.tobytes() + tokens.tobytes())
    d = load(str(path))
    assert np.array_equal(np.concatenate([d.train, d.val]), tokens) and d.train.dtype == dtype
    path.write_bytes((header.tobytes() + tokens.tobytes())[:-5])
    with pytest.raises(ValueError, match="cut short or damaged: its header counts 2,000 tokens"):
        load(str(path))
    header[1] = 7
    path.write_bytes(header.tobytes() + tokens.tobytes())
    with pytest.raises(ValueError, match="llm.c file of version 7; known is 1"):
        load(str(path))


def test_a_batch_is_a_function_of_seed_step_and_sample():
    tokens = np.arange(1000)
    x, y = batch(tokens, 8, range(6), seed=3, step=7)
    assert x.shape == y.shape == (6, 8) and np.array_equal(y, x + 1) and x.dtype == np.int64
    again, _ = batch(tokens, 8, range(4, 6), seed=3, step=7)
    assert np.array_equal(x[4:], again)  # not of the micro-batch
    for seed, step in ((4, 7), (3, 8)):
        assert not np.array_equal(x, batch(tokens, 8, range(6), seed=seed, step=step)[0])


def test_windows_cover_the_whole_text_and_stay_in_it():
    tokens = np.arange(20)
    starts = {
        int(start) for step in range(60) for start in batch(tokens, 4, range(8), seed=1, step=step)[0][:, 0]
    }
    assert starts == set(range(16))  # 20 − 4 places, and 480 draws miss one of 16 with chance below 1e-12


@pytest.mark.parametrize("spec,message", [
    ("nowhere.txt", "--data nowhere.txt: no such file or folder; valid too: pydoc, stdlib, synthetic:words|bytes"),
    ("synthetic:wrods", "unknown synthetic text 'wrods': did you mean 'words'?"),
    ("synthetic:words,sede=1", "unknown option of synthetic text 'sede': did you mean 'seed' or"),
    ("synthetic:words,seed=-1", "seed must be a whole number, got '-1'"),
    ("synthetic:words,repeat=101", "repeat is a percentage, 0 to 100, got 101"),
])
def test_names_that_are_refused(spec, message):
    with pytest.raises(ValueError) as e:
        load(spec)
    assert message in str(e.value)


def test_files_that_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="the file is empty"):
        load(str(tmp_path / "empty.txt"))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="odd number of bytes: not raw uint16"):
        load(str(tmp_path / "odd.bin"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image").write_bytes(b"\0\1\2")
    with pytest.raises(ValueError, match="no text file in this folder"):
        load(str(tmp_path / "folder"))


def test_tokens_outside_the_vocabulary_and_short_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CHUNK", 64)  # the position is counted over several chunks
    tokens = np.zeros(1000, "<u2")
    tokens[300] = 999
    tokens.tofile(tmp_path / "t.bin")
    d = load(str(tmp_path / "t.bin"))
    with pytest.raises(
        ValueError,
        match=r"token 999 at 300 of its training part is outside the vocabulary of 256 \(0 to 255\)",
    ):
        d.check(256, 8)
    d.check(1000, 8)
    with pytest.raises(ValueError, match="its validation part has 100 tokens, fewer than one block of 100"):
        d.check(1000, 100)
    d.check(1000, 99)
