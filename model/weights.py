"""Weights of other runs and files: GPT-2 as safetensors in and out, and into a model of these options.

A file has Hugging Face's names, with or without `transformer.`; its linear weights are (in, out), as Conv1D
has them; the head is the token embedding.
"""
import json
import pathlib
import re

import numpy as np

from cuflash.model import checkpoint
from cuflash.model.gpt import GPTConfig, Params
from cuflash.model.run import checkpoint_of
from cuflash.tensor_file import read_tensors, safetensors_names, write_safetensors

PREFIX = "transformer."
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # masks that older files carry along
_LINEAR = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
_OURS = {"wte.weight": "wte", "wpe.weight": "wpe"}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def read(path: str | pathlib.Path) -> tuple[GPTConfig, Params]:
    """Shape and fp32 parameters of a GPT-2 safetensors file.

    The file does not say how many heads there are. A config.json beside it does, or the file's metadata, where
    `write` puts it; else heads have 64 features, as those of every GPT-2.

    Raises:
        ValueError: no safetensors file, damaged, or not GPT-2's weights.
        OSError: it cannot be opened.
    """
    path = pathlib.Path(path)
    found, metadata = safetensors_names(path)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in found) else ""
    names = {name.removeprefix(prefix): name for name in found}
    head = names.pop("lm_head.weight", None)
    for name in [n for n in names if _BUFFERS.fullmatch(n)]:
        del names[name]
    layers = [int(m[1]) for n in names if (m := re.match(r"h\.(\d+)\.", n))]
    if not layers or not {"wte.weight", "wpe.weight"} <= names.keys():
        raise ValueError(f"{path}: not GPT-2's weights: they have wte.weight, wpe.weight and h.0.…, this has "
                         f"{', '.join(found[:4]) or 'nothing'}")
    arrays = read_tensors(path, tuple(names.values()))
    (vocab_size, n_embd), (block_size, _) = (_matrix(path, name, arrays[names[name]])
                                             for name in ("wte.weight", "wpe.weight"))
    n_head = _heads(path, metadata, n_embd)
    config = GPTConfig(max(layers) + 1, n_head, n_embd, block_size, vocab_size, bias="ln_f.bias" in names)
    params = {}
    for name, shape in config.shapes().items():
        theirs = _THEIRS.get(name, name)
        if theirs not in names:
            raise ValueError(f"{path}: not GPT-2's weights: it has no {theirs}")
        x, linear = _fp32(path, theirs, arrays[names.pop(theirs)]), _LINEAR.fullmatch(name)
        stored = shape[::-1] if linear else shape
        if x.shape != stored:
            raise ValueError(f"{path}: {theirs} has shape {x.shape}; in this model it has {stored}")
        params[name] = np.ascontiguousarray(x.T if linear else x)
    if names:
        raise ValueError(f"{path}: not GPT-2's weights: what is {', '.join(sorted(names)[:4])}?")
    if head is not None:
        x = read_tensors(path, (head,))[head]
        if x.shape != params["wte"].shape or not np.array_equal(x.astype(np.float32), params["wte"]):
            raise ValueError(f"{path}: its lm_head.weight is not its wte.weight; the head of this model is tied")
    return config, params


def is_gpt2(path: str | pathlib.Path) -> bool:
    """Whether a safetensors file holds a GPT-2's weights, by its names; a ValueError where it is none or damaged."""
    return "wte.weight" in {name.removeprefix(PREFIX) for name in safetensors_names(path)[0]}


def write(path: str | pathlib.Path, config: GPTConfig, params: Params) -> None:
    """Writes weights as fp32 (those of an fp64 run to nearest). Biases that the model does not have are zeros,
    as GPT-2 has them all.

    Raises:
        ValueError: the model has what GPT-2 has not.
        OSError: the file cannot be written.
    """
    if config.qk_norm:
        raise ValueError("the model has QK-norm, which GPT-2 has not: there are no names for its weights")
    full = GPTConfig(**(vars(config) | {"bias": True}))
    arrays = {}
    for name, shape in full.shapes().items():
        x = params[name] if name in params else np.zeros(shape, np.float32)
        arrays[PREFIX + _THEIRS.get(name, name)] = np.asarray(x.T if _LINEAR.fullmatch(name) else x, np.float32)
    write_safetensors(path, arrays, {"format": "pt", "n_head": str(config.n_head)})


def initial(source: str, config: GPTConfig) -> tuple[Params, list[str]]:
    """Weights of `--init`: a safetensors file, a checkpoint or a run (RUN@STEP), for a model of this shape.

    Returns:
        fp32 parameters, and a line of what was left out.

    Raises:
        ValueError: the file is damaged or its model is another one.
    """
    if source.endswith(".safetensors"):
        if not pathlib.Path(source).is_file():
            raise ValueError(f"--init {source}: no such file")
        theirs, params = read(source)
    else:
        state, header = checkpoint.load(checkpoint_of(source, "--init"), optimizer=False)
        theirs, params = header.model, state.params
    notes = []
    for name in ("n_layer", "n_head", "n_embd", "vocab_size", "qk_norm"):
        if getattr(theirs, name) != getattr(config, name):
            raise ValueError(f"--init {source}: its {name} is {getattr(theirs, name)}, that of the model here is "
                             f"{getattr(config, name)}")
    if theirs.block_size < config.block_size:
        raise ValueError(f"--init {source}: has {theirs.block_size} positions, --block-size is {config.block_size}")
    if theirs.block_size > config.block_size:
        params["wpe"] = params["wpe"][:config.block_size]
        notes.append(f"of the {theirs.block_size} positions of {source} the first {config.block_size} are taken")
    shapes = config.shapes()
    for name in params.keys() - shapes.keys():
        if params[name].any():
            raise ValueError(f"--init {source}: has biases, as {name}; the model here has none: bias = true in the "
                             "TOML file of --model, or --model gpt2")
    given = {name: params.get(name, np.zeros(shape)) for name, shape in shapes.items()}
    return {name: np.ascontiguousarray(x, np.float32) for name, x in given.items()}, notes


def _matrix(path: pathlib.Path, name: str, x: np.ndarray) -> tuple[int, int]:
    if x.ndim != 2:
        raise ValueError(f"{path}: {name} has shape {x.shape}; it must have two axes")
    return x.shape


def _fp32(path: pathlib.Path, name: str, x: np.ndarray) -> np.ndarray:
    if not np.can_cast(x.dtype, np.float32, "safe") or x.dtype.kind in "iub":
        raise ValueError(f"{path}: {name} has dtype {x.dtype}; valid: F32, F16, BF16")
    return x.astype(np.float32)


def _heads(path: pathlib.Path, metadata: dict[str, str], n_embd: int) -> int:
    beside = path.with_name("config.json")
    if beside.is_file():
        try:
            n_head = json.loads(beside.read_text(encoding="utf-8"))["n_head"]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{beside}: says no n_head ({e!r})") from e
    else:
        n_head = metadata.get("n_head", n_embd // 64)
    if not str(n_head).isdecimal() or int(n_head) < 1 or n_embd % int(n_head):
        raise ValueError(f"{path}: its number of heads is {n_head!r}; it must divide the width {n_embd}; a config.json "
                         "beside the file says it")
    return int(n_head)
