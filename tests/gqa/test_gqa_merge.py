"""Calibrated merges of kv heads: lossless where heads are equal up to what the method may undo, and best in their own terms."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny_tokenizer import make_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import kv_hf
from kv_hf.errors import ConversionError
from kv_hf.gqa.calibrated import calibrate
from kv_hf.gqa.calibration_text import calibration_windows
from kv_hf.gqa.checkpoint import Checkpoint
from kv_hf.gqa.grouping import choose_groups
from kv_hf.gqa.layouts import parts_of, split
from kv_hf.gqa.merge_keys import merge_keys
from kv_hf.gqa.pooling import pool_heads
from kv_hf.gqa.recipe import RECIPES, Recipe
from kv_hf.gqa.refit_outputs import OutputMoments, fit_outputs, fit_values, output_loss
from kv_hf.gqa.rotary import Rotary, probe_rotary
from kv_hf.gqa.shared_rank import best_common, loss, plain_mean, procrustes_mean
from kv_hf.gqa.structure import find_structure

DIM, HEADS, KV = 8, 8, 4
MERGE_ONLY = Recipe("svd", "svd", score_sweeps=0, output_sweeps=0, refit=False, regroup=False)
FAMILIES = {
    "llama": {},
    "qwen2 (biases)": {},
    "llama (all biases)": {"attention_bias": True},
    "glm4 (interleaved, partial)": {"partial_rotary_factor": 0.5},
    "phi (half-split, partial, parallel, biases)": {"partial_rotary_factor": 0.5},
    "cohere (interleaved, parallel)": {},
    "smollm3 (layers without positions)": {"no_rope_layers": [0, 1]},
    "phi3 (fused)": {},
    "gemma2 (soft caps, norms behind attention)": {},
    "gpt_oss (sinks, biases)": {},
}


def model_of(family, **more):
    """Make a tiny random model with a spread of attention that matters."""
    name = family.split(" ")[0]
    options = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
        "vocab_size": 64, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if name == "phi":
        options |= {"hidden_size": 64}
    if name == "gpt_oss":
        options |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = CONFIG_MAPPING[name](**options | FAMILIES.get(family, {}) | more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1 and not parameter.any():
                parameter.normal_(0, 0.2)  # biases begin as zeros
    return model


def rotation(dim):
    return torch.linalg.qr(torch.randn(dim, dim))[0]


def turn_heads(folder, groups, planes):
    """Make the heads of each group equal up to what may be undone: keys by plane, values by any rotation; on disk."""
    checkpoint = Checkpoint.open(folder)
    structure = find_structure(checkpoint, groups)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    m, per = KV // groups, HEADS // KV
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        names = [n for n in structure.changed if f".layers.{layer}." in n]
        found = {n: split(tensors[n], parts_of(n, structure)) for n in names}
        base = names[0].rsplit(".", 2)[0]
        values = torch.stack(
            [torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0] for _ in range(KV)]
        )
        angles = torch.rand(KV, DIM, generator=generator) * 6
        keys = torch.stack([plane_map(a, planes(layer)) for a in angles])
        for n in names:
            for kind, turns in (("key", keys), ("value", values)):
                if kind in found[n]:
                    heads = found[n][kind]
                    first = heads[::m].repeat_interleave(m, 0)
                    found[n][kind] = torch.einsum("gde,ge...->gd...", turns, first)
            if "query" in found[n]:
                found[n]["query"] = torch.einsum(
                    "hde,he...->hd...", keys.repeat_interleave(per, 0), found[n]["query"]
                )
            tensors[n] = torch.cat([found[n][p.kind].flatten(0, 1) for p in parts_of(n, structure)])
        for leaf in ("weight", "bias"):
            name = f"{base}.q_proj.{leaf}"
            if name in tensors:
                heads = tensors[name].unflatten(0, (HEADS, DIM))
                tensors[name] = torch.einsum(
                    "hde,he...->hd...", keys.repeat_interleave(per, 0), heads
                ).flatten(0, 1)
        output = next(
            f"{base}.{n}.weight" for n in ("o_proj", "dense") if f"{base}.{n}.weight" in tensors
        )
        heads = tensors[output].unflatten(1, (HEADS, DIM))
        tensors[output] = torch.einsum(
            "ohe,hde->ohd", heads, values.repeat_interleave(per, 0)
        ).flatten(1)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


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


HALF = ([(i, i + DIM // 2) for i in range(DIM // 2)], [])
NEIGHBOURS = ([(i, i + 1) for i in range(0, DIM, 2)], [])
PLANES = {
    "glm4 (interleaved, partial)": ([(0, 1), (2, 3)], [4, 5, 6, 7]),
    "phi (half-split, partial, parallel, biases)": ([(0, 2), (1, 3)], [4, 5, 6, 7]),
    "cohere (interleaved, parallel)": NEIGHBOURS,
}


def planes_of(family):
    if family.startswith("smollm3"):
        return lambda layer: ([], list(range(DIM))) if layer == 0 else HALF
    return lambda layer: PLANES.get(family, HALF)


def windows(n=6, tokens=24):
    return torch.randint(3, 64, (n, tokens), generator=torch.Generator().manual_seed(5))


def convert(source, target, groups, merge):
    """Write a converted checkpoint: `merge` gives the new tensors by name."""
    checkpoint = Checkpoint.open(source)
    structure = find_structure(checkpoint, groups)
    target.mkdir()
    new = merge(checkpoint, structure)
    assert all(tuple(new[name].shape) == structure.changed[name][1] for name in structure.changed)
    tensors = {
        name: new[name] if name in new else checkpoint.read(name) for name in checkpoint.tensors
    }
    assert all(
        tensors[n].shape == checkpoint.tensors[n].shape
        for n in tensors
        if n not in structure.changed
    )
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["num_key_value_heads"] = groups
    (target / "config.json").write_text(json.dumps(config))
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def calibrated(tmp_path, method="svd", recipe=None, text=None):
    scratch = tmp_path / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return lambda c, s: calibrate(
        c, s, method, windows() if text is None else text, scratch, recipe=recipe
    )


def mean(checkpoint, structure):
    found = {}
    for name in structure.changed:
        parts = parts_of(name, structure)
        heads = split(checkpoint.read(name), parts)
        rows = [
            h if p.kind == "query" else pool_heads(h, structure.new_kv_heads, "mean")
            for p, h in zip(parts, heads.values(), strict=True)
        ]
        found[name] = torch.cat([r.flatten(0, 1) for r in rows])
    return found


@torch.no_grad()
def logits(model):
    return model(windows(2, 30)).logits


def apart(one, other):
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_merge_is_lossless_for_heads_that_are_turned(tmp_path, family, groups):
    source = tmp_path / "source"
    model_of(family).save_pretrained(source)
    turn_heads(source, groups, planes_of(family))
    exact = logits(AutoModelForCausalLM.from_pretrained(source).eval())
    assert apart(logits(convert(source, tmp_path / "mean", groups, mean)), exact) > 0.03
    for method in ("align", "svd"):
        recipe = RECIPES["align"] if method == "align" else MERGE_ONLY
        merged = convert(source, tmp_path / method, groups, calibrated(tmp_path, recipe=recipe))
        assert apart(logits(merged), exact) < 1e-4, method
    fitted = convert(source, tmp_path / "fitted", groups, calibrated(tmp_path))
    assert apart(logits(fitted), exact) < 1e-3


def test_calibrated_merge_is_refused_with_the_reason(tmp_path):
    source = tmp_path / "source"
    model_of("llama").save_pretrained(source)
    checkpoint = Checkpoint.open(source)
    structure = find_structure(checkpoint, 2)
    with pytest.raises(ConversionError, match=r"token ids \[windows, tokens\], got \[3\]"):
        calibrate(checkpoint, structure, "svd", torch.arange(3), tmp_path)
    with pytest.raises(ConversionError, match="no tokenizer"):
        calibrate(checkpoint, structure, "svd", "lincoln_1862", tmp_path)
    with pytest.raises(ValueError, match="method"):
        calibrate(checkpoint, structure, "mean", windows(), tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_keys_behind_a_norm_stay_means_and_values_are_merged(tmp_path, family):
    source = tmp_path / "source"
    model_of(family).save_pretrained(source)
    exact = logits(AutoModelForCausalLM.from_pretrained(source).eval())
    pooled = convert(source, tmp_path / "mean", 2, mean)
    recipe = replace(RECIPES["svd"], regroup=False)
    found = convert(source, tmp_path / "svd", 2, calibrated(tmp_path, recipe=recipe))
    for one, other in zip(pooled.model.layers, found.model.layers, strict=True):
        assert torch.equal(one.self_attn.q_proj.weight, other.self_attn.q_proj.weight)
        torch.testing.assert_close(one.self_attn.k_proj.weight, other.self_attn.k_proj.weight)
        torch.testing.assert_close(one.self_attn.k_norm.weight, other.self_attn.k_norm.weight)
    assert (logits(found) - exact).square().mean() < 0.7 * (logits(pooled) - exact).square().mean()


def test_fits_bring_a_model_closer_than_the_merge_alone(tmp_path):
    source = tmp_path / "source"
    model_of("llama").save_pretrained(source)
    exact = logits(AutoModelForCausalLM.from_pretrained(source).eval())
    recipes = {
        "merge": MERGE_ONLY,
        "outputs": Recipe("svd", "svd", score_sweeps=0),
        "all": RECIPES["svd"],
    }
    off = {}
    for name, recipe in recipes.items():
        model = convert(
            source, tmp_path / name, 2, calibrated(tmp_path, recipe=recipe, text=windows(64, 30))
        )
        off[name] = float((logits(model) - exact).square().mean())
    off["mean"] = float(
        (logits(convert(source, tmp_path / "mean", 2, mean)) - exact).square().mean()
    )
    assert off["all"] < off["outputs"] < off["merge"] < off["mean"], off


def test_a_calibrated_layer_is_what_the_plain_model_computes(tmp_path):
    """The engine runs merged heads repeated: the error that it reports is that of the model which transformers loads."""
    source = tmp_path / "source"
    model_of("llama (all biases)").save_pretrained(source)
    rows = []
    checkpoint = Checkpoint.open(source)
    structure = find_structure(checkpoint, 2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    new = calibrate(checkpoint, structure, "svd", windows(), scratch, report=rows.append)
    converted = convert(source, tmp_path / "new", 2, lambda c, s: new)
    with torch.no_grad():
        one, other = (
            m(windows(), output_hidden_states=True).hidden_states
            for m in (AutoModelForCausalLM.from_pretrained(source).eval(), converted)
        )
    off = (other[1] - one[1]).square().sum(-1) / one[1].square().sum(-1)
    assert rows[0]["stream_error"] == pytest.approx(float(off.mean()), rel=1e-3)
    assert rows[0]["stream_error"] > 1e-4


def test_converter_writes_what_calibration_finds(tmp_path):
    source = tmp_path / "source"
    model_of("llama", vocab_size=300).to(torch.bfloat16).save_pretrained(source)
    make_tokenizer(300).save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("Four score and seven years ago our fathers brought forth a new nation. " * 30)
    report = kv_hf.convert_to_gqa(source, tmp_path / "new", 2, method="svd", calibration=str(text))
    assert sum("o_proj" in name for name in report.changed) == 2
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(info.values()), info
    before, after = (Checkpoint.open(folder) for folder in (source, tmp_path / "new"))
    for name in before.tensors:
        same = before.tensors[name].shape == after.tensors[name].shape and torch.equal(
            before.read(name), after.read(name)
        )
        assert same == ("self_attn" not in name), name
    assert model(windows()).logits.isfinite().all()
    assert not list(tmp_path.glob("*converting*"))


def test_the_model_writes_its_own_calibration_text(tmp_path):
    source = tmp_path / "source"
    model_of("llama", vocab_size=300, max_position_embeddings=32).save_pretrained(source)
    tokenizer = make_tokenizer(300)
    tokenizer.save_pretrained(source)
    checkpoint = Checkpoint.open(source)
    structure = find_structure(checkpoint, 2)
    state = torch.random.get_rng_state()
    found = calibration_windows(checkpoint, structure, "samples")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found.shape == (8192 // 32, 32)
    assert (found[:, 0] == tokenizer.bos_token_id).all()
    assert torch.equal(found, calibration_windows(checkpoint, structure, "samples"))
    assert len(found.unique(dim=0)) > 200
    tokenizer.bos_token = None
    tokenizer.save_pretrained(source)
    with pytest.raises(ConversionError, match="the tokenizer of .* has none"):
        calibration_windows(checkpoint, structure, "samples")


def spread(n, seed):
    """Return a positive semidefinite matrix of quickly falling eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, n)
    return x @ x.T


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_best_common_is_never_worse_than_other_merges(heads):
    gram = spread(heads * DIM, 1)
    readers = torch.stack([spread(DIM, 2 + g) for g in range(heads)])
    best = loss(gram, readers, *best_common(gram, readers))
    turned = loss(gram, readers, *procrustes_mean(gram, readers))
    assert best < turned
    assert best < loss(gram, readers, *plain_mean(readers))
    # nothing that random steps find is better
    down, up = best_common(gram, readers)
    for seed in range(20):
        torch.manual_seed(seed)
        other = up + 1e-3 * torch.randn_like(up), down + 1e-3 * torch.randn_like(down)
        assert loss(gram, readers, other[1], other[0]) >= best


def test_best_common_survives_heads_that_are_zero():
    gram = torch.zeros(2 * DIM, 2 * DIM, dtype=torch.float64)
    down, up = best_common(gram, torch.zeros(2, DIM, DIM, dtype=torch.float64))
    assert down.isfinite().all()
    assert up.isfinite().all()


def turned_scores(rotary, keys, queries, down, up):
    """Return E (q^T k - q'^T k')^2 over planes taken one by one, which is what merge_keys makes least."""
    m, dim = queries.shape[:2]
    total = 0.0
    for a, b in rotary.planes.tolist():
        pair = [a, b]
        left = torch.eye(m * dim, dtype=keys.dtype) - up.reshape(m * dim, dim)[:, pair] @ down[pair]
        error = (left @ keys @ left.T).reshape(m, dim, m, dim)
        for g in range(m):
            size = queries[g, a, a] + queries[g, b, b]
            total += float(size * (error[g, a, g, a] + error[g, b, g, b]))
    return total


def test_svd_of_keys_is_never_worse_than_mean_or_align():
    planes = torch.tensor([(i, i + DIM // 2) for i in range(DIM // 2)])
    rotary = Rotary(planes, torch.tensor([], dtype=torch.long), *[torch.zeros(1)] * 4)
    keys = spread(3 * DIM, 1)
    queries = torch.stack([spread(DIM, 5 + g) for g in range(3)])
    off = {
        how: turned_scores(rotary, keys, queries, *merge_keys(keys, queries, rotary, how))
        for how in ("mean", "align", "svd")
    }
    assert off["svd"] < off["align"] < off["mean"]


def test_fits_of_values_and_outputs_go_down_and_end_where_least_squares_ends():
    torch.manual_seed(0)
    heads, wide, dim, out = 4, 8, 4, 6
    group_of = torch.tensor([0, 0, 1, 1])
    moments = OutputMoments(heads, wide, out)
    contexts, target = torch.randn(500, heads, wide), torch.randn(500, out)
    target = target + contexts.flatten(1) @ torch.randn(heads * wide, out)
    moments.add(contexts, target)
    down = torch.randn(2, dim, wide, dtype=torch.float64)
    output = torch.randn(out, heads * dim, dtype=torch.float64)
    before = output_loss(moments, down, output, group_of)
    output = fit_outputs(moments, down, output, group_of, 0.0)
    between = output_loss(moments, down, output, group_of)
    features = torch.einsum("thw,hdw->thd", contexts.double(), down[group_of]).flatten(1)
    best = torch.linalg.lstsq(features, target.double()).solution.T
    torch.testing.assert_close(output, best, rtol=1e-4, atol=1e-5)
    down = fit_values(moments, down, output, group_of, 0.0, 60)
    assert output_loss(moments, down, output, group_of) < between < before
    again = fit_values(moments, down, output, group_of, 0.0, 60)
    torch.testing.assert_close(again, down, rtol=1e-3, atol=1e-4)


def test_groups_are_those_that_lose_least():
    generator = torch.Generator().manual_seed(3)
    alike = torch.tensor([0, 1, 2, 1, 0, 2])  # heads 0 and 4, 1 and 3, 2 and 5
    cost = 1 + torch.rand(6, 6, generator=generator, dtype=torch.float64)
    cost = (cost + cost.T) * (alike[:, None] != alike)
    assert choose_groups(cost, 3).tolist() == [0, 4, 1, 3, 2, 5]
    three = torch.tensor([0, 1, 1, 0, 1, 0])
    assert choose_groups(cost + 5 * (three[:, None] != three), 2).tolist() == [0, 3, 5, 1, 2, 4]


@pytest.mark.parametrize("family", ["llama", "gpt_oss (sinks, biases)"])
def test_heads_that_are_alike_are_merged_wherever_they_lie(tmp_path, family):
    """Heads 0 and 1 are turned copies of each other, and 2 and 3: moved apart, neighbours lose and regrouping does not."""
    source = tmp_path / "source"
    model_of(family).save_pretrained(source)
    turn_heads(source, 2, planes_of(family))
    tensors = {name: Checkpoint.open(source).read(name) for name in Checkpoint.open(source).tensors}
    order, per = torch.tensor([0, 2, 1, 3]), HEADS // KV
    heads = (order[:, None] * per + torch.arange(per)).flatten()
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("k_proj", "v_proj"):
            tensors[name] = tensor.unflatten(0, (KV, DIM))[order].flatten(0, 1)
        elif kind == "q_proj":
            tensors[name] = tensor.unflatten(0, (HEADS, DIM))[heads].flatten(0, 1)
        elif kind == "o_proj" and tensor.dim() == 2:
            tensors[name] = tensor.unflatten(1, (HEADS, DIM))[:, heads].flatten(1)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    exact = logits(AutoModelForCausalLM.from_pretrained(source).eval())
    off = {}
    for regroup in (False, True):
        recipe = replace(MERGE_ONLY, regroup=regroup)
        model = convert(source, tmp_path / str(regroup), 2, calibrated(tmp_path, recipe=recipe))
        off[regroup] = apart(logits(model), exact)
    assert off[False] > 0.03
    if family == "llama":
        assert off[True] < 1e-4
    else:  # sinks belong to query heads and cannot move
        assert off[True] == off[False]


def test_positions_that_rotate_no_planes_are_refused():
    angle = torch.arange(12)[:, None] * torch.tensor([1.0, 0.3])

    def mixed(kind, rows):
        return (
            rows.unflatten(-1, (-1, 4)).transpose(1, 2).cumsum(-1) * angle.cos().mean(-1)[:, None]
        )

    def mirrored(kind, rows):
        x = rows.unflatten(-1, (-1, 4)).transpose(1, 2)
        a, b = x[..., :2], x[..., 2:]
        c, s = angle.cos(), angle.sin()
        return torch.cat([a * c + b * s, a * s - b * c], -1)

    def one_head(kind, rows):
        x = rows.unflatten(-1, (-1, 4)).transpose(1, 2)
        return torch.cat([x[:, :1], 2 * x[:, 1:]], 1)

    heads = {"query": 2, "key": 2}
    for send, words in (
        (mixed, "mix 4 channels"),
        (mirrored, "do not rotate"),
        (one_head, "differently"),
    ):
        with pytest.raises(ConversionError, match=words):
            probe_rotary(send, 12, heads, 4, "model")
    assert (
        probe_rotary(
            lambda kind, rows: rows.unflatten(-1, (-1, 4)).transpose(1, 2).sign(),
            12,
            heads,
            4,
            "model",
        )
        is None
    )
