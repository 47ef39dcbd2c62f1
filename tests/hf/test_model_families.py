"""scripts/measure/families.py: tiny models of every family, and that the walk finds what is wrong."""

import dataclasses

import pytest
import torch
from measure import families as walk
from measure.families import SENSITIVE, examine, judged, sensitivity
from measure.family_models import (
    ROLES,
    build_config,
    build_model,
    families,
    kept_layers,
)
from measure.family_operations import OPERATIONS, STOCK, NotOffered, Subject, generate, kernel_calls
from measure.runner import WORKLOADS, run
from transformers import AutoConfig
from transformers.models.doge import modeling_doge

import kv_hf
from kv_hf.cache.layer import PagedLayer
from kv_hf.evaluation.rows import read_rows

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


def supported(family: str, role: str) -> None:
    if family not in families(role):
        pytest.skip(f"this transformers has no {family}")


@pytest.mark.parametrize("family", FAST)
def test_examine_family_equals_dynamic_cache(family):
    role, reads, expected = FAST[family]
    supported(family, role)
    row = examine(family, role)
    others = {name: one["verdict"] for name, one in row["others"].items()}
    options = {name for name, verdict in others.items() if verdict == "refused"}
    assert {name: others[name] for name in others.keys() - options} == expected, row["others"]
    assert options <= {"saved", "prefix", "max_length"} | ({"padded"} if family == "git" else set())
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


def test_after_finds_a_model_that_the_switch_changed():
    subject = Subject(build_model("qwen3"))
    with torch.no_grad():
        subject.model.model.layers[0].self_attn.v_proj.weight.mul_(1.1)
    assert walk.compare(subject, "after")["verdict"] == "DIFFERS"


def test_kernel_calls_counts_what_reads_the_pages():
    """A forward reads two layers: one token by kernels, several by kernels, or written out."""
    subject = Subject(build_model("llama"))
    with kernel_calls() as calls:
        generate(subject, "paged_exact", new_tokens=4)
        assert calls == {"decode": 6}
        subject.model.set_attn_implementation("eager")
        generate(subject, "paged_exact", new_tokens=4)
        subject.model.set_attn_implementation("sdpa")
        assert calls == {"decode": 6, "dense": 6}
        generate(subject, "paged_exact", new_tokens=1, with_cache={"prefill_chunk_size": 150})
        assert calls == {"decode": 6, "dense": 6, "several": 2}
    generate(subject, "paged_exact", new_tokens=2)
    assert calls == {"decode": 6, "dense": 6, "several": 2}


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
        (1.0, 1.0, 5.0, "equal"),
        (1.0, 1.0 + 1e-5, 5.0, "equal"),
        (1.0, 2.0, 1.0, "DIFFERS"),
        (1.0, 2.0, 2.0, "broken"),
        (1.0, 2.0, 1.1, "DIFFERS"),
        (1.0, float("nan"), 1.0, "DIFFERS"),
        (1.0, kv_hf.UnsupportedModelError("no"), 1.0, "refused"),
        (1.0, RuntimeError("sizes"), 1.0, "ERROR"),
        (ValueError("no beams"), ValueError("no beams"), 1.0, "impossible"),
        (ValueError("no beams"), 1.0, 1.0, "equal"),
        (ValueError("no beams"), 1.0, 2.0, "DIFFERS"),
        (ValueError("no beams"), 1.0, ValueError("no"), "ERROR"),
        (NotOffered("no such argument"), 1.0, 1.0, "absent"),
    ],
    ids=str,
)
def test_compare_verdict(monkeypatch, dynamic, paged, plain, expected):
    assert told(monkeypatch, dynamic=dynamic, paged=paged, plain=plain) == expected


@pytest.mark.parametrize(
    ("forwards", "greedy", "moved", "pages", "expected"),
    [
        ("equal", "equal", 0.02, 8, "equal"),
        ("DIFFERS", "equal", 0.02, 8, "DIFFERS"),
        ("equal", "impossible", 0.02, 8, "impossible"),
        ("equal", "equal", 0.009, 8, "blunt"),
        ("equal", "equal", None, 8, "blunt"),
        ("equal", "equal", 0.02, 0, "no pages"),
        ("refused", "equal", 0.02, 8, "equal"),
        ("broken", "impossible", 0.02, 8, "broken"),
        ("absent", "refused", 0.02, 8, "refused"),
    ],
)
def test_judged_calls_a_family_equal_that_generated_on_pages(
    forwards, greedy, moved, pages, expected
):
    found = {"forwards": {"verdict": forwards}, "greedy": {"verdict": greedy}}
    assert judged(found, moved, pages)["verdict"] == expected


def test_distance_ignores_logits_behind_a_token_that_differs():
    logits = torch.ones(1, 3, 5)
    other = logits.clone()
    other[:, 2] = 7
    one = {"tokens": torch.tensor([[9, 1, 2, 3]]), "logits": logits}
    two = {"tokens": torch.tensor([[9, 1, 4, 3]]), "logits": other}
    assert walk.distance(one, two) == 0
    assert not walk.alike(one, two)
    two["tokens"] = one["tokens"]
    assert walk.distance(one, two) == 6


# where a version of transformers is wrong itself


def test_pages_follow_a_model_whose_sdpa_sees_later_tokens(monkeypatch):
    """transformers 5.17 lets sdpa leave out the mask that Doge adds its own one to; so does any version without the flag."""
    original = modeling_doge.create_causal_mask

    def leaving_masks_out(*args, allow_is_causal_skip=True, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_doge, "create_causal_mask", leaving_masks_out)
    found = walk.compare(Subject(build_model("doge")), "greedy")
    assert found["verdict"] == "equal"


def test_t5gemma_gives_the_same_with_and_without_a_cache():
    """Without a cache it hides padding, which its start token must not be."""
    subject = Subject(build_model("t5gemma", "seq2seq"))
    with_cache, without = (walk.outcome(subject, "greedy", kind) for kind in ("dynamic", "plain"))
    assert walk.alike(with_cache, without)


# tiny models


@pytest.mark.parametrize(
    "family", ["gemma3_text", "llama4_text", "qwen3_next", "nemotron_h", "gpt_oss"]
)
def test_build_config_keeps_every_kind_of_layer(family):
    supported(family, "causal")
    whole, tiny = AutoConfig.for_model(family), build_config(family)
    kinds = "layers_block_type" if family == "nemotron_h" else "layer_types"
    assert set(getattr(tiny, kinds)) == set(getattr(whole, kinds))
    assert len(getattr(tiny, kinds)) == tiny.num_hidden_layers <= min(7, whole.num_hidden_layers)


def test_kept_layers_takes_one_of_each_kind_and_a_second_of_the_most_frequent():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12)
    count, kept = kept_layers(config)
    assert count == "num_hidden_layers"
    assert [config.layer_types[index] for index in kept] == [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]


def test_build_model_gives_equal_weights_twice_and_attention_that_looks_at_the_context():
    one, two = build_model("llama"), build_model("llama")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    found = sensitivity(Subject(one))
    assert found is not None and found > SENSITIVE


# the workload


def test_workload_records_rows_and_fails_where_a_family_differs(tmp_path, monkeypatch):
    verdicts = {"llama": "equal", "bloom": "DIFFERS"}
    asked = []

    def examined(family, role):
        asked.append(family)
        others = {"greedy": {"verdict": "DIFFERS", "distance": 0.1}}
        return {"family": family, "role": role, "verdict": verdicts[family], "others": others}

    monkeypatch.setattr(walk, "examine", examined)
    monkeypatch.setattr(walk.resource, "setrlimit", lambda *limits: None)
    work, out = WORKLOADS["model_families"], tmp_path / "rows.jsonl"
    todo = work.configurations({"role": ["causal"], "family": ["llama", "bloom"]})
    for _ in range(2):
        found = run(work, todo, out=out, isolated=False, say=str)
        assert [one.partition(": ")[2] for one in found.failed] == [
            "DIFFERS: {'greedy': {'verdict': 'DIFFERS', 'distance': 0.1}}"
        ]
    assert sorted(asked) == ["bloom", "bloom", "llama"]  # what is equal is not walked again
    assert [row["family"] for row in read_rows(out) if row["kind"] == "model_families"] == ["llama"]
