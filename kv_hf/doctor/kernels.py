"""The kernel of every format on one device, how each layer of a model is cached, and the reasons. Runs nothing."""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ..backends.dispatch import BACKENDS, layout_for, why_not
from ..cache.encoder_decoder import PagedEncoderDecoderCache
from ..cache.layer_formats import LayerFormats
from ..cache.model_shape import decoder_config, is_encoder_decoder, latent_rank, page_sizes
from ..cache.paged_cache import PagedCache
from ..checks import usable_device
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..formats import cache_names, format_names
from ..planner.source import load_config, named_dtype
from ..spec import PageSpec

PREFIX = "paged_"
Latent = tuple[int, int] | None  # rank and RoPE channels
KV_HEADS = 2  # of pages with keys and values; latents have one


@dataclass(frozen=True)
class Subject:
    """The pages to examine: those of a model, or of plain sizes.

    Attributes:
        device, dtype, page_size: of the pages.
        head_dim: channels of a head.
        latent: (kv_lora_rank, qk_rope_head_dim) of a model with latent attention, or None.
        model: folder, preset or name of the model, or None.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    page_size: int = 64
    latent: Latent = None
    model: str | None = None

    @classmethod
    def of(cls, device: torch.device, *, model: str | None = None, **given: Any) -> "Subject":
        """Take the fields that are not given (or None) from the config of `model`, where one is named; see `report_model`."""
        given = {name: value for name, value in given.items() if value is not None}
        if model is None:
            return cls(device, **given)
        own: dict[str, Any] = {}
        whole = load_config(model)
        config: Any = decoder_config(whole)
        sizes = page_sizes(config)
        if sizes is not None and latent_rank(config) is not None and "head_dim" not in given:
            own["latent"] = sizes["key_dim"], sizes["value_dim"]
        elif sizes is not None:
            own["head_dim"] = sizes["key_dim"]
        if (dtype := named_dtype(whole, None)) is not None:
            own["dtype"] = getattr(torch, dtype)
        return cls(device, model=model, **{**own, **given})


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


def report_formats(subject: Subject) -> list[FormatReport]:
    """Return, for every format, the kernel that would read its pages, and why not another.

    Raises: CacheOptionError for a page_size or head_dim that no cache has, or a device that torch does not see.
    """
    device = subject.device
    CacheConfig(page_size=subject.page_size)
    if subject.head_dim < 1:
        raise CacheOptionError(f"head_dim must be at least 1, got {subject.head_dim}")
    usable_device(str(device))
    reports = []
    for name in paged_names() if subject.latent is None else format_names("latent"):
        try:
            spec = spec_of(name, subject)
        except CacheOptionError as error:
            reports.append(FormatReport(name, None, (("any", str(error)),)))
            continue
        reasons = {kernel: why_not(kernel, device, spec) for kernel in BACKENDS}
        chosen = next(kernel for kernel, reason in reasons.items() if reason is None)
        del reasons[chosen]
        reports.append(FormatReport(name, chosen, tuple(reasons.items())))
    return reports


def paged_names() -> list[str]:
    """Return the names of all paged caches without their prefix."""
    return [name.removeprefix(PREFIX) for name in cache_names()]


def spec_of(name: str, subject: Subject) -> PageSpec:
    """Return what pages of format `name` are like. Raises CacheOptionError where the format cannot store such heads."""
    rank, heads, cache = None, KV_HEADS, PREFIX + name
    key_dim = value_dim = subject.head_dim
    given: dict[str, Any] = {"page_size": subject.page_size}
    if subject.latent is not None:
        key_dim, value_dim = subject.latent
        rank, heads, cache = key_dim, 1, "paged_exact"
        given["latent"] = name
    # of no model's layers in particular
    options = replace(CacheConfig.from_options(cache, given), layers=None)
    return LayerFormats.of(options, 0, 1, rank).spec(
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=subject.dtype,
        layout=layout_for(subject.device),
    )


def report_model(name: str) -> list[tuple[str, str]]:
    """Return (layers, how they would be cached and why) for a model, from its config alone.

    Args:
        name: a folder, a config.json, a preset of the planner, or the name of a model on the hub.
    Raises: PlanError where there is no such config; UnsupportedModelError for a model without paged layers.
    """
    config = load_config(name)
    kind = PagedEncoderDecoderCache if is_encoder_decoder(config) else PagedCache

    def treatment(row: Any) -> str:
        return f"{row.kind}: {row.reason}" if row.reason else row.kind

    layers: dict[str, list[str]] = {}
    report = kind(config).report()
    for how, run in groupby(report, treatment):
        places = [row.layer_idx for row in run]
        ends = str(places[0]) if len(places) == 1 else f"{places[0]}-{places[-1]}"
        layers.setdefault(how, []).append(ends)
    return [(", ".join(runs), how) for how, runs in layers.items()]
