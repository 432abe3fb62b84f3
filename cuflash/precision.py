"""A precision: the whole choice of how to compute (numerics.md sections 2 to 6).

One immutable object holds (format, mode) for every site, scoped exceptions, the switches, the
accumulator, the exp and the tiles. `Precision.named("bf16")` gives a canonical one.
"""
import dataclasses
import functools
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import NUMERICS_VERSION
from cuflash.errors import unknown
from cuflash.formats import MODES, Mode, format_named
from cuflash.plugins import blame, file_digest, load_class
from cuflash.site_table import MODULES, PLAIN_MERGED, SITES, TILED, merged

SWITCHES: dict[str, tuple[str, ...]] = {
    "order": ("eager", "fa2"),
    "algorithm": ("flash", "plain"),
    "l_from": ("unrounded", "rounded"),
    "p_bwd_from": ("lse", "m_l"),
    "delta_from": ("o", "o_unrounded", "o_fp32", "p_dp"),
    "accumulator": ("auto", "sequential", "hopper", "ampere", "library", "exact"),
    "exp": ("defined", "mufu", "library"),
}
ALIASES = {"bf16": "bf16-paper"}
CANONICAL = ("fp32", "fp64", "bf16-paper", "bf16-fa2", "fp16-fa2", "bf16-stream")

Tile = tuple[int | None, int | None]


@dataclass(frozen=True)
class Rounding:
    """What a site does: round to `format` by `mode` (a name of formats.MODES or `file.py:NAME`).

    `source` is the SHA-256 of a user's file when this was made: a file edited later changes nothing here.
    """

    format: str = "fp32"
    mode: str = "rne"
    source: str = dataclasses.field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_named(self.format).name)  # one set of values, one name: e5m10 is fp16
        if self.mode not in MODES:
            path, colon, _ = self.mode.rpartition(":")
            if not colon:
                raise unknown("mode", self.mode, [*MODES, "FILE.py:NAME"])
            object.__setattr__(self, "source", file_digest(path))
            self.rule  # loads it now

    @property
    def rule(self) -> Mode:
        """The mode itself."""
        return MODES.get(self.mode) or _users_mode(self.mode, self.source)

    def __str__(self) -> str:
        return self.format if self.mode == "rne" else f"{self.format}:{self.mode}"

    @classmethod
    def parse(cls, text: str) -> "Rounding":
        """`bf16`, `bf16:sr`, `e4m3:rz`, `bf16:my.py:Dither`."""
        format, _, mode = str(text).partition(":")
        if format == "fp64":
            raise ValueError("fp64 is a precision, not a site's format: use precision='fp64'")
        return cls(format, mode or "rne")


@functools.cache
def _users_mode(name: str, digest: str) -> Mode:
    path, _, attribute = name.rpartition(":")
    found = load_class(path, attribute, Mode)
    mode = found() if isinstance(found, type) else found
    if mode.name in MODES:
        raise ValueError(f"mode {name}: {mode.name!r} is a built-in mode's name; give it another")
    one = np.ones(2, np.uint32)
    with blame(name):  # once here, so that its mistakes are told before it is used
        up = np.asarray(mode.up(one, one > 0, one > 0, one > 0, one))
    if up.shape != one.shape or up.dtype != bool:
        raise ValueError(f"mode {name}: up gave {up.dtype} of shape {up.shape} for two values; it must give booleans "
                         "of the arguments' shape")
    return mode


@dataclass(frozen=True)
class Override:
    """A rounding for part of the network: one `--round` of product.md."""

    site: str  # a site, or a prefix that ends before a dot
    rounding: Rounding
    direction: str | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    module: str | None = None

    @property
    def target(self) -> str:
        return str(self).partition("=")[0]

    @property
    def scoped(self) -> bool:
        return (self.direction, self.layers, self.heads, self.module) != (None,) * 4

    def names(self) -> list[str]:
        return [s for s in SITES if s == self.site or s.startswith(self.site + ".")]

    def acts(self, direction: str, layer: int, module: str, head: int) -> bool:
        return (self.direction in (None, direction) and (self.layers is None or layer in self.layers)
                and (self.heads is None or head in self.heads) and self.module in (None, module))

    def __str__(self) -> str:
        scopes = [self.direction] if self.direction else []
        scopes += [letter + _ranges(numbers) for letter, numbers in (("L", self.layers), ("H", self.heads))
                   if numbers is not None]
        scopes += [self.module] if self.module else []
        return "/".join([*scopes, f"{self.site}={self.rounding}"])

    @classmethod
    def parse(cls, text: str) -> "Override":
        """`[fwd/|bwd/][L1/][H0,6-8/][MODULE/]SITE=FORMAT[:MODE]`; ValueError names the valid words."""
        target, eq, value = text.partition("=")
        if not eq:
            raise ValueError(f"--round {text!r}: write [fwd/|bwd/][L1/][H0,6-8/][MODULE/]SITE=FORMAT[:MODE]")
        *scopes, site = target.split("/")
        if not any(s == site or s.startswith(site + ".") for s in SITES):
            raise unknown("site", site, ["attn", *SITES])
        given: dict[str, Any] = {}
        for scope in scopes:
            if scope in ("fwd", "bwd"):
                kind, value_of = "direction", scope
            elif re.fullmatch(r"[LH]\d+(-\d+)?(,\d+(-\d+)?)*", scope):
                kind, value_of = "layers" if scope[0] == "L" else "heads", _numbers(scope[1:])
            elif scope in MODULES:
                kind, value_of = "module", scope
            else:
                raise unknown("scope", scope, ["fwd", "bwd", "L1", "H0,6-8", *MODULES])
            if kind in given:
                raise ValueError(f"--round {text!r}: two scopes of one kind; write L0,2-4 for several layers")
            given[kind] = value_of
        self = cls(site, Rounding.parse(value), **given)
        names = self.names()
        if self.heads is not None and not all(n.startswith("attn.") for n in names):
            raise ValueError(f"--round {text!r}: only attention's sites have heads")
        if self.module is not None and any(n.startswith("attn.") for n in names):
            raise ValueError(f"--round {text!r}: attention's sites belong to no module; scope them by layer and head")
        if self.direction and not any(SITES[n].direction in (self.direction, "both") for n in names):
            raise ValueError(f"--round {text!r}: {site} exists in {SITES[names[0]].direction} only")
        return self


def _numbers(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"range {part}: write the smaller number first")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _ranges(numbers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


@dataclass(frozen=True)
class Tiles:
    """Numeric tiles (Br, Bc) of forward, dK/dV and dQ; None spans the whole axis."""

    forward: Tile
    dkdv: Tile
    dq: Tile


@dataclass(frozen=True)
class Precision:
    """A complete choice of how to compute. Immutable and hashable; see `named`, `replace`, `round`.

    Attributes: `base` (the canonical name it was made from), `sites` (a Rounding for each row of
    the site table), `overrides` (scoped roundings, later wins) and the switches of numerics.md
    section 3: order, algorithm, l_from, p_bwd_from, delta_from, tile, accumulator, exp. `tile` is
    None (by head dim), or three pairs (forward, dK/dV, dQ).
    """

    base: str
    sites: tuple[Rounding, ...]
    overrides: tuple[Override, ...] = ()
    order: str = "eager"
    algorithm: str = "flash"
    l_from: str = "unrounded"
    p_bwd_from: str = "lse"
    delta_from: str = "o"
    accumulator: str = "auto"
    exp: str = "defined"
    tile: tuple[Tile, Tile, Tile] | None = None

    def __post_init__(self) -> None:
        for switch, valid in SWITCHES.items():
            if getattr(self, switch) not in valid:
                raise unknown(switch, getattr(self, switch), valid)
        object.__setattr__(self, "tile", _tile(self.tile))
        if self.is_fp64 and (self.overrides or any(r != Rounding() for r in self.sites)):
            raise ValueError("precision fp64 rounds at no site; start from 'fp32' to round single sites")
        if self.is_fp64 and (self.accumulator not in ("auto", "library") or self.exp == "mufu"):
            raise ValueError(f"precision fp64 has NumPy's own products and exp: accumulator={self.accumulator}, "
                             f"exp={self.exp} have no meaning there")
        if self.algorithm == "plain" and self.l_from == "rounded":
            raise ValueError("l_from='rounded' has no meaning under algorithm='plain': P is rounded after it is "
                             "divided by l")
        for override in self.overrides:
            if set(override.names()) <= self.merged:
                raise ValueError(merged_message(override.site, self))
        for name, rounding in self.table().items():
            if name in self.merged and rounding != Rounding():
                raise ValueError(merged_message(name, self))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # kept: a precision is the key of caches on every call of attention
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))

    @classmethod
    def named(cls, name: str) -> "Precision":
        """A canonical precision: fp32, fp64, bf16 (bf16-paper), bf16-fa2, fp16-fa2, bf16-stream, all-FORMAT."""
        return _named(name)

    @property
    def is_fp64(self) -> bool:
        return self.base == "fp64"

    @property
    def merged(self) -> frozenset[str]:
        """Sites that this order and algorithm merge away: neither rounded nor dumped."""
        return merged(self.order, self.algorithm)

    @property
    def name(self) -> str:
        """The canonical name, or `base+digest` once anything differs from it."""
        return self.base if self == _named(self.base) else f"{self.base}+{self.digest[:8]}"

    def table(self) -> dict[str, Rounding]:
        """Site -> Rounding, without the scoped overrides."""
        return dict(zip(SITES, self.sites))

    @functools.lru_cache(maxsize=4096)
    def sites_for(self, direction: str = "fwd", layer: int = 0, module: str = "", head: int = 0) -> dict[str, Rounding]:
        """Site -> Rounding at one place of the network, scoped overrides applied. Not to be changed."""
        table = self.table()
        for override in self.overrides:
            if override.acts(direction, layer, module, head):
                table.update((n, override.rounding) for n in override.names() if n not in self.merged)
        return table

    def tiles(self, head_dim: int) -> Tiles:
        """The numeric tiles for this head dim."""
        if self.algorithm == "plain":
            return Tiles((None, None), (None, None), (None, None))
        if self.tile:
            return Tiles(*self.tile)
        if self.order == "eager":
            return Tiles((128, 128), (128, 128), (128, 128))
        backward = (128, 128) if head_dim <= 64 else (64, 128) if head_dim <= 128 else (64, 64)
        forward = (128, 128) if head_dim <= 64 else (128, 64) if head_dim <= 192 else (64, 64)
        return Tiles(forward, backward, backward)

    def axes_of(self, site: str) -> str:
        """The axes of a site's value: those of the table, but P∘dP is a value of each query and key."""
        return "qk" if site == "attn.delta_prod" and self.delta_from == "p_dp" else SITES[site].axes

    def tile_of(self, site: str, head_dim: int) -> Tile | None:
        """The numeric tile that a site of attention has a value of its own for; None where it has one in all."""
        if self.algorithm == "plain" or not (site in TILED or site == "attn.l" and self.order == "eager"):
            return None
        tiles = self.tiles(head_dim)
        return tiles.dq if site[5:7] == "dq" else tiles.dkdv if site[5:7] in ("dk", "dv") else tiles.forward

    def round(self, *texts: str) -> "Precision":
        """This precision with `--round` texts applied, later wins (grammar in product.md)."""
        table, overrides = self.table(), list(self.overrides)
        for override in map(Override.parse, texts):
            names = [n for n in override.names() if n not in self.merged]
            if not names:
                raise ValueError(merged_message(override.site, self))
            if not override.scoped:
                table.update((n, override.rounding) for n in names)
            # A later one wins: what it covers wholly is dropped, and an unscoped one is kept to win over the rest.
            overrides = [o for o in overrides if o.target != override.target
                         and (override.scoped or not set(o.names()) <= set(names) | self.merged)]
            if override.scoped or any(set(o.names()) & set(names) for o in overrides):
                overrides.append(override)
        return dataclasses.replace(self, sites=tuple(table.values()), overrides=tuple(overrides))

    def replace(self, sites: Mapping[str, str] | None = None, **switches: Any) -> "Precision":
        """This precision with other roundings ({"attn.o": "fp32"}) and switches (tile=(128, 128))."""
        if sites is not None and not isinstance(sites, Mapping):
            site, eq, rounding = sites.partition("=") if isinstance(sites, str) else ("attn.o", "", "")
            example = {site: rounding} if eq and site in SITES else {"attn.o": "fp32"}
            raise TypeError(f"sites must be a dict, not {sites!r}: write replace({example}), and switches by name, as "
                            f"replace(tile=(128, 128)); round() takes texts as 'attn.o=fp32'")
        valid = [*SWITCHES, "tile"]
        for switch in switches:
            if switch not in valid:
                raise unknown("switch", switch, valid)
        for site, rounding in (sites or {}).items():
            if not isinstance(rounding, (str, Rounding)):
                raise TypeError(f"{site}: write the rounding as 'bf16' or 'bf16:sr', not {rounding!r}")
        table = self.table()
        gone = merged(switches.get("order", self.order), switches.get("algorithm", self.algorithm))
        changed = {n: Rounding() for n in gone if not self.is_fp64 and table[n] != Rounding()}
        sites_now = tuple((table | changed).values())
        changed_now = dataclasses.replace(self, sites=sites_now, **switches)
        return changed_now.round(*(f"{s}={f}" for s, f in (sites or {}).items()))

    def check_scopes(self, n_layer: int | None = None, n_head: int | None = None) -> None:
        """Raises ValueError if an override names a layer or head that a model of this size lacks."""
        for override in self.overrides:
            for what, numbers, count in (("layer", override.layers, n_layer), ("head", override.heads, n_head)):
                beyond = tuple(n for n in numbers or () if count is not None and n >= count)
                if beyond:
                    raise ValueError(f"--round {override}: there is no {what} {_ranges(beyond)}; "
                                     f"the {what}s are 0 to {count - 1}")

    def __repr__(self) -> str:
        return f"<cuflash.Precision {self.describe()}>"

    def set(self, *texts: str) -> "Precision":
        """This precision with `--set` texts applied: `delta_from=p_dp`, `tile=128,128`, `tile=none,none`."""
        switches: dict[str, Any] = {}
        for text in texts:
            name, eq, value = text.partition("=")
            if not eq:
                raise ValueError(f"--set {text!r}: write NAME=VALUE, NAME one of {', '.join([*SWITCHES, 'tile'])}")
            switches[name] = _parse_tile(value) if name == "tile" else value
        return self.replace(**switches)

    def diff(self, other: "Precision") -> dict[str, tuple[str, str]]:
        """What differs: {site or switch: (here, there)}."""
        mine, theirs = self._flat(), other._flat()
        keys = list(dict.fromkeys([*mine, *theirs]))
        return {k: (mine.get(k, ""), theirs.get(k, "")) for k in keys if mine.get(k, "") != theirs.get(k, "")}

    def describe(self) -> str:
        """One line: the base and what was changed."""
        changes = ", ".join(f"{k}={new}" for k, (_, new) in _named(self.base).diff(self).items() if new)
        return self.base + (f" with {changes}" if changes else "")

    def _flat(self) -> dict[str, str]:
        flat = {n: str(r) for n, r in self.table().items() if n not in self.merged}
        flat |= {s: getattr(self, s) for s in SWITCHES}
        flat["tile"] = _format_tile(self.tile)
        flat |= {o.target: str(o.rounding) for o in self.overrides if o.scoped}
        return flat

    def to_toml(self) -> str:
        """Everything, as TOML that `from_toml` reads back."""
        lines = [f'base = "{self.base}"', f"numerics_version = {NUMERICS_VERSION}"]
        lines += [f'{s} = "{getattr(self, s)}"' for s in SWITCHES] + [f'tile = "{_format_tile(self.tile)}"']
        lines.append("round = [" + ", ".join(f'"{o}"' for o in self.overrides) + "]")
        lines += ["", "[sites]"] + [f'"{n}" = "{r}"' for n, r in self.table().items() if n not in self.merged]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> "Precision":
        """A precision from TOML: `base` names the one it starts from, the rest changes it."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise ValueError(f"precision is not valid TOML: {e}") from e
        for name, kind, words in (("base", str, "a name"), ("sites", dict, "a table"), ("round", list, "a list of texts"),
                                  ("numerics_version", int, "a number"), ("tile", str, 'a text as "128,128"')):
            if name in data and not isinstance(data[name], kind):
                raise ValueError(f"precision's TOML: {name} must be {words}, not {data[name]!r}")
        version = data.pop("numerics_version", NUMERICS_VERSION)
        if version != NUMERICS_VERSION:
            raise ValueError(f"precision was written for numerics version {version}, this is {NUMERICS_VERSION}")
        base, sites, rounds = data.pop("base", "fp32"), data.pop("sites", {}), data.pop("round", [])
        if "tile" in data:
            data["tile"] = _parse_tile(str(data["tile"]))
        return _named(base).replace(sites, **data).round(*rounds)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that changes bits, the numerics version and the text of users' modes included."""
        text = "\n".join(["fp64"] * self.is_fp64 + self.to_toml().splitlines()[1:])  # the base's name is no bits
        roundings = {*self.sites, *(o.rounding for o in self.overrides)}
        for r in sorted({r for r in roundings if r.source}, key=str):
            text = text.replace(f":{r.mode}", f":{r.source}:{r.mode.rpartition(':')[2]}")
        return hashlib.sha256(text.encode()).hexdigest()


def merged_message(site: str, precision: Precision) -> str:
    if precision.algorithm == "plain" and site in PLAIN_MERGED:
        remedy = "algorithm=flash has it"
    else:
        remedy = "order=eager has it, as in precision bf16, fp32 and all-FORMAT"
    return (f"site {site} does not exist on its own under order={precision.order}, algorithm={precision.algorithm} "
            f"(it is merged into the next operation), so it can be neither rounded nor dumped; {remedy}")


def _tile(tile: Any) -> tuple[Tile, Tile, Tile] | None:
    """One pair or three -> three; multiples of 16 up to 2^20, so that kernels count in 32 bits, or None."""
    if tile is None:
        return None
    try:
        three = tuple(map(tuple, tile)) if len(tile) == 3 else (tuple(tile),) * 3
    except TypeError:
        three = ((),)
    for pair in three:
        if len(pair) != 2 or any(n is not None and (not isinstance(n, int) or not 0 < n <= 1 << 20 or n % 16)
                               for n in pair):
            raise ValueError(f"tile {tile!r}: give (Br, Bc) or three such pairs (forward, dK/dV, dQ), "
                             "each a positive multiple of 16 up to 2**20, or None for the whole axis")
    return three  # type: ignore[return-value]


def _parse_tile(text: str) -> Any:
    """`128,128`, `none,none`, `128,128/64,128/64,128`, `default`."""
    if text == "default":
        return None
    try:
        pairs = [tuple(None if n.strip() == "none" else int(n) for n in pair.split(",")) for pair in text.split("/")]
    except ValueError:
        pairs = []
    if len(pairs) not in (1, 3) or any(len(p) != 2 for p in pairs):
        raise ValueError(f"tile={text!r}: write Br,Bc (multiples of 16 or none), three joined by / for "
                         "forward/dKdV/dQ, or default")
    return pairs[0] if len(pairs) == 1 else tuple(pairs)


def _format_tile(tile: tuple[Tile, Tile, Tile] | None) -> str:
    if tile is None:
        return "default"
    pairs = [",".join("none" if n is None else str(n) for n in pair) for pair in tile]
    return pairs[0] if len(set(pairs)) == 1 else "/".join(pairs)


@functools.cache
def _named(name: str) -> Precision:
    if not isinstance(name, str):
        raise TypeError(f"a precision's name must be a text, not {name!r}")
    name = ALIASES.get(name, name)
    fp32 = tuple(Rounding() for _ in SITES)
    paper = tuple(Rounding(s.bf16) for s in SITES.values())
    fa2 = tuple(Rounding("fp32" if s.fa2 == "-" else s.fa2) for s in SITES.values())
    if name in ("fp32", "fp64"):
        return Precision(name, fp32)
    if name == "bf16-paper":
        return Precision(name, paper)
    if name == "bf16-fa2":
        return Precision(name, fa2, order="fa2")
    if name == "fp16-fa2":
        return Precision(name, tuple(Rounding("fp16") if r.format == "bf16" else r for r in fa2), order="fa2")
    if name == "bf16-stream":
        stream = ("embed", "residual.y", "residual.dx")
        return Precision(name, tuple(Rounding("bf16") if s in stream else r for s, r in zip(SITES, paper)))
    if name.startswith("all-"):
        rounding = Rounding.parse(name.removeprefix("all-"))
        return Precision(name, tuple(rounding if s.startswith("attn.") else Rounding() for s in SITES))
    raise unknown("precision", name, [*CANONICAL, *ALIASES, "all-FORMAT"])


def as_precision(precision: "Precision | str") -> Precision:
    """A Precision from an object, a canonical name, or the path of a TOML file."""
    if isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str):
        raise TypeError(f"precision must be a name or a cuflash.Precision, not {type(precision).__name__}")
    if precision.endswith(".toml"):
        try:
            with open(precision, encoding="utf-8") as f:
                return Precision.from_toml(f.read())
        except FileNotFoundError as e:
            raise ValueError(f"precision {precision}: no such file") from e
        except OSError as e:
            raise ValueError(f"precision {precision} cannot be read: {e.strerror}") from e
    return _named(precision)
