"""Training text as a vector of tokens, and batches as a function of (data seed, step)."""
import functools
import hashlib
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuflash.errors import unknown
from cuflash.philox import philox4x32

DEFAULT = "pydoc"
STDLIB = "stdlib"
# Of Python's standard library, what some distributions leave out.
LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "turtle", "lib2to3", "distutils", "ensurepip", "venv"}
VAL_SHARE = 10            # one token in so many, the last ones, is kept for validation
LLMC = {20240520: np.uint16, 20240801: np.uint32}  # llm.c's magic numbers
LLMC_HEADER = 256         # int32 words
ENTROPY_TOKENS = 1 << 26  # tokens looked at for the unigram entropy
CHUNK = 1 << 24


@dataclass(frozen=True)
class Data:
    """Tokens split for training and validation.

    `kind` is "bytes" (tokens are the bytes of a text) or "tokens"; `sha256` covers the bytes they
    came from, training part first.
    """

    name: str
    kind: str
    train: np.ndarray
    val: np.ndarray
    sha256: str

    def check(self, vocab_size: int, block_size: int) -> None:
        """ValueError for a token outside the vocabulary, or a part shorter than a block and one target."""
        for part, tokens in (("training", self.train), ("validation", self.val)):
            if len(tokens) < block_size + 1:
                raise ValueError(
                    f"--data {self.name}: its {part} part has {len(tokens)} tokens, fewer than one block of "
                    f"{block_size} and its last target; give a longer text or a smaller --block-size")
            for start, chunk in _chunks(tokens):
                if chunk.max() >= vocab_size:
                    at = start + int(np.argmax(chunk >= vocab_size))
                    raise ValueError(
                        f"--data {self.name}: token {tokens[at]} at {at:,} of its {part} part is outside the "
                        f"vocabulary of {vocab_size} (0 to {vocab_size - 1}); choose a model with a larger "
                        "vocab_size, as --model gpt2")

    def unigram_entropy(self) -> float:
        """Entropy of the training tokens' frequencies, nats: the loss of a model that knows nothing else."""
        counts = np.bincount(self.train[:ENTROPY_TOKENS])
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def batch(tokens: np.ndarray, block_size: int, samples: range, *, seed: int,
          step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (len(samples), block_size) of these samples of a step's batch.

    A sample's place in the text is a function of (seed, step, its number) alone, so neither the
    micro-batches nor an earlier part of the run changes it.
    """
    numbers = np.arange(samples.start, samples.stop, dtype=np.uint64)
    low, high, _, _ = philox4x32((numbers, np.uint64(step), 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    starts = (high.astype(np.uint64) << np.uint64(32) | low) % np.uint64(len(tokens) - block_size)
    windows = np.stack([tokens[int(s):int(s) + block_size + 1] for s in starts]).astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def load(spec: str) -> Data:
    """The data that `--data` names.

    `pydoc` (the language reference that Python carries; synthetic text where it is missing), `stdlib` (the
    sources of its standard library, about 10 MB), `synthetic:NAME,…`, a text file, a folder of text, nanoGPT's or llm.c's .bin, or a folder with
    train.bin and val.bin.

    Raises:
        ValueError: no such file or generator, or a file that is not what its name says.
    """
    if spec == DEFAULT:
        return _pydoc()
    if spec == STDLIB:
        return _stdlib()
    if spec.startswith("synthetic:"):
        return _from_bytes(spec, np.frombuffer(synthetic(spec), np.uint8))
    path = pathlib.Path(spec)
    if path.is_dir() and (path / "train.bin").is_file():
        path = path / "train.bin"
    if path.is_dir():
        return _folder(spec, path)
    if not path.is_file():
        raise ValueError(f"--data {spec}: no such file or folder; valid too: {DEFAULT}, {STDLIB}, "
                         f"synthetic:{'|'.join(SYNTHETIC)}")
    if path.stat().st_size == 0:
        raise ValueError(f"--data {spec}: the file is empty")
    if path.suffix == ".bin":
        return _bin(spec, path)
    return _from_bytes(spec, np.memmap(path, np.uint8, mode="r"))


def _pydoc() -> Data:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return load("synthetic:words")
    text = "\n".join(topics[name] for name in sorted(topics))
    return _from_bytes("pydoc_data.topics", np.frombuffer(text.encode(), np.uint8))


@functools.cache
def _stdlib() -> Data:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (f for name in sys.stdlib_module_names - LEFT_OUT for f in (root / f"{name}.py", *(root / name).rglob("*.py")))
    inside = [f for f in files if f.is_file() and not LEFT_OUT.intersection(f.relative_to(root).parts)]
    if not inside:
        raise ValueError(f"--data {STDLIB}: this Python has no sources in {root}; give a text file or a folder")
    texts = [f.read_bytes() for f in sorted(inside, key=lambda f: f.relative_to(root).as_posix())]
    name = f"the standard library of Python {sys.version.split()[0]}"
    return _from_bytes(name, np.frombuffer(b"\n".join(texts), np.uint8))


def _folder(spec: str, path: pathlib.Path) -> Data:
    """All files below a folder whose first kilobyte has no zero byte, by path, hidden ones left out."""
    files = (f for f in path.rglob("*")
             if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts))
    texts = [f.read_bytes() for f in sorted(files, key=lambda f: f.relative_to(path).as_posix())]
    texts = [t for t in texts if b"\0" not in t[:1024]]
    if not any(texts):
        raise ValueError(f"--data {spec}: no text file in this folder")
    return _from_bytes(spec, np.frombuffer(b"\n".join(texts), np.uint8))


def _bin(spec: str, path: pathlib.Path) -> Data:
    """nanoGPT's raw uint16, or llm.c's header and tokens, with the val file beside a train file."""
    train, parts = _bin_tokens(spec, path), [path]
    beside = path.with_name(path.name.replace("train", "val"))
    if beside != path and beside.is_file():
        val = _bin_tokens(spec, beside)
        parts.append(beside)
    else:
        train, val = _split(train)
    digest = hashlib.sha256()
    for part in parts:
        _hash(np.memmap(part, np.uint8, mode="r"), digest)
    return Data(spec, "tokens", train, val, digest.hexdigest())


def _bin_tokens(spec: str, path: pathlib.Path) -> np.ndarray:
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", LLMC_HEADER)
    if len(header) == LLMC_HEADER and int(header[0]) in LLMC:
        dtype, count = LLMC[int(header[0])], int(header[2])
        if header[1] != 1:
            raise ValueError(f"--data {spec}: {path.name}: llm.c file of version {header[1]}; known is 1")
        if size != 4 * LLMC_HEADER + count * np.dtype(dtype).itemsize:
            raise ValueError(f"--data {spec}: {path.name} is cut short or damaged: its header counts "
                             f"{count:,} tokens, its {size:,} bytes do not hold just those")
        return np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=4 * LLMC_HEADER)
    if size % 2:
        raise ValueError(f"--data {spec}: {path.name} has an odd number of bytes: not raw uint16 tokens")
    return np.memmap(path, "<u2", mode="r")


def _from_bytes(name: str, text: np.ndarray) -> Data:
    digest = hashlib.sha256()
    _hash(text, digest)
    return Data(name, "bytes", *_split(text), digest.hexdigest())


def _split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = len(tokens) - len(tokens) // VAL_SHARE
    return tokens[:at], tokens[at:]


def _chunks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(tokens), CHUNK):
        yield start, tokens[start:start + CHUNK]


def _hash(data: np.ndarray, digest: "hashlib._Hash") -> None:
    for _, chunk in _chunks(data):
        digest.update(chunk)


# ---- synthetic text: integer arithmetic alone, so the same bytes everywhere

SYNTHETIC = {"words": "words of a made-up language, frequent ones more often, in sentences",
             "bytes": "every byte equally likely: nothing to learn"}
SYNTHETIC_OPTIONS = {"seed": 1, "size": 1 << 20, "repeat": 0}
WORDS = 1000


@functools.lru_cache(maxsize=1)  # a study's runs follow each other in one process
def synthetic(spec: str) -> bytes:
    """Text of `synthetic:NAME,seed=…,size=…,repeat=…`.

    `size` is in bytes; `repeat` the percentage of words (bytes) that repeat the one before, which
    sets how often attention sees equal keys.
    """
    name, *given = spec.removeprefix("synthetic:").split(",")
    if name not in SYNTHETIC:
        raise unknown("synthetic text", name, SYNTHETIC)
    options = dict(SYNTHETIC_OPTIONS)
    for item in given:
        key, _, value = item.partition("=")
        if key not in options:
            raise unknown("option of synthetic text", key, options)
        if not re.fullmatch(r"\d+", value):
            raise ValueError(f"--data {spec}: {key} must be a whole number, got {value!r}")
        options[key] = int(value)
    seed, size, repeat = options["seed"], options["size"], options["repeat"]
    if repeat > 100:
        raise ValueError(f"--data {spec}: repeat is a percentage, 0 to 100, got {repeat}")
    if name == "bytes":
        values = _repeated(_random(seed, 0, size) & 0xFF, _random(seed, 1, size) % 100 < repeat)
        return values.astype(np.uint8).tobytes()

    letters, shapes = _random(seed, 0, WORDS * 8).reshape(WORDS, 8), _random(seed, 1, WORDS)
    frequent = np.frombuffer(b"eeeeeetttttaaaaooooiiinnnsssrrhhddllcumwfgypbvk", np.uint8)
    lexicon = [frequent[row[:2 + shape % 7] % len(frequent)].tobytes() for row, shape in zip(letters, shapes)]
    count = size // 3 + 1  # a word takes 3 bytes at least, its space included
    # Rank r with probability about 1/r: a uniform power of two, then uniform below it.
    span = 1 << _random(seed, 2, count) % 10
    ranks = _repeated((span + _random(seed, 3, count) % span) % WORDS, _random(seed, 4, count) % 100 < repeat)
    ends = _random(seed, 5, count) % 10 == 0
    text = b"".join(lexicon[r] + (b".\n" if end else b" ") for r, end in zip(ranks, ends))
    return text[:size]


def _random(seed: int, stream: int, count: int) -> np.ndarray:
    """`count` 32-bit random numbers of a stream, as int64."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    words = philox4x32((blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), stream, 1),
                       (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return np.stack(words, axis=-1).reshape(-1)[:count].astype(np.int64)


def _repeated(values: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    """values, where `repeats` is set the last one before that is not itself a repetition."""
    source = np.where(repeats, 0, np.arange(len(values)))
    return values[np.maximum.accumulate(source)]
