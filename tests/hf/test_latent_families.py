"""Every family with latent attention on pages of latents, against transformers' own cache and attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import rounding
import torch
import transformers
from measure.family_models import ROLES, families
from packaging.version import Version
from tiny_latent import (
    FAMILIES,
    SPARSE,
    families_of_transformers,
    is_there,
    latent_modules,
    make_model,
    shared_model,
    text_config,
)
from tiny_models import left_padded, tokens
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import model_type_to_module_name

import kv_hf

LENGTHS = [40, 23]
HERE = [family for family in FAMILIES if is_there(family)]
# 5.17 expands before the cache where attention is sparse: such models cache keys and values of all heads
EXPANDING = families_of_transformers(cached="k(v)?_(nope|pass)")
PINNED = "5.23"


@contextmanager
def expansions(model: Any) -> Iterator[list[int]]:
    """Note how many tokens each product with a kv_b_proj of `model` expands."""
    lengths: list[int] = []
    weights = {id(module.kv_b_proj.weight) for module in latent_modules(model)}
    linear = torch.nn.functional.linear

    def noted(given: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if id(weight) in weights:
            lengths.append(given.shape[2])
        return linear(given, weight, bias)

    with patch("torch.nn.functional.linear", noted):
        yield lengths


def forwards(model: Any, cache: Any) -> list[torch.Tensor]:
    """Return the logits of a padded prefill, a chunk of 3, 8 single tokens, a chunk of 40 and 3 more tokens."""
    batch = left_padded(LENGTHS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    more = tokens(2, 54, seed=1)
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    whole = torch.cat([ids, more], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, at = [], 0
    for count in (40, 3, *[1] * 8, 40, *[1] * 3):
        with torch.no_grad():
            out = model(
                input_ids=whole[:, at : at + count],
                attention_mask=mask[:, : at + count],
                position_ids=positions[:, at : at + count],
                past_key_values=cache,
                use_cache=True,
            )
        found.append(out.logits[mask[:, at : at + count].bool()])
        at += count
    return found


def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(
        (a.double() - b.double()).abs().max().item() for a, b in zip(first, second, strict=True)
    )


def assert_all_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        rounding.assert_close(mine, theirs)


def paged(model: Any, **options: Any) -> kv_hf.PagedCache:
    return kv_hf.PagedCache(model.config, **{"page_size": 16, **options})


def stock_attention(family: str) -> str:
    return "eager" if family == "hy_v4" else "sdpa"


@pytest.mark.skipif(
    Version(transformers.__version__).release[:2] != Version(PINNED).release,
    reason=f"the list of families is that of transformers {PINNED}",
)
def test_every_family_of_transformers_has_a_tiny_model():
    """One of each kind is here; the walk over all families of transformers compares the others."""
    walked = {model_type_to_module_name(name) for role in ROLES for name in families(role)}
    assert set(FAMILIES) <= families_of_transformers() <= walked
    assert {f for f in FAMILIES if hasattr(text_config(shared_model(f)), "index_topk")} == set(
        SPARSE
    )


@pytest.mark.parametrize("family", HERE)
def test_logits_are_those_of_the_stock_model(family):
    """Padded prefill, chunks and single tokens; the same in float64, where hardly any rounding hides a difference."""
    model, exact = make_model(family), make_model(family).double()
    exact.set_experts_implementation("eager")  # grouped products know no float64
    stock = forwards(model, DynamicCache(config=model.config))
    truth = forwards(exact, DynamicCache(config=model.config))
    cache = paged(model)
    with expansions(model) as lengths:
        found = forwards(model, cache)
    assert_all_close(found, stock)
    # norms and rotations stay in fp32: what differs by less than an ulp may be rounded to its neighbour, here and there
    scale = max(1.0, *(logits.abs().max().item() for logits in stock))
    ulp = torch.finfo(torch.float32).eps
    assert largest_difference(forwards(exact, paged(exact)), truth) < 8 * ulp * scale
    cache.check_integrity()
    assert cache.memory().pages_held > 0
    if family in EXPANDING:
        # the history is expanded for the prompt and for the chunk of 40 only (a window has fewer tokens)
        count = len(latent_modules(model))
        assert lengths[:count] == [40] * count and len(lengths) == 2 * count
        assert set(lengths[count:]) <= {91, 75} and 91 in lengths


@pytest.mark.parametrize("family", [family for family in SPARSE if is_there(family)])
def test_a_choice_of_few_tokens_is_that_of_the_stock_model(family):
    """An index that chooses 8 tokens: the same choices (many heads, so that no scores tie), honoured by all forwards."""
    changes = {"index_topk": 8, "index_n_heads": 16}
    model = make_model(family, **changes)
    stock_cache = DynamicCache(config=model.config)
    stock = forwards(model, stock_cache)
    everything = forwards(
        make_model(family, **{**changes, "index_topk": 512}), DynamicCache(config=model.config)
    )
    assert largest_difference(stock, everything) > 1e-3, "the choice changes nothing"
    cache = paged(model)
    found = forwards(model, cache)
    assert_all_close(found, stock)
    compared = 0
    for mine, theirs in zip(cache.layers, stock_cache.layers, strict=True):
        if getattr(theirs, "indexer_keys", None) is not None:
            rounding.assert_close(mine.indexer_keys, theirs.indexer_keys)
            compared += 1
    assert compared
    if family in ("dots3_note", "glm5_next"):
        return  # a window or a recurrent state cannot go back; assisted decoding is in test_latent.py
    cache.crop(-60)
    stock_cache.crop(-60)
    ids = tokens(2, 4, seed=5)
    mask = torch.ones(2, 38)
    mask[1, :17] = 0
    model.set_attn_implementation(stock_attention(family))
    logits = []
    for one in (stock_cache, cache):
        with torch.no_grad():
            out = model(ids, attention_mask=mask, past_key_values=one, use_cache=True)
        logits.append(out.logits)
    rounding.assert_close(logits[1], logits[0])
