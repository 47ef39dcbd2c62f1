"""The part of a page's keys that a choice of pages reads, computed: which words, the middle of the rest, and the part alone.

page_summary.py says what is read and why.
"""

from collections.abc import Mapping

import torch

from ..page_summary import (
    MIDDLE_TOKENS,
    Summary,
    middle_codes,
    part_fields,
    spread,
    summary_of,
    summary_words,
    turned_by,
    word_channels,
    word_starts,
)
from ..spec import LANES, SideSpec
from .codec import decode

Fields = Mapping[str, torch.Tensor]


def words_to_read(fields: Fields, spec: SideSpec) -> torch.Tensor:
    """Return the words whose channels have the largest ranges in some pages, the largest first; of equals the first.

    The range of a word is its own and that of the word that RoPE turns with it (page_summary.turned_by).

    Args:
        fields: of up to RANGED_PAGES pages of keys, with a leading [pages]; not of kind ALL_CHANNELS.
    Returns: [heads, words that are read], int32. Of kind ORDER the first words, which hold the wide channels.
    """
    count, heads = summary_words(spec), spec.num_kv_heads
    device = fields["codes"].device
    kind = summary_of(spec)
    if kind == Summary.ORDER or not len(fields["codes"]):
        return torch.arange(count, dtype=torch.int32, device=device).repeat(heads, 1)
    if kind == Summary.SCALES:
        ranges = fields["scale"].double().sum((0, 2))  # [heads, head_dim]
    else:
        numbers = decode(dict(fields), spec, torch.float32)
        ranges = (numbers.amax(2).double() - numbers.amin(2).double()).sum(0)
    sums = torch.stack([ranges[:, channels].sum(-1) for channels in word_channels(spec)], -1)
    turn = turned_by(spec)
    if turn:
        sums = sums + sums.roll(turn, -1)
    ranked = sums.sort(dim=-1, descending=True, stable=True).indices
    return ranked[:, :count].to(torch.int32)


def channels_of(words: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Return which channels (places, where pages have an order) lie in these words [heads, words]: bool [heads, head_dim]."""
    lies = torch.zeros(
        len(word_channels(spec)), spec.head_dim, dtype=torch.bool, device=words.device
    )
    for word, channels in enumerate(word_channels(spec)):
        lies[word, channels] = True
    return lies[words.long()].any(1)


def middles(fields: Fields, keys: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Return what stands for the channels that are not read token by token.

    Args:
        fields: of the pages, with a leading [pages]; of a part of their keys too (`part_of`).
        keys: what they decode to, [pages, heads, page_size, head_dim].
    Returns: [pages, heads, page_size or 1, head_dim], fp32.
    """
    kind = summary_of(spec)
    if "middle" in fields:
        return fields["middle"].float()
    if kind == Summary.OFFSETS:
        return fields["offset"].float()
    if kind in (Summary.SCALES, Summary.ORDER):
        # the middle of the codes, in each group of tokens
        codes = torch.tensor(middle_codes(spec), device=keys.device)
        middle = fields["offset"].float() + codes * fields["scale"].float()
        if kind == Summary.ORDER:
            order = fields["order"].long()[:, :, None].expand_as(middle)
            middle = torch.zeros_like(middle).scatter(-1, order, middle)
        return middle.repeat_interleave(spec.page_size // middle.shape[2], 2)
    return keys[:, :, spread(MIDDLE_TOKENS, spec.page_size)].float().mean(2, keepdim=True)


def part_of(fields: Fields, words: torch.Tensor | None, spec: SideSpec) -> dict[str, torch.Tensor]:
    """Return what a choice reads of pages of keys: the tensors of `part_fields`, with a leading [pages].

    Args:
        fields: of the whole pages.
        words: [heads, words], integers, that are read; None of kind ALL_CHANNELS.
    """
    part = dict(fields)
    if words is None:
        return part
    codes = fields["codes"]
    pages = len(codes)
    if spec.layout == LANES:
        at = words.long()[None, :, :, None].expand(pages, -1, -1, codes.shape[3])
        part["codes"] = codes.gather(2, at)
    else:
        raw = codes.contiguous().view(torch.uint8)
        at = _bytes_of(words, spec)[None, :, None].expand(pages, -1, raw.shape[2], -1)
        part["codes"] = raw.gather(3, at)
    if "middle" in part_fields(spec):
        keys = decode(part | {"codes": codes}, spec, torch.float32)
        part["middle"] = middles(fields, keys, spec).to(spec.dtype)
    return part


def with_all_words(
    part: Fields, words: torch.Tensor | None, spec: SideSpec
) -> dict[str, torch.Tensor]:
    """Return pages of keys of which only `words` are there: what `part_of` left out holds codes of 0.

    Args:
        part: the tensors of `part_fields`, with a leading [pages].
        words: as for `part_of`.
    """
    fields = dict(part)
    if words is None:
        return fields
    codes = part["codes"]
    shape, dtype = spec.fields["codes"]
    pages = len(codes)
    if spec.layout == LANES:
        at = words.long()[None, :, :, None].expand_as(codes)
        fields["codes"] = codes.new_zeros((pages, *shape)).scatter(2, at, codes)
    else:
        nbytes = shape[-1] * dtype.itemsize
        at = _bytes_of(words, spec)[None, :, None].expand_as(codes)
        raw = codes.new_zeros((*codes.shape[:3], nbytes)).scatter(3, at, codes)
        fields["codes"] = raw.view(dtype)
    return fields


def _bytes_of(words: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Return the bytes of a token that lie in these words: [heads, 4 * words]; of a word that is cut off, the last again."""
    starts = torch.tensor(word_starts(spec), device=words.device)[words.long()]
    places = starts[..., None] + torch.arange(4, device=words.device)
    return places.clamp(max=spec.token_bits // 8 - 1).flatten(1)
