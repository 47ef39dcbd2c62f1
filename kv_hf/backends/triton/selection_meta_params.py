"""How the kernel that chooses pages reads keys: words, tiles, splits and dtypes as its compile-time arguments.

Pure arithmetic, importable without Triton; what of a page is read says page_summary.py.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from ...page_summary import (
    MIDDLE_TOKENS,
    RANGED_PAGES,
    Summary,
    middle_code,
    summary_of,
    summary_words,
    turned_by,
    word_channels,
)
from ...read_budget import NEWEST_PAGES
from ...spec import PageSpec, SideSpec
from .meta_params import (
    HIP,
    Hiding,
    chunks,
    column_block,
    compute_types,
    hiding,
    power_of_two,
    side_layout,
)

NUM_WARPS = 4
TILE_TOKENS = 256  # of the pages that a program scores at once
RANGED_NUMBERS = 4096  # of a piece of a page whose ranges are taken
MIN_DEPTH = 16  # numbers that a product sums over, at least
MIN_STRETCH = 512  # tokens of a program, at least
CODES_STRETCH = (
    2048  # the same where ranges come from codes, of which every program reads RANGED_PAGES pages
)
MAX_SPLITS = 64
STAGED_BYTES = 48 * 1024  # of the tiles that are on their way
PROGRAMS = 132 * 4  # that fill a large GPU
MERGED_SPLITS, MERGED_COLUMNS = 16, 64  # whose sums the last program takes at once
SUMMED_PAGES, SUMMED_COLUMNS = 128, 32  # whose masses it sums at once
COUNTED_PAGES = 1024  # that it counts at once


class KeyWords(NamedTuple):
    """What of a page's keys is read, and where it lies.

    Attributes:
        kind: "scales", "codes" (ranges from codes, an offset is the middle), "tokens" (exact numbers) or "order" (of
            two widths); code, bits: as in formats.Scheme, bits of what is read token by token.
        page, dim, group: tokens of a page, channels, tokens that share a scale.
        indexed: whether the pages are an index, which holds the words that are read one after the other.
        row: bytes or numbers of a token, as far as they are there; width: those of a run that is read; runs: codes of a byte.
        part: bytes or numbers of a word; words: words of a run; padded: their next power of two.
        turn: words from one to the one that RoPE turns with it (page_summary.turned_by), or 0.
        read: words that are read; slots: places for them, a power of two.
        ranged: tokens of a page whose ranges are taken at once.
        pages: pages of a tile.
        wide: places in front that are read, where pages have an order.
        middle: the code in the middle; middles: tokens, evenly spread, whose mean is the middle of exact numbers.
    """

    kind: str
    code: str
    bits: int
    page: int
    dim: int
    group: int
    indexed: bool
    row: int
    width: int
    runs: int
    part: int
    words: int
    padded: int
    turn: int
    read: int
    slots: int
    ranged: int
    pages: int
    wide: int
    middle: float
    middles: int


@cache
def key_words(keys: SideSpec, indexed: bool = False) -> KeyWords:
    """Return what is read of such keys (layout "rows"), or of an index of them (page_summary.part_fields)."""
    scheme, side, page = keys.scheme, side_layout(keys), keys.page_size
    ordered = scheme.wide_channels > 0
    words = [word for word in word_channels(keys) if not ordered or word[0] < scheme.wide_channels]
    bits, row, width, runs = scheme.bits, side.size, side.width, side.runs
    if ordered:
        bits, width, runs = side.sections[0][:3]
    part = len(words[0]) // runs
    if scheme.is_exact:
        kind = "tokens"
    elif scheme.code == "unsigned":
        kind = "order" if ordered else "scales"
    else:
        kind = "codes"
    group = scheme.scale_group[0] if scheme.scale_group and scheme.code == "unsigned" else page
    read = min(summary_words(keys), len(words))
    padded = power_of_two(len(words))
    if indexed:
        row = read * part
    return KeyWords(
        kind=kind,
        code=scheme.code,
        bits=bits,
        page=page,
        dim=keys.head_dim,
        group=group,
        indexed=indexed,
        row=row,
        width=width,
        runs=runs,
        part=part,
        words=len(words),
        padded=padded,
        turn=turned_by(keys),
        read=read,
        slots=max(power_of_two(read), MIN_DEPTH // part),
        ranged=max(1, min(page, RANGED_NUMBERS // (padded * part))),
        pages=max(NUM_WARPS, TILE_TOKENS // page),
        wide=scheme.wide_channels,
        middle=0.0 if scheme.is_exact else middle_code(scheme),
        middles=min(MIDDLE_TOKENS, page),
    )


def reads_all(keys: SideSpec) -> bool:
    """Say whether all channels of such keys are read token by token."""
    return summary_of(keys) == Summary.ALL_CHANNELS


def splits(spec: PageSpec, programs: int, indexed: bool = False) -> tuple[int, int]:
    """Return (tokens of a split at least, splits at most) where one split takes `programs` programs."""
    by_codes = key_words(spec.keys).kind in ("codes", "tokens") and not reads_all(spec.keys)
    by_codes = by_codes and not indexed
    most = max(1, min(MAX_SPLITS, PROGRAMS // programs))
    return (CODES_STRETCH if by_codes else MIN_STRETCH), most


def _stages(keys: SideSpec, products: str, isa: int) -> int:
    """Return the tiles that are on their way: fewer where one takes much shared memory."""
    words = key_words(keys)
    size = (
        4
        if products == "fp32"
        else max(1, words.bits // 8, keys.dtype.itemsize if keys.scheme.is_exact else 1)
    )
    most = 2 if isa == HIP else 3
    return max(
        1, min(most, STAGED_BYTES // (words.pages * words.page * words.slots * words.part * size))
    )


def selection_constants(
    spec: PageSpec,
    *,
    query_dtype: torch.dtype,
    group: int,
    q_len: int,
    isa: int,
    softcap: bool = False,
    sinks: bool = False,
    top_p: bool = False,
    indexed: bool = False,
) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel that chooses pages.

    Args:
        group: query heads of a kv head; q_len: chunks of all lengths above 1 share a variant.
        isa: compute capability * 10 on NVIDIA, HIP on AMD, 0 in the interpreter.
        top_p: whether the budget has a part of the mass.
        indexed: whether the pages are an index (PagedKV.words).
    """
    keys = spec.keys
    columns = column_block(spec, group, q_len, isa)
    types = compute_types(spec, query_dtype)
    return {
        "HEADS": keys.num_kv_heads, "GROUP": group, "CHUNK": q_len > 1, "COLUMNS": columns,
        "KEYS": key_words(keys, indexed), "ALL": reads_all(keys), "RANGED": RANGED_PAGES, "NEWEST": NEWEST_PAGES,
        "W_TILE": 32 if keys.head_dim <= 128 else 16, "W_CHUNKS": chunks(keys.head_dim), "PRECISION": "ieee",
        "K_DTYPE": types[0], "W_DTYPE": types[2], "ISA": 0 if types[0] == "fp32" else isa,
        "HIDING": hiding(q_len, "none", softcap, False),
        "PAGE_HIDING": Hiding(False, False, softcap, "none", True, False), "SINKS": sinks, "TOP": top_p,
        "M_SPLITS": MERGED_SPLITS, "M_COLUMNS": MERGED_COLUMNS, "S_PAGES": SUMMED_PAGES, "S_COLUMNS": SUMMED_COLUMNS,
        "BLOCK": COUNTED_PAGES, "M_THREADS": 64 * NUM_WARPS if isa == HIP else 0,
        "STAGES": _stages(keys, types[0], isa),
    }  # fmt: skip
