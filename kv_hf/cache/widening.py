"""Wider pages for a layer whose formats are too narrow: when it is looked for, which ones, done, and said."""

from collections.abc import Iterator

import torch

from ..backends.base import Backend
from ..backends.dispatch import why_not
from ..errors import CacheOptionError
from ..formats import format_names
from ..notices import warn_once
from ..pages import moved
from ..pages.storage import PageStorage, Pair, Wider
from ..quant.damage import Sample, usual_damage
from ..spec import PageSpec, SideSpec
from .layer_formats import LayerFormats

HEALTHY = 8.0  # times the usual damage of the format that is too narrow: what a wider one may do
# damage at which a format has lost the channels, by Scheme.rotated: behind a rotation errors lie evenly in all of them, and
# drown the small ones before
LOST = {False: 0.9, True: 0.5}
WHY = (
    "channels far larger than others of their group, or numbers too small for 16-bit scales, which multiply the usual damage "
    "of rounding"
)


def limit(side: SideSpec) -> float:
    """Return the damage from which a format is too narrow: 2 bits and a quarter of its own lost beside the usual.

    Each bit that is lost multiplies the damage by 4. LOST is a limit as well: few bits lose all before they lose 2 more.
    docs/formats.md has the figures of a real model.
    """
    return min(usual_damage(side) * 4.0 ** (2 + side.scheme.bits / 4), LOST[side.scheme.rotated])


def choose(
    asked: LayerFormats, pages: PageStorage, kernel: str, sample: Sample, tokens: Pair
) -> Wider | None:
    """Return the formats that `pages` need in place of those `asked` for, or None; waits for the device.

    Args:
        kernel: name of the backend that reads the pages, and shall read wider ones.
        tokens: keys and values, as of `widen`.
    """
    formats, reasons = dict[str, str](), dict[str, str]()
    for place, side in enumerate(pages.spec.sides):
        usual, damage, chosen = usual_damage(side), sample.damage(pages.spec, place), "exact"
        if damage <= limit(side):
            continue
        candidates = _candidates(asked.widened(formats), pages, kernel, place, tokens)
        for name, made in sorted(candidates, key=lambda pair: pair[1].bits_per_element):
            if sample.damage(made, place) <= min(HEALTHY * usual, limit(made.sides[place])):
                chosen = name
                break
        formats[side.side] = chosen
        change = f"{side.side} {asked.names[place]} -> {chosen}"
        reasons[side.side] = f"{change}: {WHY} by {damage / usual:,.0f}"
    return Wider(formats, reasons) if formats else None


def _candidates(
    asked: LayerFormats, pages: PageStorage, kernel: str, place: int, tokens: Pair
) -> Iterator[tuple[str, PageSpec]]:
    """Yield (format, pages with it) for all formats wider than that of a side which the kernel reads, but exact."""
    side = pages.spec.sides[place]
    for name in format_names(side.side):
        try:
            made = asked.widened({side.side: name}).spec_of(*tokens)
        except CacheOptionError:  # its groups do not fit these sizes
            continue
        scheme, wider = made.sides[place].scheme, made.sides[place].bits_per_element
        native = scheme.native_number is not None and not scheme.is_exact
        if native and wider > side.bits_per_element and not why_not(kernel, pages.device, made):
            yield name, made


def widen(
    layer_idx: int,
    asked: LayerFormats,
    pages: PageStorage,
    kernel: Backend,
    jobs: torch.Tensor,
    tokens: Pair,
) -> bool:
    """Give a layer wider pages where those of `jobs` need them, under the storage's lock: they are to be sealed anew.

    The first pages that say something tell, because the effect of a model's weights on a channel shows in any page. Where it
    cannot be, the layer keeps its formats, and that is said.

    Args:
        layer_idx: position in the model.
        asked: formats of the layer by its options.
        kernel: that reads the pages.
        jobs: [n, 4], int32, as of spec.PageWrite.
        tokens: keys and values [rows, heads, slots, channels] that hold the runs of `jobs`.
    Returns: whether these pages say anything.
    """
    places = list(dict.fromkeys(map(tuple, jobs[[0, -1], :3].tolist())))
    size = asked.options.page_size
    keys, values = (
        torch.stack([side[row, :, slot : slot + size].detach() for row, slot, _ in places])
        for side in tokens
    )
    sample = Sample(keys, values)
    ids = [page for _, _, page in places]
    sides = [(side.take(ids), side.spec) for side in pages.sides]
    if not sample.says_something:
        return False
    narrow = any(sample.most_damage(fields, spec) > limit(spec) for fields, spec in sides)
    wider = choose(asked, pages, kernel.name, sample, tokens) if narrow else None
    if wider is None:
        return True
    kept = pages.keeps
    try:
        if kept is None:
            pages.widen(asked.widened(wider.formats).spec_of(*tokens), wider, len(jobs))
    except (torch.OutOfMemoryError, MemoryError):
        kept = "there is no memory for wider pages"
    say(layer_idx, wider, kept)
    return True


def may_wait(device: torch.device) -> bool:
    """Say whether pages are sealed on `device` now, and may be read: not while a forward is traced or recorded."""
    traced = torch.compiler.is_dynamo_compiling() or device.type == "meta"
    return not traced and not moved.is_recorded(device)


def say(layer_idx: int, wider: Wider, kept: str | None) -> None:
    """Say which layer got wider formats and why, or why it has `kept` its own; once for each side, format and reason."""
    for side, reason in wider.reasons.items():
        said = "its pages are wider than asked. More layers may get wider pages without a word; cache.report() names all of them, "
        said += 'and widen="never" keeps the formats that were asked for'
        if kept is not None:
            said = f"it keeps its format, because {kept}. Give such layers wider formats by the option `layers`"
        warn_once(
            f"widening {side} {wider.formats[side]} {kept}", f"Layer {layer_idx}, {reason}: {said}"
        )
