"""scripts/measure/families.py: tiny models of every family, and that the walk finds what is wrong."""

import dataclasses
from types import SimpleNamespace

import model_families
import pytest
import torch
from measure import families as walk
from measure.families import BLUNT, examine, sensitivity
from measure.family_models import (
    ROLES,
    build_config,
    build_model,
    families,
    kept_layers,
)
from measure.family_operations import OPERATIONS, STOCK, NotOffered, Subject, build_subject
from measure.runner import run
from transformers import AutoConfig

import kv_hf
from kv_hf.cache.layer import PagedLayer
from kv_hf.evaluation.rows import read_rows

# family -> role, attention at the end, operations that are not equal with a reason of transformers' own; each of these
# stresses another seam: KV-shared layers, block selection, latents, chunks, sinks, biases, states beside attention, ...
STATEFUL = {"lookup": "impossible", "assisted": "impossible"}
FAST = {
    "gemma4_text": ("causal", "sdpa", {}),
    "minimax_m3_vl_text": ("causal", "sdpa", {}),
    "deepseek_v3": ("causal", "sdpa", {}),
    "deepseek_v32": ("causal", "sdpa", {}),
    "llama4_text": ("causal", "sdpa", {}),
    "gpt_oss": ("causal", "kv_hf", {}),
    "bloom": ("causal", "eager", {}),
    "falcon_h1": ("causal", "sdpa", STATEFUL),
    "zamba2": ("causal", "sdpa", STATEFUL),
    # its cached steps show padding again, whatever the cache
    "git": ("causal", "eager", {"padded": "refused"}),
    "t5": ("seq2seq", "sdpa", {}),
    "qwen2_vl": ("conditional", "sdpa", {}),
}
ABSENT_OR_EQUAL = ("equal", "absent")


def supported(family: str, role: str) -> None:
    if family not in families(role):
        pytest.skip(f"this transformers has no {family}")


@pytest.mark.parametrize("family", FAST)
def test_examine_family_equals_dynamic_cache(family):
    role, attention, expected = FAST[family]
    supported(family, role)
    row = examine(family, role)
    found = row["operations"]
    other = {name: one for name, one in found.items() if one["verdict"] not in ABSENT_OR_EQUAL}
    assert {name: one["verdict"] for name, one in other.items()} == expected, other
    assert row["pages"] >= 10
    assert row["attention"] == attention
    assert row["sensitivity"] > BLUNT


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_walk_finds_no_family_that_differs(role, tmp_path):
    """Every family of the installed transformers: equal, refused, or wrong with DynamicCache as well."""
    out = tmp_path / "rows.jsonl"
    code = model_families.main(["--roles", role, "--workers", "2", "--record", "--out", str(out)])
    rows = read_rows(out)
    wrong = [row for row in rows if row.get("verdict", "failed") in ("DIFFERS", "ERROR", "failed")]
    assert not wrong and code == 0
    assert len(rows) == len(families(role))
    false = [
        row["family"]
        for row in rows
        if row["verdict"] == "refused"
        and "no attention layer" in row["message"]
        and row["layers_with_keys"]
    ]
    assert not false, "refused for want of attention, though transformers caches keys"


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
    subject = build_subject("qwen3", "causal")
    fault(monkeypatch)
    assert walk.compare(subject, operation)["verdict"] == "DIFFERS"


def test_after_finds_a_model_that_the_switch_changed():
    subject = build_subject("qwen3", "causal")
    with torch.no_grad():
        subject.model.model.layers[0].self_attn.v_proj.weight.mul_(1.1)
    assert walk.compare(subject, "after")["verdict"] == "DIFFERS"


# verdicts of made-up operations


def told(monkeypatch: pytest.MonkeyPatch, attention: str = "sdpa", **by_kind) -> str:
    """Return the verdict where each kind of cache gives this outcome; an exception is raised."""
    config = SimpleNamespace(_attn_implementation=attention)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
    monkeypatch.setattr(walk, "looks_ahead", lambda subject, kind: None)

    def operation(subject, kind):
        found = by_kind["paged" if kind not in STOCK else kind]
        found = found() if callable(found) else found
        if isinstance(found, Exception):
            raise found
        return {
            "tokens": torch.tensor([[1, 2]]),
            "logits": torch.tensor([[[0.0, found], [1.0, found]]]),
        }

    monkeypatch.setitem(OPERATIONS, "made_up", operation)
    return walk.compare(SimpleNamespace(unswitched=model), "made_up")["verdict"]


@pytest.mark.parametrize(
    ("dynamic", "paged", "none", "expected"),
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
def test_compare_verdict(monkeypatch, dynamic, paged, none, expected):
    assert told(monkeypatch, dynamic=dynamic, paged=paged, none=none, eager=dynamic) == expected


@pytest.mark.parametrize(
    ("paged", "eager", "expected"),
    [
        (2.0, 2.0, "broken"),
        (2.0, 1.0, "DIFFERS"),
        (2.0, 1.9, "DIFFERS"),
        (1.0, 2.0, "equal"),
        (2.0, ValueError("no eager attention"), "DIFFERS"),
    ],
    ids=str,
)
def test_compare_asks_eager_attention_where_pages_differ_from_sdpa(
    monkeypatch, paged, eager, expected
):
    assert told(monkeypatch, dynamic=1.0, paged=paged, none=1.0, eager=eager) == expected


def test_compare_has_no_second_attention_to_ask_where_the_model_is_eager(monkeypatch):
    found = {"dynamic": 1.0, "paged": 2.0, "none": 1.0, "eager": 2.0}
    assert told(monkeypatch, attention="eager", **found) == "DIFFERS"


def test_compare_calls_a_family_broken_that_differs_from_itself(monkeypatch):
    drawn = iter((1.0, 3.0))
    found = told(monkeypatch, dynamic=lambda: next(drawn), paged=2.0, none=1.0, eager=1.0)
    assert found == "broken"


def test_distance_ignores_logits_behind_a_token_that_differs():
    logits = torch.ones(1, 3, 5)
    other = logits.clone()
    other[:, 2] = 7
    one = {"tokens": torch.tensor([[9, 1, 2, 3]]), "logits": logits}
    two = {"tokens": torch.tensor([[9, 1, 4, 3]]), "logits": other}
    assert walk.distance(one, two) == 0
    assert not walk.same_tokens(one, two)
    two["tokens"] = one["tokens"]
    assert walk.distance(one, two) == 6


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
    total, kept = kept_layers(config)
    assert total == 12
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
    assert found is not None and found > BLUNT


# the command


def test_model_families_records_rows_and_fails_where_one_differs(tmp_path, monkeypatch, capsys):
    verdicts = {
        "llama": {"verdict": "equal", "distance": 1e-7},
        "bloom": {"verdict": "DIFFERS", "distance": 0.123456},
    }
    asked = []

    def examined(family, role, operations):
        asked.append((family, role, operations))
        one = {**verdicts[family], "message": "why"}
        row = {"family": family, "role": role, "verdict": one["verdict"], "message": ""}
        return {**row, "attention": "kv_hf", "pages": 20, "operations": {"greedy": one}}

    def in_this_process(work, todo, **options):
        return run(work, todo, **options, isolated=False)

    monkeypatch.setattr(walk, "examine", examined)
    monkeypatch.setattr(model_families, "run", in_this_process)
    monkeypatch.setattr(walk.resource, "setrlimit", lambda *limits: None)
    out = tmp_path / "rows.jsonl"
    command = ["--roles", "causal", "--record", "--out", str(out), "--families"]
    assert model_families.main([*command, "llama"]) == 0
    assert model_families.main([*command, "llama", "bloom"]) == 1
    assert asked == [("llama", "causal", None), ("bloom", "causal", None)]  # not a second time
    equal, differs = read_rows(out)
    assert (equal["kind"], equal["equal"], equal["others"]) == ("model_families", ["greedy"], {})
    assert differs["equal"] == [] and differs["others"]["greedy"]["distance"] == 0.123
    assert (
        "bloom (causal): DIFFERS, kv_hf, 20 pages\n    greedy: DIFFERS" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "extra", [["--families", "no_such"], ["--operations", "greedy", "--record"]]
)
def test_model_families_refuses_bad_arguments(extra, capsys):
    with pytest.raises(SystemExit):
        model_families.arguments(extra)
    assert extra[0] in capsys.readouterr().err or "--record" in extra
