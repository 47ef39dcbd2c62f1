"""One layer's merge: look at the original and the converted stream, solve keys, fit scores, solve values, fit outputs."""

import torch

from ..errors import ConversionError
from .grouping import choose_groups, pair_costs
from .layer_data import Seen, heads_of, is_residual, passes_values, run_seen, sender
from .merge_keys import merge_keys
from .merge_values import merge_values
from .projections import find_output, find_projections
from .recipe import Recipe
from .refit_scores import ScoreData, fit_keys, fit_queries, score_loss
from .rotary import Rotary, probe_rotary
from .stream import LayerStream
from .taps import Tap

FINE = 1e-3  # level of a token whose hidden state is far smaller than others', as a part of their median
SAMPLE = 8  # windows that groups are chosen on
MOVED = 1e-3  # that a token's attention may change when heads change places: rounding, and no more


class LayerMerge:
    """Merges one loaded layer.

    Args:
        stream: with the layer loaded.
        index: of the layer.
        original, converted: [windows, tokens, hidden], what the layer gets in both streams.
    """

    def __init__(
        self, stream: LayerStream, index: int, original: torch.Tensor, converted: torch.Tensor, recipe: Recipe
    ) -> None:  # fmt: skip
        self.stream, self.index, self.recipe = stream, index, recipe
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
        self.figures: dict[str, float] = {}
        self.places = find_projections(structure, stream.model, f"{stream.path}.{index}")
        self._look()

    def _look(self) -> None:
        """Find out how the layer works."""
        hidden = self.original[:1]
        stream, index, places = self.stream, self.index, self.places
        places.output = find_output(
            stream.model, places.attention, lambda: run_seen(stream, index, places, hidden).tap
        )
        heads, dim, value_dim = heads_of(stream, index, places, hidden)
        send = sender(stream, index, places, hidden)
        tokens = hidden.shape[1]
        self.rotary: Rotary | None = probe_rotary(
            send, tokens, heads, dim, type(stream.model).__name__
        )
        self.free_values = places.output is not None and passes_values(
            send, heads["key"], value_dim, tokens
        )
        if self.rotary is None and not self.free_values:
            raise ConversionError(
                f"'{stream.path}.{index}' has a norm behind its keys, and something else than a projection behind attention (a "
                'gate?): a calibrated merge would be the mean; use method="mean"'
            )
        self.carries = self.recipe.carry and is_residual(stream, index, places, hidden)
        self.weights = places.read(stream.model)

    def run(self) -> dict[str, torch.Tensor]:
        """Merge the layer, move both streams behind it and return its new tensors [new shapes] by their names on disk."""
        if self.recipe.regroup and self.groups > 1:
            self._regroup()
        self._observe()
        if self.rotary is None or self.recipe.keys == "mean":
            self._pool("key", "key_norm")
        else:
            self._merge_keys(self.rotary)
            if self._fits_scores:
                self._fit_scores(self.rotary)
        self.before.clear()  # the probabilities of all windows, and more, that values do not need
        self.now.clear()
        found = {}
        if self.free_values and self.recipe.values != "mean":
            self._write(("key", "key_norm"))
            output = self._merge_values()
            self._write(("key", "key_norm", "value"))
            if output is not None:
                assert self.places.output is not None
                module = self.stream.model.get_submodule(self.places.output)
                module.weight.data = output.float()
                found[self.structure.names[self.places.output + ".weight"]] = output
        else:
            self._pool("value")
            self._write(("key", "key_norm", "value"))
        for i in range(len(self.converted)):
            self.converted[i] = self.stream.run(self.index, self.converted[i : i + 1])[0]
        off = (self.converted - self.original).square().sum(-1) / self.original.square().sum(-1)
        self.figures["stream_error"] = float(off.mean())
        return self.places.on_disk(self.weights) | found

    def _observe(self) -> None:
        """Run both streams through the old layer; the original one moves behind it."""
        same = torch.equal(self.original, self.converted)
        size = self.original.square().mean(-1)
        level = size.clamp(min=FINE * float(size.median()) + 1e-30).rsqrt()
        self.level = (
            level / level.square().mean().sqrt() if self.recipe.level else torch.ones_like(level)
        )
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
            if not seen.hidden.isfinite().all():
                raise ConversionError(
                    f"'{self.stream.path}.{self.index}' cannot be merged: hidden states of the calibration text are not finite "
                    "behind it (weights that are not, or numbers too large for float32)"
                )
            if self._fits_scores:
                self.before.append(seen.only("query", "key", "value", "weights"))
            self.now.append(now.only("inputs", "query", "key"))

    @property
    def _fits_scores(self) -> bool:
        return (
            self.rotary is not None and self.recipe.keys != "mean" and self.recipe.score_sweeps > 0
        )

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
            return
        self.figures["moved"] = float((order != torch.arange(len(order))).sum())

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
            down, up = merge_keys(
                gram[rows, rows], queries[g * m : (g + 1) * m], rotary, self.recipe.keys
            )
            downs.append(down)
            ups.append(up)
        self._through("key", torch.stack(downs))
        up = torch.cat(ups)[self.kv_of]
        for leaf in self.weights.values():
            if "query" in leaf:
                leaf["query"] = torch.einsum("hed,he...->hd...", up, leaf["query"])

    def _fit_scores(self, rotary: Rotary) -> None:
        recipe, biases = self.recipe, self.weights["bias"]
        inputs = torch.stack([seen.inputs for seen in self.now])
        biased = "query" in biases or "key" in biases
        if biased:
            inputs = torch.cat([inputs, torch.ones(*inputs.shape[:2], 1)], -1)
        data = ScoreData(
            inputs,
            [seen.tap for seen in self.before],
            self.level.square()[:, None] * self._importance(),
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

        query, key = packed("query"), packed("key")
        fixed = [kind for kind in ("query", "key") if biased and kind not in biases]
        self.figures["score_loss_merged"] = score_loss(data, query, key)
        for _ in range(recipe.score_sweeps):
            query = fit_queries(
                data, query, key, recipe.score_ridge, recipe.score_steps, "query" in fixed
            )
            key = fit_keys(data, query, key, recipe.score_ridge, recipe.score_steps, "key" in fixed)
        query = fit_queries(
            data, query, key, recipe.score_ridge, recipe.score_steps, "query" in fixed
        )
        self.figures["score_loss"] = score_loss(data, query, key)
        for kind, fitted in (("query", query), ("key", key)):
            if biased:
                if kind in biases:
                    biases[kind] = fitted[..., -1].double()
                fitted = fitted[..., :-1]
            self.weights["weight"][kind] = fitted.double()

    def _importance(self) -> torch.Tensor:
        """Return [windows, heads, tokens]: the variance of what a head reads, as its outputs see it; their mean is 1."""
        heads = self.structure.num_heads
        worth = torch.ones(len(self.before), heads, self.original.shape[1])
        if self.recipe.importance and self.free_values:
            read = self._readers()[0].float()
            for i, seen in enumerate(self.before):
                value, p = seen.tap.value[0][self.kv_of], seen.tap.weights[0]
                mean = p @ value
                square = torch.einsum("htd,hde,hte->ht", value, read, value)
                variance = (p @ square[..., None])[..., 0] - torch.einsum(
                    "htd,hde,hte->ht", mean, read, mean
                )
                worth[i] = variance.clamp(min=0)
        return worth / worth.mean().clamp(min=1e-30)

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
        merged = merge_values(
            run, count, summed, each, self.kv_of, self.new_of, self.recipe, self.figures
        )
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
