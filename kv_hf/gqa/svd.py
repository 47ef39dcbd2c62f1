"""Merge heads by what they do on calibration tokens, layer by layer, and keep the new tensors on disk.

Two streams of hidden states run through the model: those of the original and those of the converted layers so far. The heads
of each group become their principal components on what the converted layer will see. Then the converted attention is fitted
to give what the original's gave: least squares, by L-BFGS, in the weights of all its linear layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from ..errors import ConversionError, KVCacheError, first_line
from .components import choose_groups, find_partners, merge_heads, random_turns
from .source import Source
from .stream import Call, LayerStream, Tensors, first_row, observed, run
from .structure import Made, Part, Structure, join, split

STEPS = 40  # of a fit
MEMORY = 10  # steps that L-BFGS remembers
RIDGE = 1.0  # of the mean square of inputs: what is added to each direction of theirs
MOVED = 1e-3  # that attention may change by turns of heads that it should not see: rounding, and no more
READERS = {"key": "query", "value": "output"}  # kind of merged head -> what reads it
Heads = dict[str, Tensor]  # kind -> [heads, rows, inputs + 1], biases in the last column


class Attention:
    """The attention of a layer, and the merge of its heads.

    Attributes:
        old, new: the modules; the new one is on the meta device.
        tensors: of the old one, in float32.
        parts: its tensors with rows of heads -> their parts, weights before biases.
        calls: of it in the converted stream, one for each window.
        places: kind of head -> path of its projection.
        linears: paths of the linear layers, in the order in which they run.
        last: name of the weight of the last one, which reads the values.
        partner: kind of merged head -> for each channel the one that positions mix it with; no keys, where they mix more.
        kv_of: [heads], the old kv head of each query head.
    """

    def __init__(
        self,
        structure: Structure,
        modules: tuple[nn.Module, nn.Module],
        tensors: Tensors,
        parts: dict[str, tuple[Part, ...]],
        calls: list[Call],
    ) -> None:
        self.old, self.new = modules
        self.tensors, self.parts, self.calls = tensors, parts, calls
        self.groups, self.kv_heads = structure.new_kv_heads, structure.num_kv_heads
        heads = torch.arange(structure.num_heads, device="cpu")
        self.kv_of = heads * self.kv_heads // structure.num_heads
        self.places: dict[str, str] = {}
        for name, own in parts.items():
            path, _, _ = name.rpartition(".")
            self.places |= {part.kind: path for part in own}
        modules_of = self.old.named_modules()
        linears = [path for path, part in modules_of if isinstance(part, nn.Linear)]
        place = self.places["key"]
        name = f"{place}.weight"
        queries = [part for part in parts[name] if part.kind == "query"]
        first = sum(part.heads * part.rows for part in queries)
        weight = tensors[name].clone().requires_grad_()
        values = torch.arange(structure.head_dim, device="cpu")
        self.partner = {"value": values}
        with torch.enable_grad(), observed(self.old, linears) as seen:
            before = run(self.old, {**tensors, name: weight}, calls[0])
            self.before = before.detach()
            if seen.keys:
                rows = seen.results[place]
                partner = find_partners(seen.keys[0][0], rows, first)
                if partner is not None:
                    self.partner["key"] = partner
        self.linears = list(seen.results)
        self.last = f"{self.linears[-1]}.weight"

    def read(self) -> Heads:
        """Return the heads in the tensors, in float64."""
        heads: Heads = {}
        for name, parts in self.parts.items():
            for kind, rows in split(self.tensors[name].double(), parts).items():
                if name.endswith("bias"):
                    heads[kind][..., -1] = rows
                else:
                    matrix = rows if rows.dim() == 3 else rows[..., None]
                    heads[kind] = F.pad(matrix, (0, 1))
        output = self.tensors[self.last].double()
        heads["output"] = output.T.unflatten(0, (len(self.kv_of), -1))
        return heads

    def written(self, heads: Heads) -> Tensors:
        """Return all tensors with these heads, in float32."""
        found = dict(self.tensors)
        output = heads["output"].flatten(0, 1)
        found[self.last] = output.T.float().contiguous()
        for name, parts in self.parts.items():
            column = slice(-1, None) if name.endswith("bias") else slice(-1)
            own = {part.kind: heads[part.kind][..., column] for part in parts}
            shape = self.tensors[name].shape
            found[name] = join(own, parts).reshape(-1, *shape[1:]).float()
        return found

    def is_same(self, heads: Heads) -> bool:
        """Say whether attention with these heads, as many as before, gives what it gave before."""
        now = run(self.old, self.written(heads), self.calls[0])
        moved = now - self.before
        return bool(moved.norm() <= MOVED * self.before.norm())

    def may_turn(self, heads: Heads, kind: str) -> bool:
        """Say whether heads of a kind may be turned, plane by plane, if what reads them is turned as well."""
        rows, reader = heads[kind], READERS[kind]
        partner = self.partner.get(kind)
        if partner is None or not len(partner) == rows.shape[1] == heads[reader].shape[1]:
            return False
        turns = random_turns(len(rows), partner)
        turned = dict(heads)
        turned[kind] = turns @ rows
        turned[reader] = turns[self.kv_of] @ heads[reader]
        return self.is_same(turned)

    def inputs(self, module: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
        """Return path of a linear layer -> E[x x^T] of its inputs with a one behind them, in float64."""
        found: Tensors = {}
        for call in self.calls:
            with observed(module, self.linears) as seen:
                run(module, tensors, call)
            for path, (args, _) in seen.calls.items():
                x = args[0].flatten(0, -2)
                x = F.pad(x, (0, 1), value=1.0)
                square = (x.T @ x).double() / len(x)
                found[path] = found.get(path, 0) + square
        return {path: total / len(self.calls) for path, total in found.items()}

    def readers(self, rows: Tensor, gram: Tensor) -> Tensor:
        """Return E[x x^T] of what rows [heads, dim, n] make of inputs, summed for each kv head: [kv heads, dim, dim].

        Args:
            gram: [n, n], E[x x^T] of the inputs.
        """
        each = rows @ gram @ rows.mT
        return each.unflatten(0, (self.kv_heads, -1)).sum(1)

    def merge(self) -> Heads:
        """Return merged heads: principal components, and means of those that may not be turned."""
        heads = self.read()
        inputs = self.inputs(self.old, self.tensors)
        grams = {kind: inputs[self.places[kind]] for kind in ("query", "key", "value")}
        outputs = heads["output"].shape[-1]
        grams["output"] = torch.eye(outputs, dtype=torch.float64, device="cpu")
        free = [kind for kind in READERS if self.may_turn(heads, kind)]
        if "value" in free and self.groups > 1:
            heads = self.regroup(heads, grams)
        for kind in ("key", "value", "key_norm"):
            if kind in free:
                self.merge_kind(kind, heads, grams)
            elif kind in heads:
                grouped = heads[kind].unflatten(0, (self.groups, -1))
                heads[kind] = grouped.mean(1)
        return heads

    def merge_kind(self, kind: str, heads: Heads, grams: Tensors) -> None:
        """Put principal components in place of the heads of a kind, and let what reads them read those."""
        reader, partner = READERS[kind], self.partner[kind]
        grouped = heads[kind].unflatten(0, (self.groups, -1))  # [groups, m, dim, inputs + 1]
        reads = self.readers(heads[reader], grams[reader])
        reads = reads.unflatten(0, (self.groups, -1))
        merged, ups = [], []
        for rows, read in zip(grouped, reads, strict=True):
            flat = rows.flatten(0, 1)
            square = flat @ grams[kind] @ flat.T
            down, up = merge_heads(square, read, partner)
            merged.append((down @ rows).sum(0))
            ups.append(up)
        heads[kind] = torch.stack(merged)
        heads[reader] = torch.cat(ups)[self.kv_of].mT @ heads[reader]

    def regroup(self, heads: Heads, grams: Tensors) -> Heads:
        """Return the heads with those beside each other that are alike, if attention allows another order."""
        flat = heads["value"].flatten(0, 1)
        square = flat @ grams["value"] @ flat.T
        reads = self.readers(heads["output"], grams["output"])
        order = choose_groups(square, reads, self.groups)
        queries = torch.arange(len(self.kv_of), device="cpu").unflatten(0, (self.kv_heads, -1))
        queries = queries[order].flatten()
        moved = dict(heads)
        for kind, rows in heads.items():
            if len(rows) > 1:  # a norm may be one for all
                moved[kind] = rows[queries if kind in READERS.values() else order]
        # else something in this layer belongs to its heads, such as sinks
        return moved if self.is_same(moved) else heads

    def fit(self, heads: Heads, targets: list[Tensor]) -> Tensors:
        """Return weights with which the new module gives nearly `targets`, [tokens, hidden] for each window.

        Args:
            heads: merged ones, where the fit begins. A step counts in inputs without correlations, L^-1 x with
                L L^T = E[x x^T]: no direction is slow.
        """
        start = self.written(heads)
        inverses: Tensors = {}
        for path, gram in self.inputs(self.new, start).items():
            own = gram[:-1, :-1]
            mean = own.diagonal().mean().clamp(min=1e-20)
            own.diagonal().add_(RIDGE * mean)
            lower = torch.linalg.cholesky(own)
            inverses[f"{path}.weight"] = torch.linalg.inv(lower).float()
        steps = {}
        for name in inverses:
            steps[name] = torch.zeros_like(start[name]).requires_grad_()
        size = sum(float(target.square().sum()) for target in targets)
        size = max(size, 1e-30)
        optimizer = torch.optim.LBFGS(
            list(steps.values()),
            max_iter=STEPS,
            history_size=MEMORY,
            line_search_fn="strong_wolfe",
        )

        def weights() -> Tensors:
            return {name: start[name] + step @ inverses[name] for name, step in steps.items()}

        def missed() -> Tensor:
            optimizer.zero_grad()
            made = weights()
            used = {name: weight.detach() for name, weight in made.items()}
            for weight in used.values():
                weight.requires_grad_()
            total = torch.zeros((), device="cpu")
            for call, target in zip(self.calls, targets, strict=True):
                off = run(self.new, {**start, **used}, call) - target
                loss = off.square().sum() / size
                loss.backward()
                total += loss.detach()
            for name, weight in used.items():
                if weight.grad is not None:  # an indexer's choice of tokens has none
                    made[name].backward(weight.grad)
            return total

        optimizer.step(missed)
        return {**start, **weights()}


def parts_of(structure: Structure, base: str, inside: Tensors) -> dict[str, tuple[Part, ...]]:
    """Return the tensors of an attention module with heads' rows, by name within it; weights before biases.

    Args:
        base: path of the module in the model, with a point behind it.
        inside: all tensors of the module, by name within it.
    Raises: ConversionError where they cannot be calibrated.
    """
    named = ((name, structure.names.on_disk.get(base + name)) for name in inside)
    found = {name: structure.parts[own] for name, own in named if own in structure.parts}
    every = [part for parts in found.values() for part in parts]
    if any(part.interleaved for part in every):
        raise ConversionError(
            f"{structure.config.model_type} keeps a head's query, key and value together, and goes to one kv head only; it "
            'cannot be calibrated, use method="mean"'
        )
    if all(part.kind != "query" for part in every):
        for name in {"q_proj.weight", "q_proj.bias"} & inside.keys():
            rows = len(inside[name]) // structure.num_heads  # a gate's may lie behind a query's
            found[name] = (Part("query", structure.num_heads, rows),)
    return dict(sorted(found.items(), reverse=True))


def merge_layer(
    structure: Structure,
    stream: LayerStream,
    index: int,
    original: Tensor,
    converted: Tensor,
) -> Tensors:
    """Merge the heads of a layer, if it has any, and move both streams [windows, tokens, hidden] behind it.

    Returns: name on disk -> tensor that is not the original's.
    """
    layer = f"{stream.path}.{index}."
    old, new = stream.layers(index)
    tensors = stream.tensors(index)
    own = [name.removeprefix(layer) for name in stream.names if name.startswith(layer)]
    paths = {name.rsplit(".", 2)[0] for name in own}
    calls: list[Call] = []
    targets: list[Tensor] = []
    for i, hidden in enumerate(original):
        with observed(old, paths) as seen:
            run(old, tensors, stream.call(index, i, converted[i]))
        calls += seen.calls.values()
        with observed(old, paths) as seen:
            original[i] = run(old, tensors, stream.call(index, i, hidden))
        targets += map(first_row, seen.results.values())
    changed: Tensors = {}
    for path in paths:
        base = f"{path}."
        modules = old.get_submodule(path), new.get_submodule(path)
        inside = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
        parts = parts_of(structure, layer + base, inside)
        attention = Attention(structure, modules, inside, parts, calls)
        fitted = attention.fit(attention.merge(), targets)
        changed = {base + n: tensor for n, tensor in fitted.items() if tensor is not inside[n]}
    for i, hidden in enumerate(converted):
        converted[i] = run(new, {**tensors, **changed}, stream.call(index, i, hidden))
    on_disk = structure.names.on_disk
    return {on_disk[layer + name]: tensor.contiguous() for name, tensor in changed.items()}


@contextmanager
def calibrating(what: str) -> Iterator[None]:
    """Raise a ConversionError about `what` in place of whatever a model's code raises, run layer by layer."""
    try:
        yield
    except (KVCacheError, OSError, MemoryError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, torch.linalg.LinAlgError):
            why = f"numbers too large or not finite ({why})"
        raise ConversionError(f'{what} cannot be calibrated, use method="mean": {why}') from error


@torch.no_grad()
def calibrate(source: Source, structure: Structure, windows: Tensor, scratch: Path) -> Made:
    """Write all tensors that a calibrated merge changes, in float32 and of their new shapes; return how they are read.

    Args:
        windows: token ids [windows, tokens], int64: several thousand in all.
        scratch: an existing folder; gets one safetensors file per layer.
    Raises: ConversionError for models that cannot be calibrated, with the reason, and where numbers are not finite; OSError
        where `scratch` cannot be written.
    """
    name = structure.config.model_type
    with calibrating(name):
        stream = LayerStream(source, structure)
        original = stream.embed(windows)
    converted = original.clone()
    made: Made = {}
    for index in tqdm(range(len(stream.calls[0])), desc="merging", unit="layer", disable=None):
        path = f"{stream.path}.{index}"
        with calibrating(f"{name}, {path!r},"):
            tensors = merge_layer(structure, stream, index, original, converted)
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


def _read(file: Path, name: str, old: Tensor) -> Tensor:
    """Return a tensor of a file, in place of the old one."""
    return torch.as_tensor(safe_open(file, "pt").get_tensor(name), device="cpu")
