"""scripts/measure: tiny models of every family, that the walk finds what is wrong, and the suites of transformers."""

import dataclasses

import pytest
import torch
from measure import families as walk
from measure import suites
from measure.families import SENSITIVE, examine
from measure.family_models import (
    ROLES,
    build_model,
    families,
)
from measure.family_operations import OPERATIONS, STOCK, NotOffered, Subject
from measure.runner import WORKLOADS, run

import kv_hf
from kv_hf.cache.layer import PagedLayer
from kv_hf.cache.model_shape import CHUNKS_BEHIND_A_CACHE

# family -> role, part of a decode step's layers that kernels read, operations that are not equal with a reason of transformers'
# own; each of these stresses another seam: KV-shared layers, block selection, latents, chunks, sinks, biases, states, ...
STATEFUL = {"lookup": "impossible", "assisted": "impossible"}
FAST = {
    "gemma4_text": ("causal", 1, {}),
    "minimax_m3_vl_text": ("causal", 1, {}),
    "deepseek_v3": ("causal", 1, {}),
    "deepseek_v32": ("causal", 1, {}),
    "llama4_text": ("causal", 1, {}),
    "gpt_oss": ("causal", 1, {}),
    "bloom": ("causal", 0, {}),
    "falcon_h1": ("causal", 1, STATEFUL),
    "zamba2": ("causal", 1, STATEFUL),
    # attends to pages, and computes a mask from all values
    "doge": ("causal", 0.5, {}),
    # its cached steps show padding again, whatever the cache
    "git": ("causal", 0, {}),
    "t5": ("seq2seq", 1, {}),
    "qwen2_vl": ("conditional", 1, {}),
}


# the others are slow, as is the walk over all families
QUICK = ("deepseek_v3", "gpt_oss", "zamba2", "t5", "qwen2_vl")


def supported(family: str, role: str) -> None:
    if family not in families(role):
        pytest.skip(f"this transformers has no {family}")


@pytest.mark.parametrize(
    "family",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAST],
)
def test_examine_family_equals_dynamic_cache(family):
    role, reads, expected = FAST[family]
    supported(family, role)
    row = examine(family, role)
    others = {name: one["verdict"] for name, one in row["others"].items()}
    options = {name for name, verdict in others.items() if verdict == "refused"}
    if not CHUNKS_BEHIND_A_CACHE and family in ("git", "qwen2_vl"):
        pytest.skip("this transformers' own caches fail in some operations of the family")
    assert {name: others[name] for name in others.keys() - options} == expected, row["others"]
    assert options <= {"saved", "prefix", "max_length", "reading"} | (
        {"padded"} if family == "git" else set()
    )
    assert row["verdict"] == ("broken" if "broken" in expected.values() else "equal")
    assert row["pages"] >= 10
    assert row["reads"] == reads
    assert row["sensitivity"] > SENSITIVE


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_walk_finds_no_family_that_differs(role, tmp_path):
    """Every family of the installed transformers: equal, refused, or wrong with DynamicCache as well."""
    work = WORKLOADS["model_families"]
    found = run(work, work.configurations({"role": [role]}), workers=2)
    assert not found.failed
    assert len(found.rows) == len(families(role))


# what the walk would say of a paged cache that is wrong


def faulty_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    import kv_hf.hf.attention as attention

    whole = attention.paged_attention

    def scaled(asked, kernel):
        return whole(dataclasses.replace(asked, softmax_scale=1.05 * asked.softmax_scale), kernel)

    monkeypatch.setattr(attention, "paged_attention", scaled)


def faulty_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_hf.PagedCache, "reorder_cache", lambda self, order: None)


def faulty_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PagedLayer.update

    def shifted(self, key_states, value_states, *args, **more):
        if key_states.shape[2] > 1 and self.get_seq_length():
            key_states = key_states.roll(1, 2)
        return whole(self, key_states, value_states, *args, **more)

    monkeypatch.setattr(PagedLayer, "update", shifted)


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        (faulty_scale, "greedy"),
        (faulty_scale, "padded"),
        (faulty_order, "beams"),
        (faulty_keys, "forwards"),
        (faulty_keys, "logits_to_keep"),
        (faulty_keys, "lookup"),
        (faulty_keys, "two_turns"),
        (faulty_keys, "chunked"),
    ],
)
def test_compare_finds_seeded_fault(monkeypatch, fault, operation):
    subject = Subject(build_model("qwen3"))
    fault(monkeypatch)
    assert walk.compare(subject, operation)["verdict"] == "DIFFERS"


# verdicts of made-up operations


def told(monkeypatch: pytest.MonkeyPatch, **by_kind) -> str:
    """Return the verdict where each kind of cache gives this outcome; an exception is raised."""

    def operation(subject, kind):
        found = by_kind["paged" if kind not in STOCK else kind]
        if isinstance(found, Exception):
            raise found
        return {
            "tokens": torch.tensor([[1, 2]]),
            "logits": torch.tensor([[[0.0, found], [1.0, found]]]),
        }

    monkeypatch.setitem(OPERATIONS, "made_up", operation)
    return walk.compare(None, "made_up")["verdict"]


@pytest.mark.parametrize(
    ("dynamic", "paged", "plain", "expected"),
    [
        (1.0, 1.0 + 1e-5, 5.0, "equal"),
        (1.0, 2.0, 1.0, "DIFFERS"),
        (1.0, 2.0, 2.0, "broken"),
        (1.0, float("nan"), 1.0, "DIFFERS"),
        (1.0, kv_hf.UnsupportedModelError("no"), 1.0, "refused"),
        (1.0, RuntimeError("sizes"), 1.0, "ERROR"),
        (ValueError("no beams"), ValueError("no beams"), 1.0, "impossible"),
        (ValueError("no beams"), 1.0, 1.0, "equal"),
        (ValueError("no beams"), 1.0, ValueError("no"), "ERROR"),
        (NotOffered("no such argument"), 1.0, 1.0, "absent"),
    ],
    ids=str,
)
def test_compare_verdict(monkeypatch, dynamic, paged, plain, expected):
    assert told(monkeypatch, dynamic=dynamic, paged=paged, plain=plain) == expected


# -- transformers' own suites --------------------------------------------------------------------------------


def test_compared_counts_tests_that_used_pages():
    stock = {f"T::{name}": {"outcome": "passed"} for name in "xyz"}
    ours = {
        "T::x": {"outcome": "passed", "made": 1, "pages": 4},
        "T::y": {"outcome": "passed", "pages": 0},
        "T::z": {"outcome": "failed", "made": 1, "pages": 9},
        "T::new": {"outcome": "passed", "made": 1, "pages": 2},
    }
    found = suites.compared(stock, ours)
    assert (found["passed"], found["only_ours_failed"]) == (2, 1)
    assert found["names"] == {"only_ours_failed": ["T::z"]}
    assert (found["passed_with_pages"], found["pages_sealed"]) == (1, 4)
