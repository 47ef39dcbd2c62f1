"""Merge heads by what they do on calibration tokens, layer by layer, and keep the new tensors on disk.

Two streams of hidden states run through the model: those of the original and those of the converted layers so far. Each layer
is solved on what the converted one will see, and its outputs are fitted to give what the original gave and to make up for
what the streams have come apart.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import ConversionError
from .checkpoint import Checkpoint
from .layer_data import Seen, is_residual, passes_values, run_seen, sender
from .merge_keys import merge_keys
from .projections import Heads, Projections, find_output, find_projections
from .refit_outputs import OutputMoments, fit_outputs, fit_values, output_loss
from .refit_scores import ScoreData, fit_keys, fit_queries, score_loss
from .rotary import Rotary, probe_rotary
from .shared_rank import best_common, plain_mean, procrustes_mean
from .stream import LayerStream
from .structure import Structure, disk_name

METHODS = ("align", "svd")


@dataclass(frozen=True)
class Recipe:
    """How a method merges; ablations change its fields.

    Attributes:
        keys, values: "mean", "align" or "svd".
        refit: fit outputs.
        sweeps: rounds of fitting values and outputs in turn.
        score_sweeps: rounds of fitting queries and keys in turn.
        carry: have outputs make up for the distance between the streams.
        ridge: weight of the pull to the merged weights.
    """

    keys: str
    values: str
    refit: bool = True
    sweeps: int = 3
    score_sweeps: int = 2
    steps: int = 8
    carry: bool = True
    ridge: float = 0.03
    score_ridge: float = 0.01
    value_ridge: float = 1e-3
    importance: bool = True
    own_targets: bool = False


RECIPES = {
    "align": Recipe("align", "align", refit=False, sweeps=0, score_sweeps=0),
    "svd": Recipe("svd", "svd"),
}


class Overrides(Mapping[str, torch.Tensor]):
    """New tensors by their names on disk, read from the files of a folder when they are asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@torch.no_grad()
def calibrate(
    checkpoint: Checkpoint,
    structure: Structure,
    method: str,
    windows: torch.Tensor,
    scratch: Path,
    *,
    recipe: Recipe | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
    report: Callable[[dict[str, float]], object] = lambda row: None,
) -> Overrides:
    """Return all tensors that a calibrated merge changes, in float32 and of their new shapes.

    Args:
        method: "align" or "svd".
        windows: [n, tokens], int64: token ids to calibrate on.
        scratch: an existing folder; gets one safetensors file per layer.
        progress: called with (layers done, layers).
        report: called with the figures of each layer.
    Raises: ConversionError for models that cannot be calibrated, with the reason.
    """
    recipe = RECIPES[method] if recipe is None else recipe
    if windows.dim() != 2 or not windows.numel():
        raise ConversionError(f"windows must be [n, tokens], got {list(windows.shape)}")
    stream = LayerStream(checkpoint, structure)
    first = stream.embed(windows)
    streams = [first, first.clone()]  # of the original and of the converted layers
    files: dict[str, Path] = {}
    for index in range(stream.count):
        path = f"{stream.path}.{index}"
        changed = any(name.startswith(path + ".") for name in stream.own_names())
        with stream.layer(index):
            if changed:
                merged, places, row = merge_layer(stream, index, streams, recipe)
                file = scratch / f"layer-{index:05d}.safetensors"
                tensors = {name: t.float().contiguous() for name, t in merged.items()}
                save_file(tensors, file)
                files.update(dict.fromkeys(tensors, file))
                report({"layer": index, **row})
            else:
                for states in streams:
                    for i in range(len(states)):
                        states[i] = stream.run(index, states[i][None])[0]
        progress(index + 1, stream.count)
    return Overrides(files)


def merge_layer(
    stream: LayerStream, index: int, streams: list[torch.Tensor], recipe: Recipe
) -> tuple[dict[str, torch.Tensor], Projections, dict[str, float]]:
    """Merge one loaded layer and move both streams behind it; return new tensors by name on disk."""
    structure, model = stream.structure, stream.model
    original, converted = streams
    places = find_projections(structure, model, f"{stream.path}.{index}")
    context: list[torch.Tensor] = []

    def once() -> None:
        seen = run_seen(stream, index, places, original[:1])
        context.append(seen.tap.context)

    once()
    places.output = find_output(model, places.attention, context[0], once)
    rotary, free_values = _linear(stream, index, places, original[:1])
    weights = places.read(model)
    groups = structure.new_kv_heads
    members = torch.arange(structure.num_heads) // (structure.num_heads // structure.num_kv_heads)
    new_of_old = torch.arange(structure.num_kv_heads) // (structure.num_kv_heads // groups)
    group_of = new_of_old[members]
    carry = recipe.carry and is_residual(stream, index, places, original[:1])

    same = torch.equal(original, converted)
    targets, befores, nows = [], [], []
    for i in range(len(original)):
        seen = run_seen(stream, index, places, original[i : i + 1])
        now = seen if same else run_seen(stream, index, places, converted[i : i + 1], short=places.output is not None)
        target = seen.output
        if target is not None and carry:
            target = target + original[i] - converted[i]
        original[i] = seen.hidden[0]  # type: ignore[index]
        targets.append(target)
        befores.append(_slim(seen))
        nows.append(_slim(now))
    row: dict[str, float] = {}
    if recipe.own_targets:
        befores = nows

    # keys and queries
    if rotary is None or recipe.keys == "mean":
        for leaf in weights.values():
            for kind in ("key", "key_norm"):
                if kind in leaf:
                    leaf[kind] = leaf[kind].reshape(groups, -1, *leaf[kind].shape[1:]).mean(1)
    else:
        _merge_group_keys(weights, nows, rotary, recipe.keys, members, groups)
        if recipe.score_sweeps:
            row |= _fit_scores(weights, befores, nows, rotary, recipe, members, group_of)

    # values and outputs
    output = None
    if places.output is None or not free_values:
        for leaf in weights.values():
            if "value" in leaf:
                leaf["value"] = leaf["value"].reshape(groups, -1, *leaf["value"].shape[1:]).mean(1)
        stay = {which: {**leaf} for which, leaf in weights.items()}
        places.write(model, stay, new_of_old)
    else:
        module = model.get_submodule(places.output)
        keep = dict(weights["weight"]), dict(weights["bias"])
        olds = {which: {**leaf, "value": leaf["value"][::1]} for which, leaf in weights.items() if "value" in leaf}
        # attention with the new keys and the old values: what the values' maps will be read through
        for which in weights:
            if "value" in weights[which]:
                full = {**weights[which]}
                weights_value = full["value"]
        _write_keys(places, model, weights, new_of_old)
        moments = None
        bias = module.bias
        for i in range(len(converted)):
            tap = run_seen(stream, index, places, converted[i : i + 1], short=True).tap
            stacked = _contexts(tap.weights[0], tap.value[0], members, group_of, groups)
            goal = targets[i] if bias is None else targets[i] - bias
            if moments is None:
                moments = OutputMoments(stacked.shape[1], stacked.shape[2], goal.shape[-1])
            moments.add(stacked, goal)
        old = module.weight.detach().double()
        down, new = _merge_values(moments, nows, old, members, groups, recipe)
        row["output_loss_merged"] = output_loss(moments, down, new, group_of)
        if recipe.refit:
            for _ in range(recipe.sweeps):
                new = fit_outputs(moments, down, new, group_of, recipe.value_ridge)
                down = fit_values(moments, down, new, group_of, recipe.value_ridge, 20)
            new = fit_outputs(moments, down, new, group_of, recipe.ridge)
            row["output_loss"] = output_loss(moments, down, new, group_of)
        for leaf in weights.values():
            if "value" in leaf:
                value = leaf["value"]
                m = structure.num_kv_heads // groups
                stacked_rows = value.reshape(groups, m * value.shape[1], *value.shape[2:])
                leaf["value"] = torch.einsum("gdw,gw...->gd...", down, stacked_rows)
        places.write(model, weights, new_of_old)
        module.weight.data = new.float()
    for i in range(len(converted)):
        converted[i] = stream.run(index, converted[i : i + 1])[0]
    row["stream_error"] = float((converted - original).double().square().sum() / original.double().square().sum())
    found = places.on_disk(weights)
    if places.output is not None and free_values:
        found[disk_name(places.output + ".weight", structure.prefix)] = module.weight.detach()
    return found, places, row


def _slim(seen: Seen) -> Seen:
    """Forget the probabilities' mask and what else is large and not needed."""
    return replace(seen, hidden=None)


def _linear(stream: LayerStream, index: int, places: Projections, hidden: torch.Tensor) -> tuple[Rotary | None, bool]:
    """Return how keys are turned (None: they are not linear in their projection), and whether values pass unchanged."""
    structure = stream.structure
    send = sender(stream, index, places, hidden)
    tokens = hidden.shape[1]
    name = type(stream.model).__name__
    heads = {"query": structure.num_heads, "key": structure.num_kv_heads}
    tap = run_seen(stream, index, places, hidden, short=True).tap
    rotary = probe_rotary(send, tokens, heads, tap.key.shape[-1], name)
    return rotary, passes_values(send, structure.num_kv_heads, tap.value.shape[-1], tokens)


def _write_keys(places: Projections, model: torch.nn.Module, weights: dict[str, Heads], new_of_old: torch.Tensor) -> None:
    """Write merged queries and keys beside the old values."""
    class _All(dict):  # type: ignore[type-arg]
        pass
    for name, parts in places.tensors.items():
        which = name.rpartition(".")[2]
        rows = []
        for part in parts:
            held = weights[which][part.kind]
            rows.append((held if part.kind in ("query", "value") else held[new_of_old]).flatten(0, 1))
        weight = model.get_parameter(name)
        weight.data = torch.cat(rows).to(weight.dtype)


def _contexts(p: torch.Tensor, value: torch.Tensor, members: torch.Tensor, group_of: torch.Tensor, groups: int) -> torch.Tensor:
    """Return every head's context of all old values of its group: [tokens, heads, m * dim]."""
    kv, tokens, dim = value.shape
    stacked = value.reshape(groups, kv // groups, tokens, dim).transpose(1, 2).flatten(2)  # [groups, tokens, m * dim]
    return (p @ stacked[group_of]).transpose(0, 1)


def _merge_group_keys(
    weights: dict[str, Heads], seen: list[Seen], rotary: Rotary, method: str, members: torch.Tensor, groups: int
) -> None:
    kv = int(members.max()) + 1
    m = kv // groups
    dim = seen[0].tap.key.shape[-1]
    gram = torch.zeros(kv * dim, kv * dim, dtype=torch.float64)
    queries = torch.zeros(kv, dim, dim, dtype=torch.float64)
    for one in seen:
        flat = one.tap.key[0].transpose(0, 1).flatten(1)
        gram += (flat.T @ flat).double()
        each = torch.einsum("htd,hte->hde", one.tap.query[0], one.tap.query[0]).double()
        queries.index_add_(0, members, each)
    count = sum(one.tap.key.shape[2] for one in seen)
    gram, queries = gram / count, queries / count
    ups, downs = [], []
    for g in range(groups):
        rows = slice(g * m * dim, (g + 1) * m * dim)
        down, up = merge_keys(gram[rows, rows], queries[g * m : (g + 1) * m], rotary, method)
        downs.append(down)
        ups.append(up)
    down, up = torch.stack(downs), torch.cat(ups)
    for leaf in weights.values():
        if "key" in leaf:
            rows_ = leaf["key"].reshape(groups, m * dim, *leaf["key"].shape[2:])
            leaf["key"] = torch.einsum("gdw,gw...->gd...", down, rows_)
        if "query" in leaf:
            leaf["query"] = torch.einsum("hed,he...->hd...", up[members], leaf["query"])


def _fit_scores(
    weights: dict[str, Heads], befores: list[Seen], nows: list[Seen], rotary: Rotary, recipe: Recipe,
    members: torch.Tensor, group_of: torch.Tensor,
) -> dict[str, float]:  # fmt: skip
    inputs = torch.stack([one.inputs for one in nows]).float()
    bias = {kind: kind in weights["bias"] for kind in ("query", "key")}
    importance = torch.stack([torch.ones(one.tap.weights.shape[1:3]) for one in befores])
    data = ScoreData(
        torch.cat([inputs, torch.ones(*inputs.shape[:2], 1)], -1) if any(bias.values()) else inputs,
        torch.stack([one.tap.query[0] for one in befores]), torch.stack([one.tap.key[0] for one in befores]),
        torch.stack([one.tap.weights[0] for one in befores]), importance, members, group_of, rotary,
        befores[0].tap.scaling,
    )  # fmt: skip
    def packed(kind: str) -> torch.Tensor:
        weight = weights["weight"][kind].float()
        if any(bias.values()):
            b = weights["bias"][kind].float() if bias[kind] else torch.zeros(weight.shape[:2])
            weight = torch.cat([weight, b[..., None]], -1)
        return weight
    query, key = packed("query"), packed("key")
    row = {"score_loss_merged": score_loss(data, query, key)}
    for _ in range(recipe.score_sweeps):
        query = fit_queries(data, query, key, recipe.score_ridge, recipe.steps)
        key = fit_keys(data, query, key, recipe.score_ridge, recipe.steps)
    query = fit_queries(data, query, key, recipe.score_ridge, recipe.steps)
    row["score_loss"] = score_loss(data, query, key)
    for kind, fitted in (("query", query), ("key", key)):
        if any(bias.values()):
            if bias[kind]:
                weights["bias"][kind] = fitted[..., -1].double()
            fitted = fitted[..., :-1]
        weights["weight"][kind] = fitted.double()
    return row


def _merge_values(
    moments: OutputMoments, seen: list[Seen], output: torch.Tensor, members: torch.Tensor, groups: int, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values' maps [groups, dim, m * dim] and outputs [out, heads * dim]."""
    heads, kv = len(members), int(members.max()) + 1
    m = kv // groups
    dim = output.shape[1] // heads
    each = output.reshape(-1, heads, dim)
    readers = torch.zeros(kv, dim, dim, dtype=torch.float64)
    readers.index_add_(0, members, torch.einsum("ohd,ohe->hde", each, each))
    wide = m * dim
    gram = torch.zeros(groups, wide, wide, dtype=torch.float64)
    blocks = moments.contexts.reshape(heads, wide, heads, wide)
    for h in range(heads):
        gram[int(members[h]) // m] += blocks[h, :, h] / moments.count
    downs, ups = [], []
    for g in range(groups):
        own = readers[g * m : (g + 1) * m]
        solve = {"svd": best_common, "align": procrustes_mean}.get(recipe.values)
        down, up = solve(gram[g], own) if solve else plain_mean(own)
        downs.append(down)
        ups.append(up)
    up = torch.cat(ups)
    new = torch.einsum("ohd,hde->ohe", each, up[members])
    return torch.stack(downs), new.flatten(1)
