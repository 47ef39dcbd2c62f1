"""Pages of a layer in wider formats than were asked for: why, and the storage that takes the place of the narrow one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..quant.codec import decode, encode, lay_out, pick_up
from ..spec import PageFields, PageSpec, SideSpec
from .persistent import persistent_tensors
from .storage import PageStorage, SideStorage

PIECE = 4 << 20  # bytes of numbers that are decoded and encoded at once


@dataclass(frozen=True)
class Wider:
    """The formats that a layer has in place of those asked for.

    Attributes:
        formats: by side ("keys", "values"); sides that keep their format are not named.
        reasons: for each of them, the change and why.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def and_also(self, side: str, name: str, reason: str) -> "Wider":
        """Return this with the format of one more side, or another one of the same side."""
        return Wider({**self.formats, side: name}, {**self.reasons, side: reason})


def rewritten(old: PageStorage, spec: PageSpec, wider: Wider) -> PageStorage:
    """Return storage of `spec` with all pages of `old`, which stays as it is; the rounding of `old` stays in them.

    Where the format of a side is the same, its tensors are too.
    """
    with persistent_tensors():
        new = PageStorage(spec, old.device)
        new.became(old.asked, wider)
        new.share_lock(old)
        sides = tuple(
            _rewritten_side(side, to) for side, to in zip(old.sides, spec.sides, strict=True)
        )
        new.take_over((sides[0], sides[1]))
    return new


def _rewritten_side(old: SideStorage, spec: SideSpec) -> PageFields:
    if old.spec == spec:
        return old.fields
    capacity = old.capacity
    fields = SideStorage(spec, old.fields["codes"].device).grown(capacity)
    step = max(1, PIECE // (spec.num_kv_heads * spec.page_size * spec.head_dim * 4))
    for first in range(0, capacity, step):
        piece = {name: tensor[first : first + step] for name, tensor in old.fields.items()}
        for name, tensor in _changed(piece, old.spec, spec).items():
            fields[name][first : first + step] = tensor
    return fields


def _changed(
    piece: dict[str, torch.Tensor], old: SideSpec, new: SideSpec
) -> dict[str, torch.Tensor]:
    """Return encoded pages of `old` as pages of `new`."""
    if old.scheme == new.scheme:
        return {**piece, "codes": lay_out(pick_up(piece["codes"], old), new)}
    return encode(decode(piece, old, old.dtype), new)[0]
