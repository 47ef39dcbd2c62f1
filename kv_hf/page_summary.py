"""What stands for a page when a step chooses which to read: some channels token by token, the middle of the rest.

All of it is read from what the page stores. Knows shapes and schemes; computes nothing.

The channels whose keys differ most within a page tell its tokens apart; the others differ from page to page, and their
middle says as much. A quarter of the channels is read. Codes lie in words of 32 bits (four bytes of layout "rows", a word
of layout "lanes"), which hold one token's codes of neighbouring channels: so whole words are chosen, once for all pages
of a row and head, by the ranges of some of its pages. RoPE turns a channel and the one half a head further on into each
other. Read together they tell how far a key has turned, and one without the other little: they lie in one word of 4 bits
or fewer, and of wider codes in two words, which are chosen together.
"""

from enum import IntEnum

import torch

from .formats.base import planes
from .spec import LANES, SideSpec

PART = 4  # one channel of so many is read token by token
LEAST_WORDS = 2
MOST_CHANNELS = 1024  # of a head that is read in part; kernels have room for as many
RANGED_PAGES = 8  # of a row, evenly spread, whose ranges decide which words are read
# of a page, evenly spread: their mean is the middle of a channel where the page stores none
MIDDLE_TOKENS = 4


class Summary(IntEnum):
    """Where the range and the middle of a channel come from.

    ALL_CHANNELS: no part is read alone: scores are those of whole keys. Also for more than MOST_CHANNELS, and for codes of one
        width in planes.
    SCALES: range and middle from the channel's scales and offsets (unsigned codes per channel).
    OFFSETS: the offset is the middle, the range that of the codes (8 bits).
    TOKENS: exact numbers; the middle is the mean of MIDDLE_TOKENS tokens.
    ORDER: the page has wide channels, of which the widest are read, whichever they are; the rest as for SCALES.
    """

    ALL_CHANNELS = 0
    SCALES = 1
    OFFSETS = 2
    TOKENS = 3
    ORDER = 4


def summary_of(keys: SideSpec) -> Summary:
    """Return how pages of such keys are summed up."""
    scheme = keys.scheme
    if keys.head_dim > MOST_CHANNELS or summary_words(keys) >= words_of(keys):
        return Summary.ALL_CHANNELS
    if scheme.is_exact:
        return Summary.TOKENS
    if scheme.native_number is None or scheme.scale_group is None or scheme.rotated:
        return Summary.ALL_CHANNELS
    if scheme.code == "unsigned":
        per_channel = scheme.scale_group[1] == 1 and scheme.offset_group == scheme.scale_group
        if not per_channel or scheme.scale_bits != 16:
            return Summary.ALL_CHANNELS
        return Summary.ORDER if scheme.wide else Summary.SCALES
    whole = (keys.page_size, keys.head_dim)
    if scheme.scale_group == whole and scheme.offset_group == (keys.page_size, 1):
        return Summary.OFFSETS
    return Summary.ALL_CHANNELS


def word_channels(keys: SideSpec) -> list[list[int]]:
    """Return the channels (places, where pages have an order) of each word of a token's codes, wide words first.

    A word of a plane holds a part of their bits.
    """
    words: list[list[int]] = []
    first = 0
    for bits, channels in keys.runs:
        for plane in planes(bits):
            per_byte = max(1, 8 // plane)
            run, bytes_ = channels // per_byte, max(1, min(4, 32 // plane))
            for at in range(0, run, bytes_):
                some = range(at, min(run, at + bytes_))
                words.append([first + place * run + i for place in range(per_byte) for i in some])
        first += channels
    return words


def words_of(keys: SideSpec) -> int:
    """Return the words of a token's codes."""
    return len(word_channels(keys))


def summary_words(keys: SideSpec) -> int:
    """Return how many words of a token's codes are read: those of the widest channels, a quarter of the channels, or all."""
    words = word_channels(keys)
    if keys.scheme.wide:
        return sum(word[0] < keys.scheme.wide[0][1] for word in words)
    if len(planes(keys.scheme.bits)) > 1:  # they hold a part of the bits
        return len(words)
    quarter = -(-keys.head_dim // PART)
    return max(LEAST_WORDS, -(-quarter // len(words[0])))


def turned_by(keys: SideSpec) -> int:
    """Return how many words on the channels half a head from a word's lie, counted round; 0: not in one other word."""
    words = word_channels(keys)
    first, half = words[0], keys.head_dim // 2
    apart = half % len(first) == 0 and half not in first and not keys.scheme.wide
    return len(words) // 2 if apart and keys.head_dim % 2 == 0 else 0


def word_starts(keys: SideSpec) -> list[int]:
    """Return where each word of a token's codes begins, in bytes of the token; the words are those of `word_channels`."""
    starts: list[int] = []
    first = 0
    for bits, channels in keys.runs:
        for plane in planes(bits):
            nbytes = channels * plane // 8
            starts += range(first, first + nbytes, 4)
            first += nbytes
    return starts


def part_fields(keys: SideSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape of one page, dtype) of what a choice reads of keys, and no more.

    As `SideSpec.fields`, but that codes are those of the words that are read, int32 [heads, words, page_size] in layout
    "lanes" and uint8 [heads, page_size, 4 * words] in layout "rows"; and exact keys have the middle of each channel
    besides, [heads, 1, head_dim] in the model's dtype, as the tokens that it comes from are not there.
    """
    fields, kind = dict(keys.fields), summary_of(keys)
    if kind == Summary.ALL_CHANNELS:
        return fields
    heads, page, words = keys.num_kv_heads, keys.page_size, summary_words(keys)
    fields["codes"] = ((heads, page, 4 * words), torch.uint8)
    if keys.layout == LANES:
        fields["codes"] = ((heads, words, page), torch.int32)
    if kind == Summary.TOKENS:
        fields["middle"] = ((heads, 1, keys.head_dim), keys.dtype)
    return fields


def part_bytes(keys: SideSpec) -> int:
    """Return the bytes of `part_fields` of one page."""
    return sum(
        torch.Size(shape).numel() * dtype.itemsize for shape, dtype in part_fields(keys).values()
    )


def middle_codes(keys: SideSpec) -> list[float]:
    """Return the code in the middle of each channel's unsigned codes (each place's, where pages have an order)."""
    return [0.5 * ((1 << bits) - 1) for bits, channels in keys.runs for _ in range(channels)]


def spread(count: int, of: int) -> list[int]:
    """Return `count` places of `of`, evenly spread, each in the middle of its stretch; fewer where there are fewer."""
    count = min(count, of)
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]
