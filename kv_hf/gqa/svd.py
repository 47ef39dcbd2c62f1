"""Merge heads by what they do on calibration tokens, layer by layer, and keep the new tensors on disk.

Two streams of hidden states run through the model: those of the original and those of the converted layers so far. Each layer
is solved on what the converted one will see, and its outputs are fitted to give what the original gave and to make up for
what the streams have come apart. A converted layer is run as one with the old number of heads, in which the merged ones are
repeated: that is the same mathematics, and needs no second model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..errors import ConversionError, first_line
from .heads import Part, join, parts_of, split
from .keys import Rotary, ScoreData, Send, fit_scores, merge_keys, probe_rotary
from .source import Source
from .stream import Enough, LayerStream, Tap, looking, take
from .structure import Structure
from .values import choose_groups, merge_values, pair_costs

FINE = 1e-3  # level of a token whose hidden state is far smaller than others', as a part of their median
SAMPLE = 8  # windows that groups are chosen on
MOVED = 1e-3  # that a token's attention may change when heads change places: rounding, and no more
Heads = dict[str, torch.Tensor]  # kind -> [heads, rows, ..]


@dataclass
class Projections:
    """The sources of queries, keys, values and outputs of one attention layer.

    Attributes:
        attention: path of the attention module in the model.
        tensors: names in the model of the tensors with query, key, value and norm rows -> their parts.
        output: path of the linear layer behind attention, or None where something lies between.
    """

    attention: str
    tensors: dict[str, tuple[Part, ...]]
    output: str | None = None
    structure: Structure = field(repr=False, default=None)  # type: ignore[assignment]

    def modules(self, kind: str) -> tuple[str, int]:
        """Return (path of the module, first row) of the rows of a kind."""
        for name, parts in self.tensors.items():
            row = 0
            for part in parts:
                if part.kind == kind and name.endswith(".weight"):
                    return name.removesuffix(".weight"), row
                row += part.heads * part.rows
        raise KeyError(kind)

    def read(self, model: nn.Module) -> dict[str, Heads]:
        """Return {"weight": kind -> [heads, rows, inputs], "bias": kind -> [heads, rows]} of a loaded layer, in float64."""
        found: dict[str, Heads] = {"weight": {}, "bias": {}}
        for name, parts in self.tensors.items():
            which = name.rpartition(".")[2]
            found[which].update(split(model.get_parameter(name).detach().double(), parts))
        return found

    def write(
        self,
        model: nn.Module,
        heads: Mapping[str, Heads],
        merged: Sequence[str],
        new_of: torch.Tensor,
    ) -> None:
        """Put heads into a loaded layer, each of the kinds `merged` repeated for the old heads that it stands for.

        Args:
            new_of: [num_kv_heads], the new kv head of each old one.
        """
        for name, parts in self.tensors.items():
            which = name.rpartition(".")[2]
            rows = {
                part.kind: heads[which][part.kind][new_of]
                if part.kind in merged
                else heads[which][part.kind]
                for part in parts
            }
            weight = model.get_parameter(name)
            weight.data = join(rows, parts).to(weight.dtype)

    def on_disk(self, merged: Mapping[str, Heads]) -> dict[str, torch.Tensor]:
        """Return names on disk -> tensors [rows of the new heads, ..]."""
        found = {}
        for name, parts in self.tensors.items():
            which = name.rpartition(".")[2]
            found[self.structure.names.on_disk[name]] = join(merged[which], parts)
        return found


def find_projections(structure: Structure, model: nn.Module, layer: str) -> Projections:
    """Return the projections of a layer (its path), but for the output's, which `find_output` finds while it runs.

    Raises: ConversionError where the queries cannot be found.
    """
    tensors: dict[str, tuple[Part, ...]] = {}
    if structure.removed:
        raise ConversionError(
            f"{structure.config.model_type} has norms of its own for every kv head, so that it cannot be calibrated; use "
            'method="mean"'
        )
    for own, name in structure.names.on_disk.items():
        if name in structure.changed and own.startswith(layer + "."):
            tensors[own] = parts_of(name, structure)
            if tensors[own][0].interleaved:
                raise ConversionError(
                    f"{structure.config.model_type} keeps a head's query, key and value together, and goes to one kv head only; "
                    'it cannot be calibrated, use method="mean"'
                )
    keys = [name for name, parts in tensors.items() if any(part.kind == "key" for part in parts)]
    if not keys:
        raise ConversionError(f"layer {layer!r} has no keys")
    attention = keys[0].rsplit(".", 2)[0]
    if not any(part.kind == "query" for parts in tensors.values() for part in parts):
        for leaf in ("weight", "bias"):
            name = f"{attention}.q_proj.{leaf}"
            if name in structure.names.on_disk:
                rows = model.get_parameter(name).shape[0] // structure.num_heads
                tensors[name] = (Part("query", structure.num_heads, rows),)
        if f"{attention}.q_proj.weight" not in tensors:
            raise ConversionError(
                f"{structure.config.model_type}: the queries of {attention!r} cannot be found"
            )
    return Projections(attention, tensors, None, structure)


def find_output(model: nn.Module, attention: str, run: Callable[[], Tap]) -> str | None:
    """Return the path of the linear layer that gets what attention gives, unchanged; None where there is none.

    Args:
        run: runs the layer and returns what attention saw.
    """
    got: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, args: got.update({name: args[0]})

    linears = [
        (f"{attention}.{name}", module)
        for name, module in model.get_submodule(attention).named_modules()
        if isinstance(module, nn.Linear)
    ]
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears]
    try:
        context = run().context.flatten(2)
    finally:
        for handle in handles:
            handle.remove()
    same = [n for n, t in got.items() if t.shape == context.shape and torch.equal(t, context)]
    return same[0] if same else None


@dataclass
class Seen:
    """One run of a layer on one window.

    Attributes:
        inputs: [tokens, hidden], what the key projection got.
        tap: what attention got and gave.
        output: [tokens, hidden], what the output projection gave; None in runs that end before it.
        hidden: [1, tokens, hidden], behind the layer; None in such runs.
    """

    inputs: torch.Tensor
    tap: Tap
    output: torch.Tensor | None
    hidden: torch.Tensor | None

    def only(self, *parts: str) -> "Seen":
        """Return it with these of inputs, query, key, value and weights, and nothing else: many are kept at once."""
        none = torch.empty(0)
        dropped = {
            part: none
            for part in ("query", "key", "value", "weights", "context")
            if part not in parts
        }
        inputs = self.inputs if "inputs" in parts else none
        return Seen(inputs, replace(self.tap, **dropped), None, None)  # type: ignore[arg-type]


def run_seen(
    stream: LayerStream, index: int, places: Projections, hidden: torch.Tensor, short: bool = False
) -> Seen:
    """Run a loaded layer on [1, tokens, hidden] and return what was seen; `short` ends it at the output projection."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0][0].detach())

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        outputs.append(output[0].detach())
        if short:
            raise Enough

    handles = [
        stream.model.get_submodule(places.modules("key")[0]).register_forward_pre_hook(before)
    ]
    if places.output is not None:
        handles.append(stream.model.get_submodule(places.output).register_forward_hook(after))
    found = None
    try:
        found = stream.run(index, hidden)
    except Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return Seen(inputs[0], take(), outputs[0] if outputs else None, found)


def sender(stream: LayerStream, index: int, places: Projections, hidden: torch.Tensor) -> Send:
    """Return a function that puts rows in place of a projection's and returns attention's input made of them.

    Args:
        hidden: [windows, tokens, hidden] states that the layer reads.
    """

    def send(kind: str, rows: torch.Tensor) -> torch.Tensor:
        path, first = places.modules(kind)

        def put(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            changed = output.clone()
            changed[..., first : first + rows.shape[-1]] = rows
            return changed

        handle = stream.model.get_submodule(path).register_forward_hook(put)
        try:
            with looking():
                tap = run_seen(stream, index, places, hidden).tap
        finally:
            handle.remove()
        return {"query": tap.query, "key": tap.key, "value": tap.value}[kind]

    return send


def passes_values(send: Send, heads: int, dim: int, tokens: int) -> bool:
    """Return whether attention gets values as their projection gives them."""
    rows = torch.linspace(-1, 1, tokens * heads * dim).reshape(1, tokens, heads * dim)
    got = send("value", rows)
    return got.shape == (1, heads, tokens, dim) and torch.equal(
        got, rows.reshape(1, tokens, heads, dim).transpose(1, 2)
    )


def is_residual(stream: LayerStream, index: int, places: Projections, hidden: torch.Tensor) -> bool:
    """Return whether a layer adds its output projection to its hidden states [windows, tokens, hidden] before all else.

    Then what the hidden states lack can be made up for by the output projection: the layer is run with d added to the
    one and taken from the other, which changes nothing.
    """
    if places.output is None:
        return False
    module = stream.model.get_submodule(places.output)
    fixed = torch.linspace(-1, 1, hidden.numel()).reshape(hidden.shape) * hidden.std()
    shift = hidden.flip(1) * 0.3

    def run(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        handle = module.register_forward_hook(lambda *_: output)
        try:
            return stream.run(index, states)
        finally:
            handle.remove()

    plain, moved = run(hidden, fixed), run(hidden + shift, fixed - shift)
    take()
    return float((plain - moved).abs().max()) <= 1e-3 * float(plain.abs().max())


class LayerMerge:
    """Merges one loaded layer.

    Args:
        stream: with the layer loaded.
        index: of the layer.
        original, converted: [windows, tokens, hidden], what the layer gets in both streams.
    """

    def __init__(
        self, stream: LayerStream, index: int, original: torch.Tensor, converted: torch.Tensor
    ) -> None:
        self.stream, self.index = stream, index
        self.original, self.converted = original, converted
        self.structure = structure = stream.structure
        self.groups = structure.new_kv_heads
        self.merged = structure.num_kv_heads // self.groups  # heads that become one
        per = structure.num_heads // structure.num_kv_heads
        self.kv_of = torch.arange(structure.num_heads) // per  # old kv head of each query head
        self.new_of = (
            torch.arange(structure.num_kv_heads) // self.merged
        )  # new kv head of each old one
        self.group_of = self.new_of[self.kv_of]
        self.places = find_projections(structure, stream.model, f"{stream.path}.{index}")
        self._look()

    def _look(self) -> None:
        """Find out how the layer works."""
        hidden = self.original[:1]
        stream, index, places = self.stream, self.index, self.places
        places.output = find_output(
            stream.model, places.attention, lambda: run_seen(stream, index, places, hidden).tap
        )
        with looking():
            tap = run_seen(stream, index, places, hidden).tap
        heads = {"query": tap.query.shape[1], "key": tap.key.shape[1]}
        send = sender(stream, index, places, hidden)
        tokens = hidden.shape[1]
        self.rotary: Rotary | None = probe_rotary(
            send, tokens, heads, tap.key.shape[-1], type(stream.model).__name__
        )
        self.free_values = places.output is not None and passes_values(
            send, heads["key"], tap.value.shape[-1], tokens
        )
        if self.rotary is None and not self.free_values:
            raise ConversionError(
                f"'{stream.path}.{index}' has a norm behind its keys, and something else than a projection behind attention (a "
                'gate?): a calibrated merge would be the mean; use method="mean"'
            )
        self.carries = is_residual(stream, index, places, hidden)
        self.weights = places.read(stream.model)

    def run(self) -> dict[str, torch.Tensor]:
        """Merge the layer, move both streams behind it and return its new tensors [new shapes] by their names on disk."""
        if self.groups > 1:
            self._regroup()
        self._observe()
        if self.rotary is None:
            self._pool("key", "key_norm")
        else:
            self._merge_keys(self.rotary)
            self._fit_scores(self.rotary)
        self.before.clear()  # the probabilities of all windows, and more, that values do not need
        self.now.clear()
        found = {}
        if self.free_values:
            self._write(("key", "key_norm"))
            output = self._merge_values()
            self._write(("key", "key_norm", "value"))
            if output is not None:
                assert self.places.output is not None
                module = self.stream.model.get_submodule(self.places.output)
                module.weight.data = output.float()
                found[self.structure.names.on_disk[self.places.output + ".weight"]] = output
        else:
            self._pool("value")
            self._write(("key", "key_norm", "value"))
        for i in range(len(self.converted)):
            self.converted[i] = self.stream.run(self.index, self.converted[i : i + 1])[0]
        return self.places.on_disk(self.weights) | found

    def _observe(self) -> None:
        """Run both streams through the old layer; the original one moves behind it."""
        same = torch.equal(self.original, self.converted)
        size = self.original.square().mean(-1)
        level = size.clamp(min=FINE * float(size.median()) + 1e-30).rsqrt()
        self.level = level / level.square().mean().sqrt()
        self.before: list[Seen] = []
        self.now: list[Seen] = []
        self.targets: list[torch.Tensor] = []
        for i in range(len(self.original)):
            seen = run_seen(self.stream, self.index, self.places, self.original[i : i + 1])
            now = seen if same else self._run(i)
            if seen.output is not None:
                lost = self.original[i] - self.converted[i] if self.carries else 0
                self.targets.append(seen.output + lost)
            assert seen.hidden is not None
            self.original[i] = seen.hidden[0]
            check_streams(f"{self.stream.path}.{self.index}", seen.hidden)
            if self.rotary is not None:
                self.before.append(seen.only("query", "key", "weights"))
            self.now.append(now.only("inputs", "query", "key"))

    def _run(self, window: int) -> Seen:
        hidden = self.converted[window : window + 1]
        return run_seen(
            self.stream, self.index, self.places, hidden, short=self.places.output is not None
        )

    def _pool(self, *kinds: str) -> None:
        for leaf in self.weights.values():
            for kind in kinds:
                if kind in leaf:
                    leaf[kind] = leaf[kind].reshape(self.groups, -1, *leaf[kind].shape[1:]).mean(1)

    def _write(self, merged: tuple[str, ...]) -> None:
        self.places.write(self.stream.model, self.weights, merged, self.new_of)

    def _through(self, kind: str, down: torch.Tensor) -> None:
        """Replace the heads of a kind by maps [groups, dim, merged * dim] of them, weights and biases."""
        for leaf in self.weights.values():
            if kind in leaf:
                rows = leaf[kind].reshape(self.groups, down.shape[2], *leaf[kind].shape[2:])
                leaf[kind] = torch.einsum("gdw,gw...->gd...", down, rows)

    def _second_moments(self, seen: list[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return E[k k^T] of all kv heads [kv * dim, kv * dim] and E[q q^T] summed for each [kv, dim, dim], in float64."""
        dim, kv = seen[0].tap.key.shape[-1], self.structure.num_kv_heads
        queries = torch.zeros(kv, dim, dim, dtype=torch.float64)
        for one in seen:
            query = one.tap.query[0]
            queries.index_add_(0, self.kv_of, (query.mT @ query).double())
        count = sum(one.tap.key.shape[2] for one in seen)
        return _gram([one.tap.key[0] for one in seen]), queries / count

    def _regroup(self) -> None:
        """Put heads that are alike beside each other: the layer computes the same, in another order."""
        if not self.free_values:
            return
        sample = range(min(SAMPLE, len(self.converted)))
        seen = [self._run(i).only("query", "key", "value") for i in sample]
        keys, queries = self._second_moments(seen)
        values = _gram([one.tap.value[0] for one in seen])
        readers, _ = self._readers()
        cost = pair_costs(keys, queries, values, self._summed(readers), self.rotary)
        order = choose_groups(cost, self.groups)
        per = len(self.kv_of) // len(order)
        heads = (order[:, None] * per + torch.arange(per)).flatten()
        model = self.stream.model
        assert self.places.output is not None
        output = model.get_parameter(self.places.output + ".weight")
        kept, columns = self.weights, output.data
        before = self._attention()
        self.weights = {
            which: {kind: part[heads if kind == "query" else order] for kind, part in leaf.items()}
            for which, leaf in kept.items()
        }
        self._write(())
        output.data = columns.unflatten(1, (len(heads), -1))[:, heads].flatten(1)
        after = self._attention()
        if apart(before[0][:, heads], after[0]) > MOVED or apart(before[1], after[1]) > MOVED:
            self.weights = kept  # something else in this layer belongs to heads, such as sinks
            self._write(())
            output.data = columns

    def _attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contexts [tokens, heads, dim] and the output [tokens, hidden] of attention on the first window."""
        hidden = self.original[:1]
        seen = run_seen(self.stream, self.index, self.places, hidden, short=True)
        assert seen.output is not None
        return seen.tap.context[0], seen.output

    def _merge_keys(self, rotary: Rotary) -> None:
        dim = self.now[0].tap.key.shape[-1]
        gram, queries = self._second_moments(self.now)
        m = self.merged
        downs, ups = [], []
        for g in range(self.groups):
            rows = slice(g * m * dim, (g + 1) * m * dim)
            down, up = merge_keys(gram[rows, rows], queries[g * m : (g + 1) * m], rotary)
            downs.append(down)
            ups.append(up)
        self._through("key", torch.stack(downs))
        up = torch.cat(ups)[self.kv_of]
        for leaf in self.weights.values():
            if "query" in leaf:
                leaf["query"] = torch.einsum("hed,he...->hd...", up, leaf["query"])

    def _fit_scores(self, rotary: Rotary) -> None:
        biases = self.weights["bias"]
        inputs = torch.stack([seen.inputs for seen in self.now])
        biased = "query" in biases or "key" in biases
        if biased:
            inputs = torch.cat([inputs, torch.ones(*inputs.shape[:2], 1)], -1)
        data = ScoreData(
            inputs,
            [seen.tap for seen in self.before],
            self.level.square(),
            self.kv_of,
            self.group_of,
            rotary,
        )

        def packed(kind: str) -> torch.Tensor:
            weight = self.weights["weight"][kind].float()
            if not biased:
                return weight
            bias = biases[kind].float() if kind in biases else torch.zeros(weight.shape[:2])
            return torch.cat([weight, bias[..., None]], -1)

        fitted = {kind: packed(kind) for kind in ("query", "key")}
        for kind in ("query", "key", "query"):
            unbiased = biased and kind not in biases
            fitted[kind] = fit_scores(data, kind, fitted["query"], fitted["key"], unbiased)
        for kind, weight in fitted.items():
            if biased and kind in biases:
                biases[kind] = weight[..., -1].double()
            self.weights["weight"][kind] = (weight[..., :-1] if biased else weight).double()

    def _readers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return O^T O of every head [heads, dim, dim] and the outputs as [out, heads, dim], in float64."""
        assert self.places.output is not None
        weight = self.stream.model.get_parameter(self.places.output + ".weight").detach().double()
        each = weight.reshape(len(weight), self.structure.num_heads, -1)
        return torch.einsum("ohd,ohe->hde", each, each), each

    def _summed(self, readers: torch.Tensor) -> torch.Tensor:
        """Return matrices of query heads [heads, dim, dim] summed for each kv head."""
        found = torch.zeros(len(self.new_of), *readers.shape[1:], dtype=readers.dtype)
        return found.index_add_(0, self.kv_of, readers)

    def _merge_values(self) -> torch.Tensor | None:
        """Merge values; return the outputs that go with them, or None where nothing is read: those are pooled."""
        assert self.places.output is not None
        reads, each = self._readers()
        bias = self.stream.model.get_submodule(self.places.output).bias

        def run(i: int) -> tuple[Tap, torch.Tensor, torch.Tensor]:
            target = self.targets[i] if bias is None else self.targets[i] - bias
            return self._run(i).tap, target, self.level[i]

        count, summed = len(self.converted), self._summed(reads)
        merged = merge_values(run, count, summed, each, self.kv_of, self.new_of)
        if merged is None:
            self._pool("value")
            return None
        self._through("value", merged[0])
        return merged[1]


def _gram(heads: list[torch.Tensor]) -> torch.Tensor:
    """Return E[x x^T] of stacked heads, given [heads, tokens, dim] window by window, in float64."""
    flat = torch.cat([one.transpose(0, 1).flatten(1) for one in heads])
    return (flat.T @ flat).double() / len(flat)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest distance of a token's numbers [tokens, ..] as a part of their own size."""
    size = one.flatten(1).norm(dim=1)
    return float(((one - other).flatten(1).norm(dim=1) / size.clamp(min=1e-30)).max())


@torch.no_grad()
def calibrate(
    source: Source,
    structure: Structure,
    windows: torch.Tensor,
    scratch: Path,
    *,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> dict[str, Path]:
    """Write all tensors that a calibrated merge changes, in float32 and of their new shapes; return each one's file.

    Args:
        windows: token ids [windows, tokens], int64: several thousand in all.
        scratch: an existing folder; gets one safetensors file per layer.
        progress: called with (layers done, layers).
    Raises: ConversionError for models that cannot be calibrated, with the reason, and where numbers are not finite; OSError
        where `scratch` cannot be written.
    """
    stream = LayerStream(source, structure)
    original = stream.embed(windows)
    check_streams("the embeddings", original)
    if not original.any():
        raise ConversionError(f"the embeddings of all calibration tokens of {source.name} are zero")
    converted = original.clone()
    files: dict[str, Path] = {}
    for index in range(stream.count):
        path = f"{stream.path}.{index}"
        with stream.loaded(path):
            if stream.changes(index):
                tensors = solve(LayerMerge(stream, index, original, converted), path)
                file = scratch / f"layer-{index:05d}.safetensors"
                save_file(tensors, file)
                files.update(dict.fromkeys(tensors, file))
            else:
                for hidden in (original, converted):
                    for i in range(len(hidden)):
                        hidden[i] = stream.run(index, hidden[i : i + 1])[0]
        check_streams(path, original, converted)
        progress(index + 1, stream.count)
    return files


def solve(merge: LayerMerge, path: str) -> dict[str, torch.Tensor]:
    """Return the new tensors of a layer [new shapes], float32, by their names on disk.

    Raises: ConversionError naming the layer where they are not finite.
    """
    try:
        found = {name: tensor.float().contiguous() for name, tensor in merge.run().items()}
    except torch.linalg.LinAlgError as error:
        raise ConversionError(
            f"{path!r} cannot be merged: its numbers on the calibration text are too large or not finite ({first_line(error)})"
        ) from error
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            raise ConversionError(
                f"{path!r} cannot be merged: {name!r} would hold numbers that are not finite"
            )
    return found


def check_streams(what: str, *streams: torch.Tensor) -> None:
    """Raise ConversionError where hidden states are not finite: weights are not, or they overflow float32.

    Args:
        what: the place in the model, for the message.
        streams: hidden states [windows, tokens, hidden] behind it.
    """
    if not all(bool(hidden.isfinite().all()) for hidden in streams):
        raise ConversionError(
            f"{what!r}: hidden states of the calibration text are not finite there (weights that are not, or numbers too "
            "large for float32)"
        )
