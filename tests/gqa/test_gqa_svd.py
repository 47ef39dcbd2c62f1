"""Method svd: lossless where heads are equal up to what it may undo, best in its own terms, and right or refused."""

import pytest
import tiny_mha
import torch
from measure.family_models import build_model
from safetensors.torch import save_file
from tiny_tokenizer import make_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import kv_hf
from kv_hf.gqa.components import best_common, root
from kv_hf.gqa.source import Source
from kv_hf.gqa.structure import find_structure, split

DIM, HEADS, KV = 8, 8, 4
FAMILIES = {
    "llama (all biases)": {"attention_bias": True},
    "qwen2 (biases)": {},
    "glm4 (interleaved, partial)": {"partial_rotary_factor": 0.5},
    "phi (half-split, partial, parallel, biases)": {"partial_rotary_factor": 0.5},
    "smollm3 (layers without positions)": {"no_rope_layers": [0, 1]},
    "phi3 (fused)": {},
    "gpt_oss (sinks, biases)": {"num_local_experts": 2, "num_experts_per_tok": 1},
}
GUARDED = {
    "qwen3": {},
    "olmo2": {},
    "qwen3_5_text (gates beside queries)": {"layer_types": ["full_attention"] * 2},
    "minimax_m3_vl_text (indexers)": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
HALF = ([(i, i + DIM // 2) for i in range(DIM // 2)], [])
PLANES = {
    "glm4": ([(0, 1), (2, 3)], [4, 5, 6, 7]),
    "phi": ([(0, 2), (1, 3)], [4, 5, 6, 7]),
}


def model_of(family, **more):
    """Make a tiny random model with a spread of attention that matters."""
    name = family.split(" ")[0]
    if name not in CONFIG_MAPPING:
        pytest.skip("the installed transformers has no such family")
    options = {
        "hidden_size": 64 if name == "phi" else 32, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": DIM, "vocab_size": 64, "intermediate_size": 48, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**options | {**FAMILIES, **GUARDED}.get(family, {}) | more)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1 and not parameter.any():
                parameter.normal_(0, 0.2)  # biases begin as zeros
    return model


def plane_map(angles, planes):
    """Return the map [DIM, DIM] that turns each plane by its angle, and every other channel freely."""
    pairs, free = planes
    out = torch.zeros(DIM, DIM)
    for i, (a, b) in enumerate(pairs):
        c, s = angles[i].cos(), angles[i].sin()
        out[a, a], out[a, b], out[b, a], out[b, b] = c, -s, s, c
    if free:
        generator = torch.Generator().manual_seed(int(angles[0] * 1000))
        turn = torch.linalg.qr(torch.randn(len(free), len(free), generator=generator))[0]
        for i, a in enumerate(free):
            out[a, free] = turn[i]
    return out


def turn_heads(folder, groups, family):
    """Make the heads of each group equal up to what may be undone: keys by plane, values by any rotation; on disk."""
    opened = Source.open(folder)
    structure = find_structure(opened, groups)
    tensors = {name: opened.read(name) for name in opened.tensors}
    m, per = KV // groups, HEADS // KV
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        names = [n for n in structure.parts if f".layers.{layer}." in n]
        found = {n: split(tensors[n], structure.parts[n]) for n in names}
        base = names[0].rsplit(".", 2)[0]
        values = torch.linalg.qr(torch.randn(KV, DIM, DIM, generator=generator))[0]
        angles = torch.rand(KV, DIM, generator=generator) * 6
        planes = PLANES.get(family.split(" ")[0], HALF)
        if family.startswith("smollm3") and layer == 0:
            planes = ([], list(range(DIM)))
        keys = torch.stack([plane_map(a, planes) for a in angles])
        each = keys.repeat_interleave(per, 0)
        for n in names:
            for kind, turns in (("key", keys), ("value", values)):
                if kind in found[n]:
                    first = found[n][kind][::m].repeat_interleave(m, 0)
                    found[n][kind] = torch.einsum("gde,ge...->gd...", turns, first)
            if "query" in found[n]:
                found[n]["query"] = torch.einsum("hde,he...->hd...", each, found[n]["query"])
            tensors[n] = torch.cat([part.flatten(0, 1) for part in found[n].values()])
        for name in (f"{base}.q_proj.weight", f"{base}.q_proj.bias"):
            if name in tensors:
                heads = tensors[name].unflatten(0, (HEADS, DIM))
                tensors[name] = torch.einsum("hde,he...->hd...", each, heads).flatten(0, 1)
        output = next(n for n in (f"{base}.o_proj.weight", f"{base}.dense.weight") if n in tensors)
        heads = tensors[output].unflatten(1, (HEADS, DIM))
        turned = torch.einsum("ohe,hde->ohd", heads, values.repeat_interleave(per, 0))
        tensors[output] = turned.flatten(1)
    found = {n: t.contiguous() for n, t in tensors.items()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def ids(windows=8, tokens=48, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (windows, tokens), generator=generator)


def converted(source, groups, method="svd", text=None):
    """Return the conversion of a checkpoint, as plain transformers loads it; nothing may be missing."""
    target = source.parent / f"{method}-{groups}"
    text = None if method == "mean" else ids() if text is None else text
    kv_hf.convert_to_gqa(source, target, groups, method=method, calibration=text)
    return tiny_mha.load(target)


@torch.no_grad()
def apart(one, other):
    """Return the largest distance of the logits of two models on a text that was not calibrated on, as a part of the largest."""
    one, other = (model(ids(2, 30, 9)).logits for model in (one, other))
    return float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
def off(one, other):
    """Return the mean squared distance of the logits of two models on such a text."""
    one, other = (model(ids(2, 30, 9)).logits for model in (one, other))
    return float((one - other).square().mean())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_svd_loses_nothing_of_heads_that_are_turned_copies(tmp_path, family, groups):
    source = tmp_path / "source"
    model_of(family).save_pretrained(source)
    turn_heads(source, groups, family)
    exact = AutoModelForCausalLM.from_pretrained(source).eval()
    assert apart(converted(source, groups, "mean"), exact) > 0.03
    assert apart(converted(source, groups), exact) < 1e-3  # what the fits' ridge leaves


@pytest.mark.parametrize("family", GUARDED)
def test_keys_behind_a_norm_are_better_than_their_mean(tmp_path, family):
    source = tmp_path / "source"
    model_of(family).save_pretrained(source)
    exact = AutoModelForCausalLM.from_pretrained(source).eval()
    pooled, found = converted(source, 1, "mean"), converted(source, 1)
    assert off(found, exact) < 0.8 * off(pooled, exact)


@pytest.mark.parametrize("family", ["llama", "gpt_oss (sinks, biases)"])
def test_heads_that_are_alike_are_merged_wherever_they_lie(tmp_path, family):
    """Heads 0 and 1 are turned copies of each other, and 2 and 3; then they are moved apart. Sinks hold heads in place."""
    source = tmp_path / "source"
    model_of(family).save_pretrained(source)
    turn_heads(source, 2, family)
    opened = Source.open(source)
    tensors = {name: opened.read(name) for name in opened.tensors}
    order, per = torch.tensor([0, 2, 1, 3]), HEADS // KV
    heads = (order[:, None] * per + torch.arange(per)).flatten()
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("k_proj", "v_proj"):
            tensors[name] = tensor.unflatten(0, (KV, DIM))[order].flatten(0, 1).contiguous()
        elif kind == "q_proj":
            tensors[name] = tensor.unflatten(0, (HEADS, DIM))[heads].flatten(0, 1).contiguous()
        elif kind == "o_proj" and tensor.dim() == 2:
            tensors[name] = tensor.unflatten(1, (HEADS, DIM))[:, heads].flatten(1).contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    exact = AutoModelForCausalLM.from_pretrained(source).eval()
    assert (apart(converted(source, 2), exact) < 1e-3) == (family == "llama")


def test_text_is_read_by_the_checkpoints_tokenizer_and_dtypes_are_kept(tmp_path):
    source = tmp_path / "source"
    model_of("llama", vocab_size=300).to(torch.bfloat16).save_pretrained(source)
    make_tokenizer(300).save_pretrained(source)
    (tmp_path / "text.txt").write_text("Four score and seven years ago our fathers. " * 20)
    text = str(tmp_path / "text.txt")
    report = kv_hf.convert_to_gqa(source, tmp_path / "new", 2, method="svd", calibration=text)
    assert sum("o_proj" in name for name in report.changed) == 2
    before, after = tiny_mha.stored(source), tiny_mha.stored(tmp_path / "new")
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16 and (
            "self_attn" in name or torch.equal(tensor, before[name])
        )
    assert tiny_mha.load(tmp_path / "new")(ids()).logits.isfinite().all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "source", "text.txt"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (torch.arange(30), r"token ids \[windows, tokens\].*; got \[30\] of torch.int64"),
        (torch.tensor([[3, 4]]), r"of at least 8 for heads.*; got \[1, 2\]"),
        (torch.full((4, 20), 64), "token ids from 0 to 63, got 64 to 64"),
    ],
)
def test_calibration_that_does_not_fit_is_refused(text, says, tmp_path):
    model_of("llama").save_pretrained(tmp_path / "source")
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(tmp_path / "source", tmp_path / "new", 2, method="svd", calibration=text)  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_numbers_that_are_not_finite_are_an_error_that_names_the_layer(value, tmp_path):
    model = model_of("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3, 3] = value
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(kv_hf.ConversionError, match=r"'model.layers.1'.*not finite"):
        converted(tmp_path / "source", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("part", ["o_proj", "v_proj", "q_proj", "k_proj"])
def test_a_dead_layer_stays_finite(part, tmp_path):
    model = model_of("llama")
    getattr(model.model.layers[0].self_attn, part).weight.data.zero_()
    model.save_pretrained(tmp_path / "source")
    assert converted(tmp_path / "source", 2)(ids()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("make", "family", "says"),
    [
        (tiny_mha.make, "falcon", "goes to one kv head only"),
        (tiny_mha.make, "gpt_neox", "num_kv_heads=4 first, which is exact"),
        (build_model, "bamba", 'cannot be calibrated, use method="mean": ValueError: not enough'),
    ],
)
def test_models_that_cannot_be_calibrated_are_refused(make, family, says, tmp_path):
    source = tiny_mha.save(make(family), tmp_path / family)
    with pytest.raises(kv_hf.ConversionError, match=says):
        kv_hf.convert_to_gqa(source, tmp_path / "new", 1, method="svd", calibration=ids() % 48)
    assert [path.name for path in tmp_path.iterdir()] == [family]


# the mathematics


@pytest.mark.parametrize("complex_", [False, True])
def test_the_best_common_vector_is_that_of_the_largest_singular_values(complex_):
    dtype = torch.complex128 if complex_ else torch.float64
    generator = torch.Generator().manual_seed(0)
    x, half = (torch.randn(*n, generator=generator, dtype=dtype) for n in ((90, 6), (2, 3, 3)))
    readers = half @ half.mH
    down, up = best_common(x.T @ x.conj(), readers)
    y = torch.einsum("gde,tge->td", down, x.unflatten(1, (2, 3)))
    rest = x.unflatten(1, (2, 3)) - torch.einsum("ged,td->tge", up, y)
    lost = torch.einsum("tge,gef,tgf->", rest.conj(), readers, rest).real
    weighted = torch.einsum("gef,tgf->tge", root(readers), x.unflatten(1, (2, 3))).flatten(1)
    torch.testing.assert_close(lost, torch.linalg.svdvals(weighted)[3:].square().sum())
