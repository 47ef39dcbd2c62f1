"""Calibrated merges of kv heads: lossless where heads are equal up to what the method may undo, and best in their own terms."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kv_hf.gqa.calibrated import calibrate
from kv_hf.gqa.checkpoint import Checkpoint
from kv_hf.gqa.layouts import parts_of, split
from kv_hf.gqa.pooling import pool_heads
from kv_hf.gqa.recipe import RECIPES, Recipe
from kv_hf.gqa.structure import find_structure

DIM, HEADS, KV = 8, 8, 4
MERGE_ONLY = Recipe("svd", "svd", score_sweeps=0, output_sweeps=0, refit=False)
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
    options = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=DIM,
        vocab_size=64, intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
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


def turn_heads(folder, groups, planes=None):
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
        values = torch.stack([torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0] for _ in range(KV)])
        angles = torch.rand(KV, DIM, generator=generator) * 6
        keys = torch.stack([plane_map(a, planes(layer)) for a in angles])
        for n in names:
            for kind, turns in (("key", keys), ("value", values)):
                if kind in found[n]:
                    heads = found[n][kind]
                    first = heads[::m].repeat_interleave(m, 0)
                    found[n][kind] = torch.einsum("gde,ge...->gd...", turns, first)
            if "query" in found[n]:
                found[n]["query"] = torch.einsum("hde,he...->hd...", keys.repeat_interleave(per, 0), found[n]["query"])
            tensors[n] = torch.cat([found[n][p.kind].flatten(0, 1) for p in parts_of(n, structure)])
        for leaf in ("weight", "bias"):
            name = f"{base}.q_proj.{leaf}"
            if name in tensors:
                heads = tensors[name].unflatten(0, (HEADS, DIM))
                tensors[name] = torch.einsum("hde,he...->hd...", keys.repeat_interleave(per, 0), heads).flatten(0, 1)
        output = next(f"{base}.{n}.weight" for n in ("o_proj", "dense") if f"{base}.{n}.weight" in tensors)
        heads = tensors[output].unflatten(1, (HEADS, DIM))
        tensors[output] = torch.einsum("ohe,hde->ohd", heads, values.repeat_interleave(per, 0)).flatten(1)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


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
    tensors = {name: new[name] if name in new else checkpoint.read(name) for name in checkpoint.tensors}
    assert all(tensors[n].shape == checkpoint.tensors[n].shape for n in tensors if n not in structure.changed)
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
    return lambda c, s: calibrate(c, s, method, windows() if text is None else text, scratch, recipe=recipe)


def mean(checkpoint, structure):
    found = {}
    for name in structure.changed:
        parts = parts_of(name, structure)
        heads = split(checkpoint.read(name), parts)
        rows = [h if p.kind == "query" else pool_heads(h, structure.new_kv_heads, "mean") for p, h in zip(parts, heads.values(), strict=True)]
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
