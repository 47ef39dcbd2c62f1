"""The way in which each layer of a model would be cached, from its config alone."""

from pathlib import Path
from typing import Any

import torch
import transformers

from ..cache.encoder_decoder import PagedEncoderDecoderCache
from ..cache.model_shape import decoder_config, is_encoder_decoder, latent_rank, page_sizes
from ..cache.paged_cache import PagedCache
from ..errors import CacheOptionError
from ..hub import why_not_model
from ..planner.meta_model import quiet
from ..planner.presets import is_preset, read_preset
from ..printable import in_a_line


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
    if is_preset(name) and not Path(name).exists():
        given = dict(read_preset(name)["config"])
        kind = given["model_type"]
        if kind not in transformers.CONFIG_MAPPING:
            raise CacheOptionError(
                f"model {name!r}: transformers {transformers.__version__} has no {kind}"
            )
        with quiet():
            return transformers.CONFIG_MAPPING[kind].from_dict(given)
    reason = why_not_model(name)
    if reason is not None:
        raise CacheOptionError(f"model {name!r}: {reason}")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CacheOptionError(f"model {name!r}: {in_a_line(error)}") from error


def report_model(name: str) -> list[tuple[str, str]]:
    """Return (layers, how they would be cached and why) for a model, from its config alone.

    Args:
        name: a folder, a preset of the planner, or the name of a model on the hub.
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
