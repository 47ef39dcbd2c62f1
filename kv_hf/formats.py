"""Number formats of stored keys and values, as frozen descriptions without any arithmetic.

A stored number is `code * scale + offset`. A `Scheme` says what a code is and how many tokens and
channels share one scale or one offset; `quant/` turns tensors into codes and back by that description.
"""

from dataclasses import dataclass, replace

from .errors import CacheOptionError

FORMAT_NAMES = ("exact", "fp8", "int8", "int4", "int2")
LATENT_FORMAT_NAMES = (
    *FORMAT_NAMES,
    "fp8_ds_mla",
)  # the last one: the record of DeepSeek's own kernels
K_ROPE_FORMAT_NAMES = ("exact", "int8")
IMPLEMENTATIONS = {f"paged_{name}": name for name in FORMAT_NAMES}

ATTENTION_NAME = "kv_hf"  # what transformers knows the paged attention by

WHOLE_PAGE = 0  # a group that spans all tokens of a page
WHOLE_HEAD = 0  # a group that spans all channels of a head


@dataclass(frozen=True)
class Scheme:
    """How one side (keys or values) of a page is stored.

    Attributes:
        name: one of FORMAT_NAMES.
        code: "none" (model dtype, no scale), "unsigned" (codes 0 .. 2^bits - 1 from the group's minimum),
            "signed" (codes -qmax .. qmax around the offset) or "float8" (e4m3 around the offset).
        bits: bits of a code; 0 for code "none".
        scale_group: (tokens, channels) that share a scale: n > 0 exactly n, 0 all of the page or of the head,
            -n the largest divisor of at most n (a default, which must fit every model).
        offset_group: the same for offsets, or None where the format has no offset.
        clip: part of a group's range that the codes span; numbers beyond it saturate ("unsigned" only).
            Two bits have four codes: losing the extremes costs less than spreading the codes over them.
        scale_bits: bits of a scale and of an offset, as floating-point numbers: 16 or 32.
    Sources: per-channel keys and per-token values, KIVI (arXiv 2402.02750); removing the channel mean of
    keys, SageAttention (arXiv 2410.02367).
    """

    name: str
    code: str
    bits: int
    scale_group: tuple[int, int] | None = None
    offset_group: tuple[int, int] | None = None
    clip: float = 1.0
    scale_bits: int = 16

    @property
    def is_exact(self) -> bool:
        """True when numbers are stored as they are."""
        return self.code == "none"

    @property
    def codes_per_byte(self) -> int:
        """Codes that share a byte (1 for 8-bit codes and for exact storage)."""
        return max(1, 8 // self.bits) if self.bits else 1

    def resolve(self, page_size: int, head_dim: int, where: str) -> "Scheme":
        """Replace the "whole" groups by sizes and check that everything divides.

        Raises: CacheOptionError naming `where` (e.g. "keys"), the size and what it must divide.
        """
        if self.is_exact:
            return self
        if head_dim % self.codes_per_byte:
            raise CacheOptionError(
                f"{where} format {self.name!r} packs {self.codes_per_byte} channels into a byte, so head_dim "
                f"must be a multiple of {self.codes_per_byte}, got {head_dim}; use 'int8', 'fp8' or 'exact'"
            )
        scale = _sizes(self.scale_group, page_size, head_dim, where, self.name)
        offset = _sizes(self.offset_group, page_size, head_dim, where, self.name)
        return replace(self, scale_group=scale, offset_group=offset)


def _sizes(
    group: tuple[int, int] | None, page_size: int, head_dim: int, where: str, name: str
) -> tuple[int, int] | None:
    if group is None:
        return None
    tokens, channels = _size(group[0], page_size), _size(group[1], head_dim)
    if page_size % tokens:
        raise CacheOptionError(
            f"{where} format {name!r}: key_group_size must divide page_size {page_size}, got {tokens}"
        )
    if head_dim % channels:
        option, size = "value_group_size", "head_dim"
        if where == "latent":
            option, size = "latent_group_size", "kv_lora_rank"
        raise CacheOptionError(
            f"{where} format {name!r}: {option} must divide {size} {head_dim}, got {channels}"
        )
    return tokens, channels


def _size(asked: int, whole: int) -> int:
    if asked < 0:
        return max(size for size in range(1, min(-asked, whole) + 1) if whole % size == 0)
    return asked or whole


def key_scheme(name: str, group_size: int | None = None) -> Scheme:
    """Describe how keys are stored in format `name`.

    `group_size`: tokens that share a scale in the 4- and 2-bit formats; None takes the default (the page,
    and at most 32 tokens at 2 bits). Keys are grouped per channel because some models have channels with a large
    common offset, which per-token scales destroy (see docs/formats.md).
    """
    if name == "exact":
        return Scheme("exact", "none", 0)
    if name == "fp8":
        return Scheme("fp8", "float8", 8, (WHOLE_PAGE, WHOLE_HEAD), (WHOLE_PAGE, 1))
    if name == "int8":
        return Scheme("int8", "signed", 8, (WHOLE_PAGE, WHOLE_HEAD), (WHOLE_PAGE, 1))
    tokens = WHOLE_PAGE if group_size is None else group_size
    if name == "int4":
        return Scheme("int4", "unsigned", 4, (tokens, 1), (tokens, 1))
    if name == "int2":
        tokens = -32 if group_size is None else group_size
        return Scheme("int2", "unsigned", 2, (tokens, 1), (tokens, 1), clip=0.8)
    raise AssertionError(name)


def value_scheme(name: str, group_size: int | None = None) -> Scheme:
    """Describe how values are stored in format `name`.

    `group_size`: channels that share a scale in the 4- and 2-bit formats; None takes the default (the
    whole head, and at most 32 channels at 2 bits).
    """
    if name == "exact":
        return Scheme("exact", "none", 0)
    if name == "fp8":
        return Scheme("fp8", "float8", 8, (1, WHOLE_HEAD))
    if name == "int8":
        return Scheme("int8", "signed", 8, (1, WHOLE_HEAD))
    channels = WHOLE_HEAD if group_size is None else group_size
    if name == "int4":
        return Scheme("int4", "unsigned", 4, (1, channels), (1, channels))
    if name == "int2":
        channels = -32 if group_size is None else group_size
        return Scheme("int2", "unsigned", 2, (1, channels), (1, channels), clip=0.9)
    raise AssertionError(name)


def latent_scheme(
    name: str, group_size: int | None = None, key_group_size: int | None = None
) -> Scheme:
    """Describe how latents of multi-head latent attention are stored in format `name`.

    At 4 and 2 bits a channel is grouped over tokens, as keys are: latents have channels with large common offsets, and
    groups along the rank lose five times as much there (docs/mla_accuracy.md). At 8 bits groups lie along the rank.

    Args:
        group_size: numbers of a latent that share a scale at 8 bits; None takes at most 128 of them.
        key_group_size: tokens that share a scale at 4 and 2 bits, as in `key_scheme`.
    "fp8_ds_mla" is the record of DeepSeek's kernels: e4m3 in groups of 128 with fp32 scales, beside exact RoPE keys (656
    bytes for a rank of 512 and 64 bf16 RoPE channels; FlashMLA, deepseek-ai).
    """
    if name == "fp8_ds_mla":
        return Scheme(name, "float8", 8, (1, 128), scale_bits=32)
    if name in ("fp8", "int8"):
        group = (1, -128 if group_size is None else group_size)
        return Scheme(name, "float8" if name == "fp8" else "signed", 8, group)
    return key_scheme(name, key_group_size)


def k_rope_name(asked: str | None, latent: Scheme) -> str:
    """Return the format of the RoPE keys beside latents: `asked`, or by default int8 beside encoded latents.

    DeepSeek's record keeps them exact, and so do exact pages.
    """
    if asked is not None:
        return asked
    return "exact" if latent.is_exact or latent.name == "fp8_ds_mla" else "int8"


def k_rope_scheme(name: str, rope_dim: int) -> Scheme:
    """Describe how the RoPE keys beside latents are stored: "exact" or "int8"; models without RoPE have none."""
    return key_scheme(name if rope_dim else "exact")
