"""What the walk of families says where a version of transformers is wrong itself: Doge and T5Gemma."""

from measure import families
from measure.family_models import build_model
from measure.family_operations import Subject
from transformers.models.doge import modeling_doge


def test_compare_calls_a_model_broken_whose_sdpa_sees_later_tokens(monkeypatch):
    """transformers 5.17 lets sdpa leave out the mask that Doge adds its own one to; so does any version without the flag."""
    original = modeling_doge.create_causal_mask

    def leaving_masks_out(*args, allow_is_causal_skip=True, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_doge, "create_causal_mask", leaving_masks_out)
    found = families.compare(Subject(build_model("doge")), "greedy")
    assert found["verdict"] == "broken"
    assert found["stock_to_plain"] > 0.1
    assert found["ours_to_plain"] <= families.TOLERANCE


def test_t5gemma_gives_the_same_with_and_without_a_cache():
    """Without a cache it hides padding, which its start token must not be."""
    subject = Subject(build_model("t5gemma", "seq2seq"))
    with_cache, without = (
        families.outcome(subject, "greedy", kind) for kind in ("dynamic", "plain")
    )
    assert families.distance(with_cache, without) <= families.TOLERANCE
    assert families.same_tokens(with_cache, without)
