"""The Triton kernels, and whether they can serve a cache on a device. Only this file and `meta_params` may be imported without Triton."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from packaging.version import Version

from ...spec import ROWS, PageSpec
from ..base import Backend, in_known_groups, unread_formats, unread_groups
from . import meta_params
from .meta_params import MAX_PADDED, MIN_SIZE, in_float32, latent_bytes, padded_rank

OLDEST_TRITON = "3.6"
OLDEST_CAPABILITY = (8, 0)
MAX_DIM = 256
MAX_DIMS = {
    "latent": (512, "kv_lora_rank"),
    "k_rope": (192, "qk_rope_head_dim"),
}  # other sides: MAX_DIM
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def load() -> Backend:
    """Return the backend; imports triton."""
    from . import decode, pages, selection

    return Backend(
        "triton",
        decode.paged_attention,
        pages.write,
        pages.dense_side,
        selection.choose_pages,
        max_queries=64,
    )


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why the Triton kernels cannot read such pages on `device`, or None. Nothing is compiled."""
    return unread_formats(spec) or _why_not(device, spec)


def _why_not(device: torch.device, spec: PageSpec) -> str | None:
    if device.type != "cuda":
        return f"the Triton kernels run on NVIDIA and AMD GPUs, and the cache is on {str(device)!r}"
    return (
        _why_not_sizes(spec)
        or _why_not_installed()
        or _why_not_gpu(device)
        or _why_not_shared(device, spec)
    )


def _why_not_sizes(spec: PageSpec) -> str | None:
    for side in spec.sides:
        if side.dtype not in DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            return f"the Triton kernels take {names}, and the {side.side} are {str(side.dtype).removeprefix('torch.')}"
    page_size = spec.keys.page_size
    if page_size < 16 or page_size & (page_size - 1):
        return f"the Triton kernels take pages of a power of two of at least 16 tokens, got {page_size}"
    for side in spec.sides:
        if side.layout != ROWS:
            return f"the Triton kernels read pages in layout {ROWS!r}, and the {side.side} are in {side.layout!r}"
        most, size = MAX_DIMS.get(side.side, (MAX_DIM, "head_dim"))
        if side.head_dim > most:
            return f"the Triton kernels take {size} up to {most}, and the {side.side} have {side.head_dim}"
    return unread_groups(spec, in_known_groups, "the Triton kernels do") or _why_not_latents(spec)


def _why_not_latents(spec: PageSpec) -> str | None:
    if not spec.is_latent:
        return None
    scheme, rank = spec.keys.scheme, spec.keys.head_dim
    if scheme.code == "unsigned" and scheme.scale_group and scheme.scale_group[0] < MIN_SIZE:
        return (
            f"the Triton kernels take groups of at least {MIN_SIZE} tokens of latents in {scheme.name!r}, the least that "
            f"a matrix product sums over, got group_size {scheme.scale_group[0]}"
        )
    padded = padded_rank(spec)
    if padded <= MAX_PADDED:
        return None
    size = scheme.scale_group[1] if scheme.scale_group else rank
    return (
        f"the Triton kernels take latents of up to {MAX_PADDED} numbers when groups are padded to powers of two of at "
        f"least {MIN_SIZE}; kv_lora_rank {rank} in groups of {size} makes {padded}: take a larger group_size"
    )


@cache
def installed_version() -> str | None:
    """Return the version of the triton that would be imported, or None; its distribution has other names on ROCm."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = re.search(
        r"""^__version__ = ['"](.+?)['"]""", Path(spec.origin).read_text(), re.MULTILINE
    )
    return found.group(1) if found else None


def _why_not_installed() -> str | None:
    installed = installed_version()
    if installed is None:
        return "triton is not installed; pip install -e '.[gpu]' in the clone"
    if Version(installed) < Version(OLDEST_TRITON):
        return (
            f"the Triton kernels need triton {OLDEST_TRITON} or newer, and {installed} is installed"
        )
    return None


def _why_not_gpu(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if torch.version.hip:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        need, have = (".".join(map(str, pair)) for pair in (OLDEST_CAPABILITY, capability))
        return f"the Triton kernels need compute capability {need} or newer, and {name} has {have}"
    return None


def _why_not_shared(device: torch.device, spec: PageSpec) -> str | None:
    """Say so where not even the smallest tiles of latents fit into the device's shared memory; those of heads always do."""
    have, dtype = meta_params.shared_memory(device), spec.keys.dtype
    if have is None or not spec.is_latent:
        return None
    full = in_float32(spec, dtype)
    need = latent_bytes(spec, full, meta_params.target_isa(device))
    if need <= have:
        return None
    remedy = "; float16 and bfloat16 take less" if full else ""
    formats = " and ".join(dict.fromkeys(side.scheme.name for side in spec.sides))
    return (
        f"the Triton kernels take {need:,} bytes of shared memory for {formats} pages of {spec.keys.head_dim} channels in "
        f"{str(dtype).removeprefix('torch.')}, and {torch.cuda.get_device_name(device)} has {have:,}{remedy}"
    )
