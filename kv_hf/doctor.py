"""What would run on this machine, and why: versions, devices, and the kernel of every format."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers

from .cache.encoder_decoder import PagedEncoderDecoderCache
from .cache.layer_formats import LayerFormats
from .cache.model_shape import decoder_config, is_encoder_decoder, latent_rank, page_sizes
from .cache.paged_cache import PagedCache
from .config import CacheConfig
from .errors import CacheOptionError
from .formats import FORMAT_NAMES, LATENT_FORMAT_NAMES
from .kernels.choice import NAMES, layout_for, why_not
from .kernels.cpu import library


@dataclass(frozen=True)
class FormatReport:
    """Which kernel reads pages of one format.

    Attributes:
        format: exact, fp8, int8, int4 or int2.
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
    for name in FORMAT_NAMES if latent is None else LATENT_FORMAT_NAMES:
        try:
            own: dict[str, Any] = {"keys": name, "values": name}
            if latent is not None:
                own = {"latent": name}
            options = CacheConfig(**own, page_size=page_size)
            formats = LayerFormats.of(options, 0, 1, None if latent is None else key_dim)
            spec = formats.spec(
                num_kv_heads=1,
                key_dim=key_dim,
                value_dim=value_dim,
                dtype=dtype,
                layout=layout_for(device),
            )
        except CacheOptionError as error:
            reports.append(FormatReport(name, None, (("any", str(error)),)))
            continue
        reasons = [(kernel, why_not(kernel, device, spec)) for kernel in NAMES]
        chosen = next(kernel for kernel, reason in reasons if reason is None)
        others = tuple(pair for pair in reasons if pair[0] != chosen)
        reports.append(FormatReport(name, chosen, others))
    return reports


def sizes_of(name: str) -> dict[str, Any]:
    """Return head_dim (or latent: rank and RoPE channels) and dtype of a model, as far as its config says them; see `report_model`."""
    config = decoder_config(_config(name))
    found: dict[str, Any] = {}
    sizes = page_sizes(config)
    if sizes is not None and latent_rank(config) is None:
        found["head_dim"] = sizes["key_dim"]
    elif sizes is not None:
        found["latent"] = sizes["key_dim"], sizes["value_dim"]
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype):
        found["dtype"] = dtype
    return found


def _config(name: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CacheOptionError(f"model {name!r}: {str(error).splitlines()[0]}") from error


def report_model(name: str) -> list[tuple[str, str]]:
    """Return (layers, how they would be cached and why) for a model, from its config alone.

    Args:
        name: a folder, or the name of a model on the hub.
    Raises: CacheOptionError where there is no such config; UnsupportedModelError for a model without paged layers.
    """
    config = _config(name)
    kind = PagedEncoderDecoderCache if is_encoder_decoder(config) else PagedCache
    spans: list[tuple[int, int, str]] = []
    for row in kind(config).report():
        how = f"{row.kind}: {row.reason}" if row.reason else row.kind
        if spans and spans[-1][2] == how and spans[-1][1] == row.layer_idx - 1:
            spans[-1] = (spans[-1][0], row.layer_idx, how)
        else:
            spans.append((row.layer_idx, row.layer_idx, how))
    merged: dict[str, list[str]] = {}
    for first, last, how in spans:
        merged.setdefault(how, []).append(str(first) if first == last else f"{first}-{last}")
    return [(", ".join(layers), how) for how, layers in merged.items()]


def environment() -> list[tuple[str, str]]:
    """Return (what, found) for versions, devices and the C library."""
    found = [
        ("kv_hf", _version("kv_hf")),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        ("triton", _version("triton")),
        ("cpu threads", str(torch.get_num_threads())),
        (
            "C kernel",
            library.missing() or f"{library.ISA_NAMES[library.isa()]}, {library.threads()}",
        ),
    ]
    if not torch.cuda.is_available():
        return [*found, ("gpu", "none that torch sees")]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found.append((f"gpu {index}", f"{name}, compute capability {major}.{minor}"))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
