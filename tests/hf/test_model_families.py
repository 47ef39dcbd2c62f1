"""scripts/measure/families: tiny models of every family, and that the walk finds what is wrong."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from measure.families import operations, verdict
from measure.families import walk as walking
from measure.families.build import ROLES, build_config, build_model, families
from measure.families.examine import BLUNT, examine, sensitivity
from measure.families.inputs import build_subject
from measure.families.shrink import HEADS, VOCABULARY, kept_layers
from measure.families.subject import STOCK, Subject
from measure.families.walk import _Running, context, walk
from paths import ROOT
from transformers import AutoConfig

import kv_hf
from kv_hf.cache.layer import PagedLayer

# family -> role, attention at the end, operations that are not equal with a reason of transformers' own; each of these
# stresses another seam: KV-shared layers, block selection, latents, chunks, sinks, biases, states beside attention, ...
STATEFUL = {"lookup": "impossible", "assisted": "impossible"}
FAST = {
    "gemma4_text": ("causal", "kv_hf", {}),
    "minimax_m3_vl_text": ("causal", "sdpa", {}),
    "deepseek_v3": ("causal", "kv_hf", {}),
    "deepseek_v32": ("causal", "kv_hf", {}),
    "llama4_text": ("causal", "kv_hf", {}),
    "gpt_oss": ("causal", "kv_hf", {}),
    "bloom": ("causal", "eager", {}),
    "falcon_h1": ("causal", "kv_hf", STATEFUL),
    "zamba2": ("causal", "kv_hf", STATEFUL),
    # its mask ignores the padding while it has no cache
    "git": ("causal", "eager", {"padded": "broken"}),
    "t5": ("seq2seq", "kv_hf", {}),
    "qwen2_vl": ("conditional", "kv_hf", {}),
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
def test_walk_finds_no_family_that_differs(role):
    """Every family of the installed transformers: equal, refused, or wrong with DynamicCache as well."""
    rows = list(walk([(family, role) for family in families(role)], seconds=600, processes=2))
    wrong = {row["family"]: row for row in rows if row["verdict"] in ("DIFFERS", "ERROR")}
    assert not wrong
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
    assert verdict.compare(subject, operation)["verdict"] == "DIFFERS"


def test_after_finds_a_model_that_the_switch_changed():
    subject = build_subject("qwen3", "causal")
    with torch.no_grad():
        subject.model.model.layers[0].self_attn.v_proj.weight.mul_(1.1)
    assert verdict.compare(subject, "after")["verdict"] == "DIFFERS"


# verdicts of made-up operations


def told(monkeypatch: pytest.MonkeyPatch, attention: str = "sdpa", **by_kind) -> str:
    """Return the verdict where each kind of cache gives this outcome; an exception is raised."""
    config = SimpleNamespace(_attn_implementation=attention)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: config))
    monkeypatch.setattr(verdict, "looks_ahead", lambda subject, kind: None)

    def operation(subject, kind):
        found = by_kind["paged" if kind not in STOCK else kind]
        found = found() if callable(found) else found
        if isinstance(found, Exception):
            raise found
        return {
            "tokens": torch.tensor([[1, 2]]),
            "logits": torch.tensor([[[0.0, found], [1.0, found]]]),
        }

    monkeypatch.setitem(operations.OPERATIONS, "made_up", operation)
    return verdict.compare(SimpleNamespace(unswitched=model), "made_up")["verdict"]


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
        (operations.NotOffered("no such argument"), 1.0, 1.0, "absent"),
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
    assert verdict.distance(one, two) == 0
    assert not verdict.same_tokens(one, two)
    two["tokens"] = one["tokens"]
    assert verdict.distance(one, two) == 6


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


@pytest.mark.parametrize(
    ("family", "kv_heads"), [("llama", HEADS), ("mistral", 2), ("gemma3n_text", 2)]
)
def test_build_config_keeps_the_proportion_of_heads(family, kv_heads):
    config = build_config(family)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, kv_heads)
    assert config.vocab_size == VOCABULARY


def test_build_model_gives_equal_weights_twice_and_attention_that_looks_at_the_context():
    one, two = build_model("llama"), build_model("llama")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    found = sensitivity(Subject(one))
    assert found is not None and found > BLUNT


def test_families_names_no_config_class_twice():
    for role in ROLES:
        names = families(role)
        classes = [type(AutoConfig.for_model(name)) for name in list(names)[:20]]
        assert len(set(classes)) == len(classes)
        assert len(names) > 30


# processes


@pytest.fixture
def _quick_start(monkeypatch):
    """The processes of these tests end before they do anything, so that nothing need be imported for them."""
    monkeypatch.setattr(walking, "PRELOADED", ())


@pytest.mark.usefixtures("_quick_start")
def test_walk_gives_a_row_for_a_family_that_takes_too_long():
    (row,) = walk([("llama", "causal")], seconds=0)
    assert row["verdict"] == "ERROR" and "more than 0 seconds" in row["message"]


@pytest.mark.usefixtures("_quick_start")
def test_walk_gives_a_row_for_a_process_that_was_killed():
    running = _Running(context(), ("llama", "causal"), None, 60)
    running.process.kill()
    running.process.join()
    row = running.row()
    assert row is not None
    assert row["verdict"] == "ERROR" and "exit code -9" in row["message"]


# the command and its table


@pytest.fixture
def scripts(monkeypatch):

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_model_families_records_and_goes_on(scripts, tmp_path, monkeypatch):
    import model_families

    rows = {
        "llama": {
            "verdict": "equal",
            "pages": 20,
            "attention": "kv_hf",
            "message": "",
            "sensitivity": 0.1,
        },
        "bloom": {"verdict": "DIFFERS", "pages": 20, "attention": "eager", "message": "why | so"},
    }

    def made_up(tasks, operations, **_):
        for family, role in tasks:
            one = {"verdict": rows[family]["verdict"], "distance": 0.123456}
            yield {"family": family, "role": role, **rows[family], "operations": {"greedy": one}}

    monkeypatch.setattr(model_families, "walk", made_up)
    out = tmp_path / "rows.jsonl"
    command = ["--roles", "causal", "--record", "--out", str(out)]
    assert model_families.main([*command, "--families", "llama"]) == 0
    assert model_families.main([*command, "--families", "bloom"]) == 1
    args = model_families.arguments(command)
    left = [family for family, _ in model_families.tasks(args)]
    assert left == [family for family in families("causal") if family not in rows]

    import family_tables

    from kv_hf.evaluation.rows import read_rows

    recorded = read_rows(out)
    assert recorded[0]["equal"] == ["greedy"] and recorded[0]["others"] == {}
    assert recorded[1]["others"]["greedy"]["distance"] == 0.123
    text = family_tables.families_table(recorded)
    assert "| causal | 2 | 1 | 1 |" in text
    assert "Equal, and attention reads the pages: llama." in text
    assert "| bloom | causal | differs | every operation: why \\| so |" in text


@pytest.mark.parametrize(
    "extra", [["--families", "no_such"], ["--operations", "greedy", "--record"]]
)
def test_model_families_refuses_bad_arguments(scripts, extra, capsys):
    import model_families

    with pytest.raises(SystemExit):
        model_families.arguments(extra)
    assert extra[0] in capsys.readouterr().err or "--record" in extra
