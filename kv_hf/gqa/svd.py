"""Merge heads by what they do on calibration tokens, layer by layer, and keep the new tensors on disk.

Two streams of hidden states run through the model: those of the original and those of the converted layers so far. Each layer
is solved on what the converted one will see, and fitted to give what the original gave. A converted layer is run as one with
the old number of heads, in which the merged ones are repeated: that is the same mathematics, and needs no second model.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from ..errors import ConversionError, first_line
from .keys import Rotary, Scores, fit_scores, merge_keys, probe_rotary
from .source import Source
from .stream import LayerStream, Seen
from .structure import Made, Part, Structure, join, split
from .values import choose_groups, merge_values, readers_of

SAMPLE = 8  # windows that groups are chosen on
MOVED = 1e-3  # that attention may change when heads change places: rounding, and no more
Heads = dict[str, torch.Tensor]  # kind -> [heads, rows, ..], biases as a last column of inputs


class Layer:
    """A loaded layer, with the weights of its attention by heads.

    Attributes:
        path: of the layer in the model.
        tensors: names in the model of the tensors with query, key, value and norm rows -> their parts.
        heads: kind -> float64 [heads, rows, inputs], with biases as one more input; "key_norm" [heads, rows]; "output"
            [heads, head_dim, outputs], where a linear layer gets the contexts as they are.
        attention: path of the attention module.
        output: path of that layer, or None where something lies between.
        kv_of: [heads], the old kv head of each query head.
        new_of: [old kv heads], the new kv head of each.
    """

    def __init__(self, stream: LayerStream, index: int, path: str, hidden: torch.Tensor) -> None:
        self.stream, self.index, self.path = stream, index, path
        self.structure = structure = stream.structure
        old, new, heads = structure.num_kv_heads, structure.new_kv_heads, structure.num_heads
        self.kv_of = torch.arange(heads) * old // heads
        self.new_of = torch.arange(old) * new // old
        self.tensors = self._find_tensors()
        self.places = {  # kind -> (path of the projection, first row)
            part.kind: (name.rpartition(".")[0], sum(p.heads * p.rows for p in parts[:i]))
            for name, parts in self.tensors.items()
            for i, part in enumerate(parts)
        }
        self.attention = self.places["key"][0].rpartition(".")[0]
        self.biased = {
            p.kind for n, parts in self.tensors.items() for p in parts if n.endswith("bias")
        }
        seen = self.observe(0, hidden)
        context = seen.context.flatten(1)
        self.output = next(
            (p for p, (x, _) in seen.linears.items() if torch.equal(x, context)), None
        )
        self.heads = self._read()
        place, first = self.places["value"]
        rows = seen.linears[place][1][:, first:].unflatten(1, (old, -1))  # the last ones
        self.free_values = self.output is not None and torch.equal(rows.transpose(0, 1), seen.value)
        counts = {"query": heads, "key": old}
        self.rotary = probe_rotary(self._sender(hidden), len(hidden), counts, seen.key.shape[-1])
        if self.rotary is None and not self.free_values:
            raise ConversionError(
                f"{path!r} has a norm behind its keys, and something else than a projection behind attention (a gate?): a "
                'calibrated merge would be the mean; use method="mean"'
            )

    def _find_tensors(self) -> dict[str, tuple[Part, ...]]:
        """Return the tensors with heads' rows, weights before biases. Raises ConversionError where they cannot be calibrated."""
        structure, on_disk = self.structure, self.structure.names.on_disk
        kind = structure.config.model_type
        found = {
            own: structure.parts[on_disk[own]]
            for own in self.stream.names
            if own.startswith(f"{self.path}.")
        }
        every = [part for parts in found.values() for part in parts]
        if any(part.interleaved for part in every):
            raise ConversionError(
                f"{kind} keeps a head's query, key and value together, and goes to one kv head only; it cannot be calibrated, "
                'use method="mean"'
            )
        if not any(part.kind == "query" for part in every):
            keys = next(name for name, (part, *_) in found.items() if part.kind == "key")
            for name in (f"{keys.rsplit('.', 2)[0]}.q_proj.{leaf}" for leaf in ("weight", "bias")):
                if name in on_disk:
                    found[name] = (Part("query", structure.num_heads, structure.head_dim),)
        return {name: found[name] for name in sorted(found, reverse=True)}

    def _read(self) -> Heads:
        found: Heads = {}
        for name, parts in self.tensors.items():
            for kind, rows in split(self.stream.model.get_parameter(name).double(), parts).items():
                bias = name.endswith("bias")
                found[kind] = torch.cat([found[kind], rows[..., None]], -1) if bias else rows
        if self.output is not None:
            weight = self.stream.model.get_submodule(self.output).weight.double()
            found["output"] = weight.T.unflatten(0, (len(self.kv_of), -1))
        return found

    def tensor(self, name: str, heads: Heads) -> torch.Tensor:
        """Return a tensor of the model, [rows, columns] or a bias [rows], made of heads."""
        rows = dict(heads)
        for kind in self.biased:
            rows[kind] = heads[kind][..., -1] if name.endswith("bias") else heads[kind][..., :-1]
        return join(rows, self.tensors[name])

    def write(self) -> None:
        """Put the heads into the model, merged ones repeated for each old head that they stand for."""
        repeated = {
            kind: rows[self.new_of] if len(rows) < len(self.new_of) else rows
            for kind, rows in self.heads.items()
        }
        for name in self.tensors:
            self.stream.model.get_parameter(name).data = self.tensor(name, repeated).float()
        if self.output is not None:
            weight = self.heads["output"].flatten(0, 1).T
            self.stream.model.get_submodule(self.output).weight.data = weight.float()

    def results(self) -> dict[str, torch.Tensor]:
        """Return names on disk -> new tensors [new shapes], float32."""
        on_disk = self.structure.names.on_disk
        found = {on_disk[name]: self.tensor(name, self.heads) for name in self.tensors}
        if self.free_values:
            found[on_disk[f"{self.output}.weight"]] = self.heads["output"].flatten(0, 1).T
        return {name: tensor.float().contiguous() for name, tensor in found.items()}

    def observe(self, window: int, hidden: torch.Tensor) -> Seen:
        """Run the layer on a window's hidden states [tokens, hidden]."""
        return self.stream.observe(self.index, window, hidden, self.attention)

    def _sender(self, hidden: torch.Tensor) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return a function that puts rows in place of a projection's and returns attention's input made of them."""

        def send(kind: str, rows: torch.Tensor) -> torch.Tensor:
            place, first = self.places[kind]

            def put(path: str, output: torch.Tensor) -> torch.Tensor:
                if path != place:
                    return output
                changed = output.clone()
                changed[0, :, first : first + rows.shape[1]] = rows
                return changed

            seen = self.stream.observe(self.index, 0, hidden, self.attention, put)
            return seen.query if kind == "query" else seen.key

        return send

    def pool(self, *kinds: str) -> None:
        """Replace the heads of each group by their mean."""
        for kind in kinds:
            if kind in self.heads:
                groups = self.heads[kind].unflatten(0, (self.structure.new_kv_heads, -1))
                self.heads[kind] = groups.mean(1)

    def through(self, kind: str, down: torch.Tensor) -> None:
        """Replace the heads of a kind by maps [groups, dim, m * dim] of each group's."""
        rows = self.heads[kind].unflatten(0, (len(down), -1)).flatten(1, 2)
        self.heads[kind] = down @ rows

    def regroup(self, converted: torch.Tensor) -> None:
        """Put heads that are alike beside each other: the layer computes the same, in another order.

        Args:
            converted: what the converted layers before give it, [texts, tokens, hidden].
        """
        seen = [self.observe(i, hidden).value for i, hidden in enumerate(converted[:SAMPLE])]
        values = torch.cat([value.transpose(0, 1).flatten(1) for value in seen])
        readers = readers_of(self.heads["output"], self.kv_of)
        groups = self.structure.new_kv_heads
        order = choose_groups((values.T @ values).double(), readers, groups)
        per = len(self.kv_of) // len(order)
        heads = (order[:, None] * per + torch.arange(per)).flatten()
        kept, before = self.heads, self.observe(0, converted[0])
        self.heads = {
            kind: rows if len(rows) == 1 else rows[heads if kind in ("query", "output") else order]
            for kind, rows in kept.items()
        }
        self.write()
        after = self.observe(0, converted[0])
        moved = (after.context - before.context[:, heads]).norm() / before.context.norm()
        if moved > MOVED:
            self.heads = kept  # something else in this layer belongs to heads, such as sinks
            self.write()

    def scores(self, seen: Seen, now: Seen) -> Scores:
        """Return what the scores of a window are fitted on: the original's, and what the converted stream projects."""
        inputs = now.linears[self.places["key"][0]][0]
        ones = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
        return Scores(ones, seen.query, seen.key[self.kv_of], seen.weights, now.query, now.key)

    def merge_keys(self, rotary: Rotary, windows: list[Scores]) -> None:
        """Merge keys by the converted stream's queries and keys, and fit both to the original's scores."""
        keys = torch.cat([seen.now_key.transpose(0, 1).flatten(1) for seen in windows])
        gram = (keys.T @ keys).double() / len(keys)
        squares = torch.stack([seen.now_query.mT @ seen.now_query for seen in windows])
        queries = gram.new_zeros(len(self.new_of), *squares.shape[2:])
        queries.index_add_(0, self.kv_of, squares.double().sum(0) / len(keys))
        groups = self.structure.new_kv_heads
        blocks = gram.reshape(groups, len(gram) // groups, groups, -1)
        of_group = queries.unflatten(0, (groups, -1))
        merged = [merge_keys(blocks[g, :, g], of_group[g], rotary) for g in range(groups)]
        down, up = (torch.stack(maps) for maps in zip(*merged, strict=True))
        self.through("key", down)
        self.heads["query"] = up.flatten(0, 1)[self.kv_of].mT @ self.heads["query"]
        fitted = {kind: self.heads[kind].float() for kind in ("query", "key")}
        for kind in ("query", "key", "query"):
            fitted[kind] = fit_scores(windows, rotary, kind, fitted, self.new_of[self.kv_of])
        self.heads |= {kind: rows.double() for kind, rows in fitted.items()}

    def merge_values(self, targets: list[torch.Tensor], converted: torch.Tensor) -> None:
        """Merge values, and fit them and the outputs to what the original's attention put out, [tokens, outputs] each."""
        windows = []
        for i, target in enumerate(targets):
            seen = self.observe(i, converted[i])
            groups = seen.value.unflatten(0, (self.structure.new_kv_heads, -1))
            stacked = groups.transpose(1, 2).flatten(2)[self.new_of[self.kv_of]]
            windows.append((seen.weights @ stacked, target))
        merged = merge_values(windows, self.heads["output"], self.kv_of, self.new_of)
        if merged is None:
            self.pool("value")
        else:
            self.through("value", merged[0])
            self.heads["output"] = merged[1]


def merge_layer(layer: Layer, original: torch.Tensor, converted: torch.Tensor) -> None:
    """Merge the heads of a layer, and move both streams [windows, tokens, hidden] behind it."""
    if layer.structure.new_kv_heads > 1 and layer.free_values:
        layer.regroup(converted)
    scores: list[Scores] = []
    targets: list[torch.Tensor] = []
    for i in range(len(original)):
        seen = layer.observe(i, original[i])
        if layer.output is not None:
            bias = layer.stream.model.get_submodule(layer.output).bias
            target = seen.linears[layer.output][1]
            targets.append(target if bias is None else target - bias)
        if layer.rotary is not None:
            scores.append(layer.scores(seen, layer.observe(i, converted[i])))
        original[i] = seen.hidden
    if layer.rotary is None:
        layer.pool("key", "key_norm")
    else:
        layer.merge_keys(layer.rotary, scores)
    scores.clear()  # the probabilities of all windows, and more, that values do not need
    layer.write()
    if layer.free_values:
        layer.merge_values(targets, converted)
    else:
        layer.pool("value")
    layer.write()
    for i, hidden in enumerate(converted):
        converted[i] = layer.stream.run(layer.index, i, hidden)


@torch.no_grad()
def calibrate(source: Source, structure: Structure, windows: torch.Tensor, scratch: Path) -> Made:
    """Write all tensors that a calibrated merge changes, in float32 and of their new shapes; return how they are read.

    Args:
        windows: token ids [windows, tokens], int64: several thousand in all.
        scratch: an existing folder; gets one safetensors file per layer.
    Raises: ConversionError for models that cannot be calibrated, with the reason, and where numbers are not finite; OSError
        where `scratch` cannot be written.
    """
    stream = LayerStream(source, structure)
    original = stream.embed(windows)
    converted = original.clone()
    made: Made = {}
    for index in tqdm(range(len(stream.layers)), desc="merging", unit="layer", disable=None):
        with stream.loaded(index) as path:
            tensors: dict[str, torch.Tensor] = {}
            if any(own.startswith(f"{path}.") for own in stream.names):
                layer = Layer(stream, index, path, original[0])
                try:
                    merge_layer(layer, original, converted)
                except torch.linalg.LinAlgError as error:
                    why = f"numbers too large or not finite ({first_line(error)})"
                    raise ConversionError(f"{path!r} cannot be merged: {why}") from error
                tensors = layer.results()
            else:
                for stream_of in (original, converted):
                    for i, hidden in enumerate(stream_of):
                        stream_of[i] = stream.run(index, i, hidden)
        for found in (original, converted, *tensors.values()):
            if not found.isfinite().all():
                raise ConversionError(
                    f"{path!r}: hidden states of the calibration text, or new weights, are not finite there (weights that are "
                    "not, or numbers too large for float32)"
                )
        if tensors:
            file = scratch / f"layer-{index:05d}.safetensors"
            save_file(tensors, file)
            made |= {name: ((name,), partial(_read, file, name)) for name in tensors}
    return made


def _read(file: Path, name: str, old: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a file, in place of the old one."""
    with safe_open(file, "pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found
