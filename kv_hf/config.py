"""User options of a paged cache, validated once and frozen. Knows no model and no tensor."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .backend_names import OTHER_WORDS, kernel_choices
from .checks import (
    MOST_PAGE_SIZE,
    check_choice,
    check_int,
    is_power_of_two,
    listed,
)
from .config_given import given_options, json_options
from .config_layers import LayerOverride, parse_layers
from .config_reading import check_reading
from .config_room import check_max_length, check_offload
from .config_sizes import SizeField, byte_size, token_count
from .errors import CacheOptionError
from .formats import (
    Scheme,
    cache_names,
    cache_options,
    check_format,
    k_rope_name,
    key_scheme,
    latent_scheme,
    readers_of,
    value_scheme,
)
from .read_budget import READ_FROM

CROSS_ATTENTION_CHOICES = ("exact", "same")
MLA_CHOICES = ("auto", "absorb", "expand")
GRAPH_CHOICES = ("auto", "always", "never")
WIDEN_CHOICES = ("auto", "never")


@dataclass(frozen=True)
class CacheConfig:
    """Options of a paged cache.

    Attributes:
        keys, values: formats of the stored keys and values; `kv_hf.formats.format_names(side)` lists those of "keys" and of "values".
        page_size: tokens in a page, a power of two of at least 16.
        key_group_size: tokens that share a key scale (4 and 2 bits); must divide page_size.
        value_group_size: channels that share a value scale (4 and 2 bits); must divide head_dim.
        sink_tokens: the first tokens of each row that stay exact for ever. Attention puts so much weight on
            them that their rounding errors dominate all others (StreamingLLM, arXiv 2309.17453).
        recent_tokens: tokens that stay exact on top of the page that is being filled.
        max_pages: upper bound of the pool over all rows, or None.
        max_bytes: of continuous batching alone (docs/serving.md): bytes of its pages and exact tokens, a number or "2GiB",
            allocated when it starts; None takes a part of the free memory.
        reserve_tokens: tokens of each row, a number or "32k", that storage has room for from the first forward on
            (within max_pages).
            Beyond it storage grows with the text, by one page's worth at a time at first, and is copied then.
        max_length: columns (padding included), a number or "32k", of each row that everything is allocated for at the first forward; a
            decode step then compiles (docs/speed_and_memory.md). None: storage grows with the text.
        cuda_graph: "auto" lets generate() run decode steps on a GPU as one CUDA graph where it can: with max_length, and
            without it where the text's end is known and nothing forbids room for all of it (docs/speed_and_memory.md); "always"
            raises where it cannot, "never" does not try.
        layers: formats of single layers or ranges, e.g. {"0-1": "int8", "5": {"keys": "int8"}}.
        prefix_store: a kv_hf.PrefixStore, with which rows and later calls share the pages of common prefixes.
        kernel: implementation of attention over pages: "auto" takes the best that can run here, a name takes
            that one or raises ("triton", "c", "sdpa", "reference").
        cross_attention: of encoder-decoder models: "exact" keeps the encoder's keys and values as transformers
            does, "same" stores them in pages of the formats above.
        offload: "cpu" keeps sealed pages beyond the device budget in pinned host memory, "disk" in a temporary
            file; None keeps all on the device.
        device_bytes: bytes of sealed pages, a number or "2GiB", that may lie on the device, staging buffers (and, where steps read a
            part, indexes) included. With offload and without a budget as little as possible lies there.
        device_pages: the same budget in pages: one page of one layer counts as one, so that a page of the text
            counts once for every layer.
        offload_dir: folder of the file of offload="disk"; None takes the system's folder for temporary files.
        latent: format of the latents of multi-head latent attention (MLA, docs/mla.md): as `keys`, or fp8_ds_mla;
            None takes that of `keys`.
        latent_group_size: numbers of a latent that share a scale (8 bits); must divide kv_lora_rank.
        k_rope: format of the RoPE keys beside latents: exact or int8; None takes int8 beside latents that are encoded,
            except beside fp8_ds_mla.
        mla: "auto" attends to latents themselves in a decode step (absorbed) where the model allows it, and says why
            where it does not; "absorb" raises there; "expand" computes keys and values of all tokens, as transformers.
        widen: "auto" gives the keys or values of a layer a wider format if the one above loses far more of them than of
            ordinary numbers (docs/formats.md), and says so once; "never" keeps the formats.
        read_tokens: tokens of each row, a number or "2k", that a decode step reads at most in layers with full attention: the
            sinks, the exact tokens, the newest page, and those pages that matter most to the step (docs/long_context.md).
            Nothing is evicted. None: everything is read.
        read_share: the same bound as a part of the row's pages, between 0 and 1.
        read_top_p: part of the attention mass, between 0 and 1, at which a step reads no further pages; alone or within
            one of the bounds above.
        read_from: tokens of a row, a number or "8k", from which on a step reads a part; shorter rows are read as a whole.
    """

    keys: str = "exact"
    values: str = "exact"
    page_size: int = 64
    key_group_size: int | None = None
    value_group_size: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 0
    max_pages: int | None = None
    max_bytes: SizeField[int | None] = byte_size()  # noqa: RUF009
    reserve_tokens: SizeField[int] = token_count(0)  # noqa: RUF009 (a descriptor)
    max_length: SizeField[int | None] = token_count(None)  # noqa: RUF009
    cuda_graph: str = "auto"
    layers: Mapping[str, Any] | None = None
    kernel: str = "auto"
    prefix_store: Any = None
    cross_attention: str = "exact"
    offload: str | None = None
    device_bytes: SizeField[int | None] = byte_size()  # noqa: RUF009
    device_pages: int | None = None
    offload_dir: str | None = None
    latent: str | None = None
    latent_group_size: int | None = None
    k_rope: str | None = None
    mla: str = "auto"
    widen: str = "auto"
    read_tokens: SizeField[int | None] = token_count(None)  # noqa: RUF009
    read_share: float | None = None
    read_top_p: float | None = None
    read_from: SizeField[int] = token_count(READ_FROM)  # noqa: RUF009

    def __post_init__(self) -> None:
        check_format("keys", self.keys, "keys")
        check_format("values", self.values, "values")
        check_choice("kernel", self.kernel, kernel_choices(), OTHER_WORDS)
        check_choice("cuda_graph", self.cuda_graph, GRAPH_CHOICES)
        check_choice("widen", self.widen, WIDEN_CHOICES)
        check_choice("cross_attention", self.cross_attention, CROSS_ATTENTION_CHOICES)
        self._check_latent()
        check_int("page_size", self.page_size, 16, MOST_PAGE_SIZE)
        if not is_power_of_two(self.page_size):
            raise CacheOptionError(
                f"page_size must be a power of two of at least 16, got {self.page_size}"
            )
        if self.key_group_size is not None:
            check_int("key_group_size", self.key_group_size, 1, MOST_PAGE_SIZE)
            if self.page_size % self.key_group_size:
                raise CacheOptionError(
                    f"key_group_size must divide page_size {self.page_size}, got {self.key_group_size}"
                )
        if self.value_group_size is not None:
            check_int("value_group_size", self.value_group_size, 1, MOST_PAGE_SIZE)
        self._check_groups()
        check_int("sink_tokens", self.sink_tokens, 0)
        check_int("recent_tokens", self.recent_tokens, 0)
        check_int("reserve_tokens", self.reserve_tokens, 0)
        if self.max_pages is not None:
            check_int("max_pages", self.max_pages, 1)
        if self.prefix_store is not None and not callable(getattr(self.prefix_store, "bind", None)):
            raise CacheOptionError(
                f"prefix_store must be a kv_hf.PrefixStore, got {type(self.prefix_store).__name__}"
            )
        if self.prefix_store is not None and self.max_pages is not None:
            raise CacheOptionError(
                f"max_pages={self.max_pages} does not go with prefix_store, whose pages many caches share; bound it by "
                "PrefixStore(max_bytes=...)"
            )
        check_max_length(self)
        check_offload(self)
        check_reading(self)
        if self.layers is not None:
            self.layer_overrides()
            object.__setattr__(self, "layers", copy.deepcopy(dict(self.layers)))

    def _check_latent(self) -> None:
        """Raise CacheOptionError for bad options about multi-head latent attention."""
        check_choice("mla", self.mla, MLA_CHOICES)
        if self.k_rope is not None:
            check_format("k_rope", self.k_rope, "k_rope")
        if self.latent is not None:
            check_format("latent", self.latent, "latent")
        if self.latent_group_size is not None:
            check_int("latent_group_size", self.latent_group_size, 1, MOST_PAGE_SIZE)
            names: set[str | None] = {
                self.latent or self.keys,
                *(sides.get("keys") for sides in self._overrides()),
            }
            self._check_read("latent_group_size", names, f"latents are {self.latent or self.keys}")

    def _check_groups(self) -> None:
        """Raise CacheOptionError for a group size that no format of this cache reads."""
        for side in ("keys", "values"):
            names = {getattr(self, side), *(sides.get(side) for sides in self._overrides())} - {
                None
            }
            if side == "keys" and self.latent is not None:
                names.add(self.latent)
            argument = f"{side[:-1]}_group_size"
            if getattr(self, argument) is not None:
                self._check_read(argument, names, f"{side} are {', '.join(sorted(names))}")

    def _check_read(self, argument: str, names: set[str | None], are: str) -> None:
        """Raise CacheOptionError where none of the formats `names` reads the option `argument`."""
        readers = readers_of(argument)
        if not names & set(readers):
            raise CacheOptionError(
                f"{argument}={getattr(self, argument)} is read by the formats {listed(readers)} only, and {are}"
            )

    def _overrides(self) -> list[dict[str, str]]:
        """Return {side: format} of each entry of `layers`."""
        return [sides for _, _, sides in self.layer_overrides()]

    @classmethod
    def from_options(
        cls, implementation: str, options: "Mapping[str, Any] | CacheConfig | None"
    ) -> "CacheConfig":
        """Build the options of `cache_implementation=implementation, cache_config=options`.

        `options` is read, never changed; of a CacheConfig the fields that are not at their defaults count, and its
        formats together. Raises CacheOptionError for unknown names.
        """
        check_choice("cache_implementation", implementation, cache_names())
        given, named = given_options(options, cls), cache_options(implementation)
        if {"keys", "values"} & given.keys():  # the name's formats are not what was asked for
            named.pop("latent", None)
        return cls(**{**named, **given})

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
        given = {**given_options(cache_config, cls), **options}
        keys = given.pop("keys", "exact") if keys is None else keys
        values = given.pop("values", keys) if values is None else values
        return cls(**{**given, "keys": keys, "values": values})

    def to_dict(self) -> dict[str, Any]:
        """Return the options that are not at their defaults in JSON types: a GenerationConfig that holds this is saved so.

        A prefix store is left out.
        """
        return json_options(given_options(self, CacheConfig))

    def __str__(self) -> str:
        given = given_options(self, CacheConfig)
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
            key_scheme(sides["keys"], self.key_group_size),
            value_scheme(sides["values"], self.value_group_size),
        )

    def latent_scheme(self, layer_idx: int, num_layers: int) -> Scheme:
        """Return the scheme of one layer's latents, with the overrides of `layers` applied.

        Raises: CacheOptionError where two formats are given for the one latent that is key and value.
        """
        sides = self._formats_of(layer_idx, num_layers, self.latent)
        if sides["keys"] != sides["values"]:
            raise CacheOptionError(
                f"keys={sides['keys']!r} and values={sides['values']!r}: layer {layer_idx} stores one latent for both; give "
                "one format for both (latent= names it for all layers that `layers` does not)"
            )
        return latent_scheme(sides["keys"], self.latent_group_size, self.key_group_size)

    def k_rope_format(self, latent: Scheme) -> str:
        """Return the name of the format of the RoPE keys beside latents of this scheme."""
        return k_rope_name(self.k_rope, latent)

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


def check_option_names(given: Mapping[str, Any]) -> None:
    """Raise CacheOptionError for a name that is no option of CacheConfig."""
    for name in given:
        check_choice("cache_config option", name, [field.name for field in fields(CacheConfig)])
