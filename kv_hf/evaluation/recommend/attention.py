"""A model that attends over pages for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...cache.model_shape import attention_config
from ...formats import ATTENTION_NAME
from ...hf.models import use_paged_attention


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Have `model` attend over pages, where it can, and as before afterwards."""
    before = attention_config(model.config)._attn_implementation
    use_paged_attention(model)
    try:
        yield
    finally:
        now = attention_config(model.config)._attn_implementation
        if now == ATTENTION_NAME and before != now:
            model.set_attn_implementation(before or "sdpa")
