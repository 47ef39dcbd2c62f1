"""The kernel of every format on one device, and why not another."""

from dataclasses import dataclass, replace

import torch

from ..backend_names import auto_names, backend_names
from ..backends.registry import layout_for, why_not
from ..cache.layer_formats import LayerFormats
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..formats import cache_names, format_names
from ..spec import PageSpec

PREFIX = "paged_"


@dataclass(frozen=True)
class FormatReport:
    """The kernel that reads pages of one format.

    Attributes:
        format: of latents; else the name of a cache without its "paged_": exact, int8, k8v4, ..
        kernel: the implementation that kernel="auto" takes, or None when the format cannot store such heads.
        others: (name, why it cannot run, or None where it merely was not the best) of the other implementations.
    """

    format: str
    kernel: str | None
    others: tuple[tuple[str, str | None], ...]


def report_formats(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    latent: tuple[int, int] | None = None,
) -> list[FormatReport]:
    """Return, for every format, the kernel that would read its pages on `device`, and why not another.

    Args:
        latent: (kv_lora_rank, qk_rope_head_dim) of a model with latent attention, in place of head_dim.
    Raises: CacheOptionError for a page_size or head_dim that no cache has, or a device that torch does not see.
    """
    CacheConfig(page_size=page_size)
    if head_dim < 1:
        raise CacheOptionError(f"head_dim must be at least 1, got {head_dim}")
    try:
        torch.zeros(1, device=device).cpu()
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # by device and build of torch
        reason = str(error).splitlines()[0]
        raise CacheOptionError(f"device {str(device)!r} cannot be used here: {reason}") from error
    reports = []
    key_dim, value_dim = latent or (head_dim, head_dim)
    for name in paged_names() if latent is None else format_names("latent"):
        try:
            spec = spec_of(name, device, dtype, page_size, key_dim, value_dim, latent is not None)
        except CacheOptionError as error:
            reports.append(FormatReport(name, None, (("any", str(error)),)))
            continue
        reasons = [(kernel, why_not(kernel, device, spec)) for kernel in backend_names()]
        able = [kernel for kernel, reason in reasons if reason is None]
        chosen = next(kernel for kernel in able if kernel in auto_names())
        others = tuple(pair for pair in reasons if pair[0] != chosen)
        reports.append(FormatReport(name, chosen, others))
    return reports


def paged_names() -> list[str]:
    """Return the names of all paged caches without their prefix."""
    return [name.removeprefix(PREFIX) for name in cache_names()]


def spec_of(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    key_dim: int,
    value_dim: int,
    latent: bool,
    num_kv_heads: int = 1,
) -> PageSpec:
    """Return what pages of format `name` are like on `device`. Raises CacheOptionError where it cannot store them."""
    if latent:
        options = CacheConfig(latent=name, page_size=page_size)
    else:
        options = CacheConfig.from_options(PREFIX + name, {"page_size": page_size})
        options = replace(options, layers=None, recipe=None)  # of no model's layers in particular
    formats = LayerFormats.of(options, 0, 1, key_dim if latent else None)
    return formats.spec(
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        layout=layout_for(device),
    )
