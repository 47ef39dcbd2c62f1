"""What the walk of families says where a version of transformers is wrong itself: Doge and T5Gemma."""

import pytest
import transformers
from measure import families
from measure.family_operations import build_subject
from packaging.version import Version
from transformers.models.doge import modeling_doge


def test_pages_follow_a_model_whose_sdpa_sees_later_tokens(monkeypatch):
    """transformers 5.17 lets sdpa leave out the mask that Doge adds its own one to; so does any version without the flag."""
    original = modeling_doge.create_causal_mask

    def leaving_masks_out(*args, allow_is_causal_skip=True, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_doge, "create_causal_mask", leaving_masks_out)
    found = families.compare(build_subject("doge", "causal"), "greedy")
    assert found["verdict"] == "equal"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="sdpa of Doge looks at later tokens in transformers 5.17",
)
def test_doge_looks_at_no_later_token_and_equals_dynamic_cache():
    subject = build_subject("doge", "causal")
    assert families.looks_ahead(subject, "dynamic") <= families.TOLERANCE
    assert families.compare(subject, "greedy")["verdict"] == "equal"


def test_t5gemma_gives_the_same_with_and_without_a_cache():
    """Without a cache it hides padding, which its start token must not be."""
    subject = build_subject("t5gemma", "seq2seq")
    with_cache, without = (
        families.outcome(subject, "greedy", kind) for kind in ("dynamic", "none")
    )
    assert families.distance(with_cache, without) <= families.TOLERANCE
    assert families.same_tokens(with_cache, without)


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.18"),
    reason="DynamicCache raises for T5Gemma's draft models in transformers 5.17 only",
)
def test_t5gemma_with_a_draft_model_equals_no_cache_where_dynamic_cache_raises():
    found = families.compare(build_subject("t5gemma", "seq2seq"), "assisted")
    assert found["verdict"] == "equal"
    assert "DynamicCache raises RuntimeError: The size of tensor" in found["message"]
