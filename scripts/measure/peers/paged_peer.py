"""Peers whose codes are a registered format: pages of ours hold them."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import Cache

from kv_hf import PagedCache

Make = Callable[[Any, Mapping[str, Any]], Cache]  # (model config, options) -> an empty cache


def paged_peer(named: Mapping[str, Any]) -> Make:
    """Return what makes a paged cache with the options `named`; options behind the colon of a name win over them."""

    def make(config: Any, options: Mapping[str, Any]) -> PagedCache:
        return PagedCache.from_implementation(config, "paged_exact", {**named, **options})

    return make
