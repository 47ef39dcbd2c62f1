"""Sealing by the compiled CPU kernel; the bytes are those of `reference.seal_pages`."""

import torch

from ...spec import SideSpec
from .abi import SEAL
from .arguments import capacity_of, raise_for, side_fields
from .library import isa, library


def seal_pages(
    tokens: torch.Tensor, jobs: torch.Tensor, fields: dict[str, torch.Tensor], spec: SideSpec
) -> torch.Tensor:
    """Encode full pages into storage in layout "lanes", in place, with the bytes of `reference.seal_pages`.

    Args:
        tokens: [rows, num_kv_heads, slots, head_dim], the spec's dtype.
        jobs: [n, 3], int32: (row, first of page_size slots, page id); a job with a negative page id is skipped.
        fields: tensors of spec.fields with a leading [pages].
        spec: the side to encode for.
    Returns: bool scalar tensor, True when some number had to be made finite.
    Raises: CacheMismatchError where a page does not exist, before anything is written; MemoryError.
    """
    if tokens.stride(3) != 1:
        tokens = tokens.contiguous()
    jobs = jobs.contiguous()
    capacity = capacity_of(fields)
    block = SEAL.whole.pack(
        *side_fields(spec, fields, tokens),
        spec.side == "keys",
        spec.num_kv_heads,
        spec.page_size,
        jobs.data_ptr(),
        jobs.shape[0],
        capacity,
        torch.get_num_threads(),
        isa(),
        spec.scheme.clip,
    )
    result = library().kv_hf_seal(block)
    raise_for(result, "jobs", capacity)
    return torch.tensor(bool(result))
