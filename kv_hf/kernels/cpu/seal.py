"""Sealing by the compiled CPU kernel; the bytes are those of `reference.seal_pages`."""

import torch

from ...spec import SideSpec
from .arguments import SEAL_BLOCK, check_jobs, side_fields
from .library import isa, library


def seal_pages(
    tokens: torch.Tensor, jobs: torch.Tensor, fields: dict[str, torch.Tensor], spec: SideSpec
) -> torch.Tensor:
    """Encode full pages into storage in layout "lanes", in place; see `reference.seal_pages`.

    Raises: CacheMismatchError where a page is not there, before anything is written.
    """
    if tokens.stride(3) != 1:
        tokens = tokens.contiguous()
    jobs = jobs.contiguous()
    check_jobs(jobs, fields)
    block = SEAL_BLOCK.pack(
        *side_fields(spec, fields, tokens),
        spec.side == "keys",
        spec.num_kv_heads,
        spec.page_size,
        jobs.data_ptr(),
        jobs.shape[0],
        torch.get_num_threads(),
        isa(),
        spec.scheme.clip,
    )
    result = library().kv_hf_seal(block)
    if result < 0:
        raise MemoryError("no memory for encoding a page")
    return torch.tensor(bool(result))
