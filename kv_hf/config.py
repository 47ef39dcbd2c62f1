"""User options of a paged cache: one row each, checked once and frozen. Knows no model and no tensor.

A row of `CacheConfig` is an option's name, type, default and check, and says of which kinds it is. Signatures, messages, and
the lists of what a file or a batch may set are made of the rows.
"""

import copy
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

from .checks import (
    MOST_BYTES,
    MOST_PAGE_SIZE,
    MOST_TOKENS,
    check_choice,
    check_int,
    is_power_of_two,
    listed,
)
from .errors import CacheOptionError
from .formats import (
    Scheme,
    cache_names,
    cache_options,
    check_format,
    format_names,
    k_rope_name,
    key_scheme,
    latent_scheme,
    readers_of,
    value_scheme,
)
from .printable import short
from .read_budget import READ_FROM, ReadBudget, pages_for
from .units import parse_bytes, parse_tokens

Check = Callable[[str, Any], Any]  # (name, value given) -> value held; raises CacheOptionError
LayerOverride = tuple[int, int, dict[str, str]]  # first layer, last layer, {side: format}
AUTO = "auto"
KERNELS = (AUTO, "triton", "c", "reference")  # the best first
# words that others use -> the kernel that comes nearest
OTHER_KERNEL_WORDS = {
    **dict.fromkeys(("cuda", "gpu", "nvidia", "rocm", "hip"), "triton"),
    **dict.fromkeys(("cpu", "native", "c++", "cpp"), "c"),
    **dict.fromkeys(("torch", "pytorch", "eager", "naive", "python", "sdpa", "math"), "reference"),
}
# words that others use for a cache -> the cache that comes nearest
OTHER_CACHE_WORDS = {
    word: f"paged_int{bits}"
    for bits in (8, 6, 4, 3, 2)
    for word in (f"{bits}bit", f"{bits}-bit", f"{bits}_bit", f"q{bits}")
}
# names that options once had, or have in other caches -> the option that says it here
OTHER_OPTION_NAMES = {
    **dict.fromkeys(("read_tokens", "read_share", "read_from"), "read"),
    **dict.fromkeys(("bits", "nbits"), "keys"),  # of transformers' quantized caches
    **dict.fromkeys(("k_rope", "mla"), "latent"),
    "offload_dir": "offload",
    "reserve_tokens": "max_length",
    **dict.fromkeys(("key_group_size", "value_group_size", "latent_group_size"), "group_size"),
}
# fields that name formats: a CacheConfig that sets one of them has chosen all of them
_FORMATS = ("keys", "values", "layers", "latent")
# for which formats have groups whose size may be set
SIDES_WITH_GROUPS = ("keys", "values", "latent")


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name, type and default.

    Attributes:
        check: called with name and value; returns what is held.
        kinds: "local": it says where pages of one process lie, or how many there is room for, so that files of caches do not
            hold it. "grows": it belongs to caches that grow, not to those with max_length. "call": it is for one call of
            generate(), not for continuous batching. "decoder": not for encoder-decoder models. "encoder": for these alone.
            "batch": for continuous batching alone.
    """

    check: Check
    kinds: tuple[str, ...]


def _option(default: Any, check: Check, *kinds: str) -> Any:
    return field(default=default, metadata={"option": Option(check, kinds)})


def _by(check: Callable[..., None], *rule: Any) -> Check:
    """Return the check of a value that is held as it is given, by a function of name, value and `rule`."""

    def checked(name: str, value: Any) -> Any:
        check(name, value, *rule)
        return value

    return checked


def _choice(*choices: str) -> Check:
    return _by(check_choice, choices)


def _whole(
    least: int, most: int = MOST_TOKENS, parse: Callable[[str, str], int] | None = None
) -> Check:
    """Return the check of a whole number, which text with a unit may give where there is a `parse`."""

    def check(name: str, value: Any) -> Any:
        found = parse(name, value) if parse is not None and isinstance(value, str) else value
        check_int(name, found, least, most)
        return found

    return check


def _page_size(name: str, value: Any) -> Any:
    check_int(name, value, 16, MOST_PAGE_SIZE)
    if not is_power_of_two(value):
        raise CacheOptionError(f"{name} must be a power of two of at least 16, got {value}")
    return value


def _part(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise CacheOptionError(
            f"{name} must be a number between 0 and 1, both left out, got {value!r}; leave it out to read everything"
        )
    return value


def _store(name: str, value: Any) -> Any:
    if not callable(getattr(value, "bind", None)):
        raise CacheOptionError(f"{name} must be a kv_hf.PrefixStore, got {type(value).__name__}")
    return value


def _offload(name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike) or (isinstance(value, str) and os.path.dirname(value)):
        if not os.path.isdir(value):
            raise CacheOptionError(
                f"{name} must be cpu, disk or a folder that exists, got {value!r}"
            )
        return os.path.abspath(value)  # a name alone would be read as a word the next time
    check_choice(f"{name} (or a folder, as './pages')", value, ("cpu", "disk"))
    return value


def _layers(name: str, value: Any) -> Any:
    parse_layers(value)
    return copy.deepcopy(dict(value))


def _parts(name: str, value: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the checked parts of an option that is a mapping of them."""
    for part in value:
        check_choice(f"a key of {name}", part, checks)
    return {part: checks[part](f"{name}[{part!r}]", one) for part, one in value.items()}


def _group_size(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _parts(name, value, dict.fromkeys(SIDES_WITH_GROUPS, _GROUP))
    return _GROUP(name, value)


def _latent(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _parts(name, value, _LATENT)
    return _LATENT["format"](name, value)


def _read(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        value = {"share" if isinstance(value, float) else "tokens": value}
    held = _parts(name, value, _READ)
    if {"tokens", "share"} <= held.keys():
        raise CacheOptionError(
            f"{name}={value!r}: tokens and share bound the same; leave one of them out"
        )
    if held.keys() <= {"from"}:
        raise CacheOptionError(
            f"{name}={value!r} bounds nothing: 'from' says from how many tokens on a step reads a part; give 'tokens' or 'share' "
            "as well"
        )
    return held


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


_BYTES = _or_none(_whole(1, MOST_BYTES, parse_bytes))
_LENGTH = _whole(1, parse=parse_tokens)
_GROUP = _whole(1, MOST_PAGE_SIZE)
_LATENT = {
    "format": _by(check_format, "latent"),
    "k_rope": _by(check_format, "k_rope"),
    "decode": _choice("auto", "absorb", "expand"),
}
_READ = {"tokens": _LENGTH, "share": _part, "from": _LENGTH}


@dataclass(frozen=True)
class CacheConfig:
    """Options of a paged cache.

    Attributes:
        keys, values: formats of the stored keys and values; `kv_hf.formats.format_names(side)` lists those of "keys" and of "values".
        page_size: tokens in a page, a power of two of at least 16.
        group_size: numbers that share a scale, for every side whose format has groups to set, or a mapping of sides:
            {"keys": 32, "values": 32, "latent": 64}. In keys and latents of 6, 4 and 2 bits these are tokens, which must divide
            page_size; in values of 6 to 2 bits channels, which must divide head_dim; in latents of 8 bits numbers of a latent, which
            must divide kv_lora_rank.
        sink_tokens: the first tokens of each row that stay exact for ever. Attention puts so much weight on
            them that their rounding errors dominate all others (StreamingLLM, arXiv 2309.17453).
        recent_tokens: tokens that stay exact on top of the page that is being filled.
        max_pages: upper bound of the pool over all rows, or None.
        max_bytes: of continuous batching alone (docs/serving.md): bytes of its pages and exact tokens, a number or "2GiB",
            allocated when it starts; None takes a part of the free memory.
        max_length: columns (padding included), a number or "32k", of each row that everything is allocated for at the first forward; a
            decode step then compiles (docs/speed_and_memory.md). None: storage grows with the text.
        cuda_graph: "auto" lets generate() run decode steps on a GPU as one CUDA graph where it can: with max_length, and
            without it where the text's end is known and nothing forbids room for all of it (docs/speed_and_memory.md); "always"
            raises where it cannot, "never" does not try.
        layers: formats of single layers or ranges, e.g. {"0-1": "int8", "5": {"keys": "int8"}}.
        prefix_store: a kv_hf.PrefixStore, with which rows and later calls share the pages of common prefixes.
        kernel: implementation of attention over pages: "auto" takes the best that can run here, a name takes
            that one or raises ("triton", "c", "reference").
        cross_attention: of encoder-decoder models: "exact" keeps the encoder's keys and values as transformers
            does, "same" stores them in pages of the formats above.
        offload: "cpu" keeps sealed pages beyond the device budget in pinned host memory, "disk" in files of the system's folder
            for temporary files, a path in files of that folder; None keeps all on the device.
        device_bytes: bytes of sealed pages, a number or "2GiB", that may lie on the device, staging buffers (and, where steps read a
            part, indexes) included. With offload and without a budget as little as possible lies there.
        latent: format of the latents of multi-head latent attention (MLA, docs/mla.md): as `keys`, or fp8_ds_mla;
            None takes that of `keys`. A mapping says more: {"format": "int8", "k_rope": "exact", "decode": "absorb"}. "k_rope" is
            the format of the RoPE keys, exact or int8; without it they take int8 next to latents that are encoded, except
            next to fp8_ds_mla. "decode": "auto" attends to latents themselves in a decode step (absorbed) where the model
            allows it, and says why where it does not; "absorb" raises there; "expand" computes keys and values of all
            tokens, as transformers.
        widen: "auto" gives the keys or values of a layer a wider format if the one above loses far more of them than of
            ordinary numbers (docs/formats.md), and says so once; "never" keeps the formats.
        on_edit: what generate() does with a text that does not begin with the tokens that the cache holds: "refuse" raises;
            "crop" keeps the common beginning and computes the rest, all of it where layers cannot go back.
        read: what a decode step reads at most of each row in layers with full attention: tokens, a number or "2k", or a share
            of the row's pages, between 0 and 1. The step reads the sinks, the exact tokens, the newest page, and those pages
            that matter most to it (docs/long_context.md). Nothing is evicted. None: everything is read. A mapping says more:
            {"tokens": "2k", "from": "8k"}, or "share" in place of "tokens"; "from" the tokens of a row from which on a step reads a
            part (4096), while shorter rows are read as a whole. It is held as a mapping; see `budget`.
    """

    keys: str = _option("exact", _by(check_format, "keys"))
    values: str = _option("exact", _by(check_format, "values"))
    page_size: int = _option(64, _page_size)
    group_size: int | Mapping[str, int] | None = _option(None, _or_none(_group_size))
    sink_tokens: int = _option(4, _whole(0))
    recent_tokens: int = _option(0, _whole(0))
    max_pages: int | None = _option(None, _or_none(_whole(1)), "grows")
    max_bytes: int | None = _option(None, _BYTES, "batch")
    max_length: int | None = _option(None, _or_none(_LENGTH), "local", "call", "decoder")
    cuda_graph: str = _option("auto", _choice("auto", "always", "never"))
    layers: Mapping[str, Any] | None = _option(None, _or_none(_layers))
    kernel: str = _option("auto", _by(check_choice, KERNELS, OTHER_KERNEL_WORDS))
    prefix_store: Any = _option(None, _or_none(_store), "local", "grows", "decoder")  # noqa: RUF009
    cross_attention: str = _option("exact", _choice("exact", "same"), "encoder")
    offload: str | None = _option(None, _or_none(_offload), "local", "grows", "call")
    device_bytes: int | None = _option(None, _BYTES, "local", "call")
    latent: str | Mapping[str, str] | None = _option(None, _or_none(_latent))
    widen: str = _option("auto", _choice("auto", "never"))
    on_edit: str = _option("refuse", _choice("refuse", "crop"), "decoder")
    read: Any = _option(None, _or_none(_read))  # noqa: RUF009

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.check(name, getattr(self, name)))
        for name in names_of("grows"):
            why = "which allocates all pages at once"
            self._check_apart(name, "max_length", why)
        self._check_apart("max_pages", "prefix_store", "whose pages many caches share")
        self._check_apart("offload", "prefix_store", "whose pages many caches read at once")
        self.check_groups(SIDES_WITH_GROUPS)
        if self.device_bytes is not None and self.offload is None:
            raise CacheOptionError(
                f"device_bytes={self.device_bytes} needs offload='cpu' or 'disk': without it all pages stay on the device; "
                "use max_pages to bound them"
            )
        least = self.sink_tokens + self.recent_tokens + 2 * self.page_size
        if self.read is not None and self.read.get("tokens", least) < least:
            raise CacheOptionError(
                f"read must be at least {least} tokens: {self.sink_tokens} sink_tokens, {self.recent_tokens} recent_tokens, "
                f"an open page and one more page of {self.page_size} tokens, got {self.read['tokens']}"
            )

    def _gives(self, name: str) -> bool:
        return bool(getattr(self, name) != DEFAULTS[name])

    def refuse(self, kind: str, why: str) -> None:
        """Raise CacheOptionError for an option of this kind (Option.kinds) that is not at its default."""
        for name in filter(self._gives, names_of(kind)):
            raise CacheOptionError(f"{name}={getattr(self, name)!r} {why}; leave it out")

    def _check_apart(self, name: str, other: str, why: str) -> None:
        """Raise CacheOptionError where two options are given that do not go together."""
        if self._gives(name) and self._gives(other):
            one, two = (f"{option}={getattr(self, option)!r}" for option in (name, other))
            raise CacheOptionError(
                f"{one} does not go with {two}, {why}; leave out {name} or {other}"
            )

    def group_size_of(self, side: str) -> int | None:
        """Return what `group_size` says of one side."""
        given = self.group_size
        return given.get(side) if isinstance(given, Mapping) else given

    def check_groups(self, sides: Collection[str]) -> None:
        """Raise CacheOptionError for a group size that no format reads, and for one of a side that is not one of `sides`."""
        if self.group_size is None:
            return
        named = self.group_size if isinstance(self.group_size, Mapping) else None
        for side in named or ():
            if side not in sides:
                raise CacheOptionError(
                    f"group_size={self.group_size!r} names {side}, and this model stores {listed(sides)} alone; leave it out"
                )
        asked = {side: self._formats_for(side) for side in named or sides}
        unread = [side for side in asked if asked[side].isdisjoint(readers_of(side))]
        if unread and (named or len(unread) == len(sides)):
            known = "; ".join(
                f"for {side} {listed(readers_of(side))} read it, not {listed(sorted(asked[side]))}"
                for side in unread
            )
            raise CacheOptionError(f"group_size={self.group_size!r} is read by no format: {known}")

    def _formats_for(self, side: str) -> set[str]:
        """Return the formats that layers may have for one side; `layers` names those of latents as keys."""
        latent = side == "latent"
        first = self._of_latent("format") or self.keys if latent else getattr(self, side)
        overrides = [formats for _, _, formats in self.layer_overrides()]
        own = "keys" if latent else side
        return {first, *(one[own] for one in overrides if own in one)}

    @classmethod
    def from_options(
        cls, implementation: str, options: "Mapping[str, Any] | CacheConfig | None"
    ) -> "CacheConfig":
        """Build the options of `cache_implementation=implementation, cache_config=options`.

        `options` is read, never changed; of a CacheConfig the fields that are not at their defaults count, and its
        formats together. Raises CacheOptionError for unknown names.
        """
        check_choice("cache_implementation", implementation, cache_names(), OTHER_CACHE_WORDS)
        given, named = given_options(options), cache_options(implementation)
        if {"keys", "values"} & given.keys():  # the name's formats are not what was asked for
            named.pop("latent", None)
        return cls(**merged(named, given))

    @classmethod
    def from_arguments(
        cls,
        keys: str | None,
        values: str | None,
        options: Mapping[str, Any],
        cache_config: "Mapping[str, Any] | CacheConfig | None" = None,
    ) -> "CacheConfig":
        """Build the options of `PagedCache(config, cache_config, keys=keys, values=values, **options)`.

        Options by name win over those of `cache_config`. None is the format "exact" for keys, and that of the keys for
        values.
        """
        check_option_names(options)
        given = merged(given_options(cache_config), options)
        keys = given.pop("keys", "exact") if keys is None else keys
        values = given.pop("values", keys) if values is None else values
        return cls(**{**given, "keys": keys, "values": values})

    def to_dict(self) -> dict[str, Any]:
        """Return the options that are not at their defaults in JSON types: a GenerationConfig that holds this is saved so.

        A prefix store is left out.
        """
        found = given_options(self)
        found.pop("prefix_store", None)
        found = copy.deepcopy(found)
        if found.get("layers") is not None:
            found["layers"] = {str(span): formats for span, formats in found["layers"].items()}
        return found

    def __str__(self) -> str:
        given = given_options(self)
        return f"CacheConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def layer_overrides(self) -> list[LayerOverride]:
        """Return `layers` as (first layer, last layer, {side: format}); empty without overrides."""
        return parse_layers(self.layers)

    def schemes(self, layer_idx: int, num_layers: int) -> tuple[Scheme, Scheme]:
        """Return the (keys, values) schemes of one layer, with the overrides of `layers` applied.

        Raises: CacheOptionError when `layers` names a layer that the model does not have.
        """
        sides = self._formats_of(layer_idx, num_layers)
        return (
            key_scheme(sides["keys"], self.group_size_of("keys")),
            value_scheme(sides["values"], self.group_size_of("values")),
        )

    def latent_scheme(self, layer_idx: int, num_layers: int) -> Scheme:
        """Return the scheme of one layer's latents, with the overrides of `layers` applied.

        Raises: CacheOptionError where two formats are given for the one latent that is key and value.
        """
        sides = self._formats_of(layer_idx, num_layers, self._of_latent("format"))
        if sides["keys"] != sides["values"]:
            raise CacheOptionError(
                f"keys={sides['keys']!r} and values={sides['values']!r}: layer {layer_idx} stores one latent for both; give "
                "one format for both (latent= names it for all layers that `layers` does not)"
            )
        return latent_scheme(sides["keys"], self.group_size_of("latent"))

    def k_rope_format(self, latent: Scheme) -> str:
        """Return the name of the format of the RoPE keys beside latents of this scheme."""
        return k_rope_name(self._of_latent("k_rope"), latent)

    @property
    def latent_decode(self) -> str:
        """How decode steps attend to latents: "auto", "absorb" or "expand"."""
        return self._of_latent("decode") or "auto"

    def _of_latent(self, part: str) -> str | None:
        """Return what `latent` says of the latents' "format", of the "k_rope" next to them, or of "decode"."""
        given = self.latent if isinstance(self.latent, Mapping) else {"format": self.latent}
        return given.get(part)

    def _formats_of(
        self, layer_idx: int, num_layers: int, latent: str | None = None
    ) -> dict[str, str]:
        sides = {"keys": latent or self.keys, "values": latent or self.values}
        for low, high, override in self.layer_overrides():
            if high >= num_layers:
                raise CacheOptionError(
                    f"layers: {low}-{high} goes past the last layer {num_layers - 1} of the model"
                )
            if low <= layer_idx <= high:
                sides.update(override)
        return sides

    @cached_property
    def budget(self) -> ReadBudget | None:
        """What a step may read by `read`; None: everything."""
        if self.read is None:
            return None
        tokens, kept = self.read.get("tokens"), self.sink_tokens + self.recent_tokens
        pages = None if tokens is None else pages_for(tokens, kept, self.page_size)
        first = self.read.get("from", READ_FROM)
        return ReadBudget(pages, self.read.get("share"), first)

    def check_reads(self, model_type: Any, windows: list[int | None], latent: bool) -> None:
        """Raise CacheOptionError where steps are to read a part, and a model has no layer that can be read in part.

        Args:
            windows: sliding window of each layer that lives in pages, None of those that see everything.
            latent: whether any of them holds latents.
        """
        if self.read is None:
            return
        given = f"read={self.read!r}"
        if latent:
            raise CacheOptionError(
                f"{given}: {model_type!r} caches latents (MLA), of which a step reads all; leave it out"
            )
        if all(window is not None for window in windows):
            widest = max(window or 0 for window in windows)
            raise CacheOptionError(
                f"{given}: no layer of {model_type!r} attends to the whole text (its sliding windows are {widest} tokens at "
                "most), so that there is nothing to choose from; leave it out"
            )


# name -> what is known of it, in the order of CacheConfig
OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(CacheConfig)}
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(CacheConfig)}


def names_of(kind: str) -> tuple[str, ...]:
    """Return the options of a kind (Option.kinds)."""
    return tuple(name for name, option in OPTIONS.items() if kind in option.kinds)


def check_option_names(given: Mapping[str, Any]) -> None:
    """Raise CacheOptionError for a name that is no option of CacheConfig."""
    for name in given:
        check_choice("cache_config option", name, OPTIONS, OTHER_OPTION_NAMES)


def merged(first: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of both mappings.

    Those of `given` win. Where both give parts of one option, the parts are joined: a "k_rope" leaves the latents' format.
    """
    both = {**first, **given}
    for name in ("group_size", "latent", "read"):
        own, other = first.get(name), given.get(name)
        if name == "latent" and isinstance(own, str):
            own = {"format": own}
        if isinstance(own, Mapping) and isinstance(other, Mapping):
            both[name] = {**own, **other}
    return both


def given_options(cache_config: Any) -> dict[str, Any]:
    """Return the options that `cache_config` gives, as a new dict.

    A field of a CacheConfig counts as given where it is not at its default. Its formats count together: with
    `CacheConfig(values="int4")` keys are given too, as exact.

    Args:
        cache_config: a CacheConfig, a mapping of options, or None.
    Raises: CacheOptionError for anything else, and for names that are no options.
    """
    if cache_config is None:
        return {}
    if isinstance(cache_config, CacheConfig):
        values = {name: getattr(cache_config, name) for name in OPTIONS}
        given = {name: one for name, one in values.items() if one != DEFAULTS[name]}
        if given.keys() & set(_FORMATS):
            given |= {side: values[side] for side in ("keys", "values")}
        return given
    if not isinstance(cache_config, Mapping):
        raise CacheOptionError(_no_config(cache_config))
    check_option_names(cache_config)
    return dict(cache_config)


def _no_config(given: Any) -> str:
    """Return what to write in place of something that is no cache_config."""
    rule = (
        "cache_config must be a kv_hf.CacheConfig or a dict of options such as {'page_size': 32}, got "
        f"{short(given) if isinstance(given, str) else type(given).__name__}"
    )
    if isinstance(given, str) and given in format_names("keys"):
        return f"{rule}; a format is given by name: keys={given!r}"
    if isinstance(given, str) and given in cache_names():
        return (
            f"{rule}; the name of a cache goes to generate(cache_implementation={given!r}) or "
            f"PagedCache.from_implementation(config, {given!r})"
        )
    return f"{rule}; formats are given by name, such as keys='int8', values='int4'"


def parse_layers(layers: Any) -> list[LayerOverride]:
    """Return `layers` as (first layer, last layer, {side: format}); empty for None.

    Raises: CacheOptionError naming the entry and what is wrong with it.
    """
    if layers is None:
        return []
    if not isinstance(layers, Mapping):
        raise CacheOptionError(
            f"layers must map layer numbers or ranges to formats, got {layers!r}"
        )
    return [_parse_entry(span, formats) for span, formats in layers.items()]


def _parse_entry(span: Any, formats: Any) -> LayerOverride:
    numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(span))
    if numbers is None:
        raise CacheOptionError(
            f"layers: a key must be a layer number or a range like '0-3', got {span!r}"
        )
    low, high = int(numbers[1]), int(numbers[2] or numbers[1])
    if high < low:
        raise CacheOptionError(f"layers: range {span!r} ends before it begins")
    sides = {"keys": formats, "values": formats} if isinstance(formats, str) else formats
    if not isinstance(sides, Mapping):
        raise CacheOptionError(
            f"layers: {span!r} must give a format or {{'keys': .., 'values': ..}}, got {formats!r}"
        )
    for side, name in sides.items():
        check_choice(f"layers[{span!r}]", side, ("keys", "values"))
        check_format(f"layers[{span!r}][{side!r}]", name, side)
    return low, high, dict(sides)


Call = TypeVar("Call", bound=Callable[..., Any])


def shows_options(function: Call) -> Call:
    """Have `inspect.signature`, `help` and notebooks show each option where a function has `**options`."""
    signature = inspect.signature(function)
    named = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    rest = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
        )
        for one in fields(CacheConfig)
        if one.name not in signature.parameters
    ]
    replaced: Any = function
    replaced.__signature__ = signature.replace(parameters=[*named, *rest])
    return function
