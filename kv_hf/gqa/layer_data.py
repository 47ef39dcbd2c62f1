"""What one attention layer does on calibration tokens, seen from outside: its inputs, its heads, its output.

Layers are run window by window. Where only attention is needed, a run ends at the output projection.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .projections import Projections
from .rotary import Send
from .stream import LayerStream
from .taps import Enough, Tap, looking, take


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


def heads_of(
    stream: LayerStream, index: int, places: Projections, hidden: torch.Tensor
) -> tuple[dict[str, int], int, int]:
    """Return ({"query": heads, "key": kv heads}, head_dim, value_dim) as attention gets them; `hidden` is [windows, tokens, hidden]."""
    with looking():
        tap = run_seen(stream, index, places, hidden).tap
    return (
        {"query": tap.query.shape[1], "key": tap.key.shape[1]},
        tap.key.shape[-1],
        tap.value.shape[-1],
    )


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
