"""Conversion to fewer kv heads within a class: families, what stays, what is written beside the weights."""

import json

import pytest
import tiny_mha
import torch

import kv_hf
from kv_hf.gqa.checkpoint import Checkpoint
from kv_hf.gqa.layouts import join, parts_of
from kv_hf.gqa.structure import find_structure

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def llama(tmp_path):
    return tiny_mha.save(tiny_mha.make("llama"), tmp_path / "source")


def check_converted(source, target, report, kv_heads):
    """Check a conversion against its source; return the model."""
    before, after = tiny_mha.stored(source), tiny_mha.stored(target)
    copied = [name for name in before if name not in report.changed and name in after]
    assert len(copied) + len(report.changed) == len(after)
    for name in copied:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    shards = [
        sorted(path.name for path in folder.glob("*.safetensors*")) for folder in (source, target)
    ]
    assert shards[0] == shards[1]
    assert report.new_parameters == sum(tensor.numel() for tensor in after.values())
    assert report.nbytes == sum(tensor.nbytes for tensor in after.values())
    if len(shards[0]) > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == report.nbytes
        assert set(index["weight_map"]) == set(after)
    model = tiny_mha.load(target)
    out = model.generate(
        PROMPT, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True, do_sample=False
    )
    kept = [
        layer.keys
        for layer in out.past_key_values.layers
        if getattr(layer, "keys", None) is not None
    ]
    assert kept and all(keys.shape[1] == kv_heads for keys in kept)
    dims = {keys.shape[-1] for keys in kept}
    assert report.new_kv_bytes_per_token == sum(2 * 2 * kv_heads * dim for dim in dims) * len(kept)
    assert (
        report.kv_bytes_per_token * kv_heads == report.new_kv_bytes_per_token * report.num_kv_heads
    )
    return model


def repeated(source, structure, target):
    """Return the tensors of `source` with the heads of `target` repeated, by name."""
    found = dict(tiny_mha.stored(source))
    pooled = tiny_mha.stored(target)
    size = structure.num_kv_heads // structure.new_kv_heads
    for name, (old, _) in structure.changed.items():
        parts = parts_of(name, structure)
        dim = structure.head_dim
        if len(parts) == 3:  # all queries, keys, values: the only layout of fewer kv heads
            query, key, value = pooled[name].split(
                [structure.num_heads * dim, *[structure.new_kv_heads * dim] * 2]
            )
            heads = {
                "query": query.unflatten(0, (-1, dim)),
                "key": key.unflatten(0, (-1, dim)).repeat_interleave(size, 0),
                "value": value.unflatten(0, (-1, dim)).repeat_interleave(size, 0),
            }
            stacked = (
                torch.stack(list(heads.values()), 1).flatten(0, 2)
                if parts[0].interleaved
                else join(heads, parts)
            )
        else:
            stacked = (
                pooled[name]
                .unflatten(0, (structure.new_kv_heads, -1))
                .repeat_interleave(size, 0)
                .flatten(0, 1)
            )
        assert stacked.shape == old
        found[name] = stacked
    for name in structure.removed:
        if (begin := name.partition(".norms.")[0]) != name:
            for head in range(structure.num_kv_heads):
                found[f"{begin}.norms.{head}.weight"] = pooled[
                    f"{begin}.norms.{head // size}.weight"
                ]
    return found


def check_repeated(source, target, model, tmp_path):
    """Check that repeating the heads of a converted model gives a model of the old class with the same logits and back."""
    kv_heads = model.config.get_text_config().num_key_value_heads
    structure = find_structure(Checkpoint.open(source), kv_heads)
    tensors = repeated(source, structure, target)
    own = {name: tensors[disk] for name, disk in structure.names.items() if disk in tensors}
    wide = tiny_mha.load(source)
    missing = wide.load_state_dict(own, strict=False)
    assert not missing.unexpected_keys
    torch.testing.assert_close(tiny_mha.logits(wide), tiny_mha.logits(model), atol=2e-6, rtol=1e-5)
    again = tiny_mha.save(wide, tmp_path / f"repeated{kv_heads}")
    kv_hf.convert_to_gqa(again, tmp_path / f"again{kv_heads}", kv_heads)
    before, after = tiny_mha.stored(target), tiny_mha.stored(tmp_path / f"again{kv_heads}")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", tiny_mha.FAMILIES)
def test_convert_to_gqa_gives_a_checkpoint_of_the_family(family, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    for kv_heads in (2, 1):
        target = tmp_path / f"target{kv_heads}"
        report = kv_hf.convert_to_gqa(source, target, kv_heads)
        assert (report.num_heads, report.num_kv_heads, report.new_kv_heads) == (4, 4, kv_heads)
        assert report.new_class == ""
        model = check_converted(source, target, report, kv_heads)
        text = model.config.get_text_config()
        assert text.num_key_value_heads == kv_heads
        if kv_heads == 2:
            check_repeated(source, target, model, tmp_path)


@pytest.mark.parametrize("family", tiny_mha.ALL_OR_ONE)
def test_convert_to_gqa_makes_one_kv_head_where_a_class_knows_all_or_one(family, tmp_path):
    source = tiny_mha.save(tiny_mha.make(family), tmp_path / "source")
    with pytest.raises(kv_hf.ConversionError, match="knows all heads or one.*got 2"):
        kv_hf.convert_to_gqa(source, tmp_path / "two", 2)
    report = kv_hf.convert_to_gqa(source, tmp_path / "one", 1)
    model = check_converted(source, tmp_path / "one", report, 1)
    model.config.num_key_value_heads = 1
    check_repeated(source, tmp_path / "one", model, tmp_path)
    with pytest.raises(kv_hf.ConversionError, match="1 kv heads already, there is nothing to do"):
        kv_hf.convert_to_gqa(tmp_path / "one", tmp_path / "two", 1)
