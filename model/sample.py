"""Text from a model, token by token."""
import codecs
import pathlib
import re
from collections.abc import Iterable, Iterator

import numpy as np

from cuflash.model import weights
from cuflash.model.blas import one_thread_if_small
from cuflash.model.checkpoint import Header, load
from cuflash.model.gpt import GPT
from cuflash.model.run import checkpoint_of, of_users_files
from cuflash.philox import Key
from cuflash.precision import Precision

END_OF_TEXT = 50256  # GPT-2's token between texts


def generate(model: GPT, prompt: list[int], count: int, *, temperature: float = 0.8, top_k: int = 0,
             seed: int = 1) -> Iterator[int]:
    """Yields `count` tokens that follow the prompt.

    temperature 0 takes the most likely token; top_k > 0 draws among the k most likely. The last
    block_size tokens are seen.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    tokens = list(prompt)
    for i in range(count):
        window = np.array([tokens[-model.config.block_size:]])
        logits, _ = model.forward(window, Key(seed, step=i), keep=False)
        last = logits[0, -1] if isinstance(logits, np.ndarray) else logits[0, -1].get()
        tokens.append(_draw(last.astype(np.float64), temperature, top_k, rng))
        yield tokens[-1]


def _draw(logits: np.ndarray, temperature: float, top_k: int, rng: np.random.Generator) -> int:
    if not np.isfinite(logits).all():
        raise ValueError("the model's logits are not finite under its precision: nothing to draw from")
    if temperature == 0:
        return int(np.argmax(logits))
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.partition(logits, -top_k)[-top_k], -np.inf, logits)
    p = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def encode(text: str, kind: str, vocab_size: int) -> list[int]:
    """The prompt's tokens: its bytes, or, for other tokens (there is no dictionary here), `1 2 3`."""
    if kind == "bytes":
        tokens = list(text.encode()) or [ord("\n")]
    else:
        try:
            tokens = [int(t) for t in text.split()] or [END_OF_TEXT if vocab_size > END_OF_TEXT else 0]
        except ValueError:
            raise ValueError(f"--prompt {text!r}: the tokens of this run are numbers, as 11 22 33") from None
    for t in tokens:
        if not 0 <= t < vocab_size:
            raise ValueError(f"--prompt: token {t} is outside the vocabulary of {vocab_size}")
    return tokens


def decode(tokens: Iterable[int], kind: str) -> str:
    """Text of the tokens; bytes that are no UTF-8 are shown as �."""
    return "".join(pieces(tokens, kind))


def pieces(tokens: Iterable[int], kind: str) -> Iterator[str]:
    """The text of `decode` as the tokens come; a character once all its bytes are there."""
    if kind != "bytes":
        for i, token in enumerate(tokens):
            yield f" {token}" if i else str(token)
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(bytes([token]))
    yield decoder.decode(b"", final=True)


def printable(text: str) -> str:
    r"""For a terminal: control characters but newline and tab, C1 too, as `\x1b`."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)


def load_model(path: str | pathlib.Path, step: int | None = None) -> tuple[GPT, Header, int]:
    """Model, header and step of a run (its last checkpoint, or that of a step), RUN@STEP, a checkpoint file, or
    GPT-2's weights as safetensors (step 0, in bf16-fa2).

    BLAS gets one thread where the model is small, as in training.
    """
    if str(path).endswith(".safetensors") and pathlib.Path(path).is_file():
        config, params = weights.read(path)
        kind = "bytes" if config.vocab_size == 256 else "tokens"
        header = Header(config, Precision.named("bf16-fa2").to_toml(), "off", 1, "", kind)
        one_thread_if_small(config.n_embd)
        return GPT(config, params, Precision.named("bf16-fa2")), header, 0
    file = checkpoint_of(path, step=step)
    state, header = load(file, optimizer=False)
    one_thread_if_small(header.model.n_embd)
    with of_users_files(path, file.parent.parent):
        model = GPT(header.model, state.params, Precision.from_toml(header.precision), header.fix)
    return model, header, state.step
