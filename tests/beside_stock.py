"""generate() with pages beside the same call on transformers' own cache: equal tokens, numbers as close as two orders of sums."""

from types import FunctionType
from typing import Any

import rounding
import torch

import kv_hf

KEPT = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


def pages(name: str = "paged_exact", **options: Any) -> dict[str, Any]:
    """Return arguments of generate() that name a cache of small pages."""
    return {"cache_implementation": name, "cache_config": {"page_size": 16, **options}}


def run(model: Any, inputs: dict[str, Any], cache: Any = None, **options: Any) -> Any:
    """Generate, greedily unless told otherwise, always with the same random numbers.

    Args:
        cache: None for transformers' own, arguments of generate() (see `pages`), or a cache.
        options: those of generate(); functions are called first, since processors and criteria have states.
    """
    given = {"do_sample": False, "max_new_tokens": 40, **KEPT}
    given |= {
        name: make() if isinstance(make, FunctionType) else make for name, make in options.items()
    }
    if cache is not None:
        given |= cache if isinstance(cache, dict) else {"past_key_values": cache}
    torch.manual_seed(7)
    return model.generate(**inputs, **given)


def assert_same(found: Any, expected: Any, terms: int = rounding.TERMS) -> None:
    """Raise AssertionError where tokens differ, or numbers by more than rounding may move them."""
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("logits", "scores"):
        for one, other in zip(found.get(name) or (), expected.get(name) or (), strict=True):
            rounding.assert_close(one, other, terms)
    if expected.get("sequences_scores") is not None:
        assert torch.equal(found.beam_indices, expected.beam_indices)
        steps = len(expected.logits)  # every step's score errs
        rounding.assert_close(found.sequences_scores, expected.sequences_scores, steps**2 * terms)


def compare(
    model: Any,
    inputs: dict[str, Any],
    cache: Any = None,
    terms: int = rounding.TERMS,
    **options: Any,
) -> Any:
    """Check that pages (None: exact ones) give what transformers' own cache gives; return the paged cache."""
    expected = run(model, inputs, **options)
    found = run(model, inputs, pages() if cache is None else cache, **options)
    assert_same(found, expected, terms)
    held = found.past_key_values
    assert isinstance(held, kv_hf.PagedCache | kv_hf.PagedEncoderDecoderCache)
    held.check_integrity()
    assert held.memory().pages_held > 0
    assert held.get_seq_length() == expected.past_key_values.get_seq_length()
    return held
