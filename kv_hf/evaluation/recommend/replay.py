"""Rerun the upper layers of a model on a text whose lower layers are known.

What one layer's cache does can change nothing below that layer. So the exact run of a text is recorded once: the keys and
values of its prompt, what each layer gave for the scored tokens, and the logits. A run in which the lowest changed
layer is L then fills its cache with the recorded keys and values (a prefill on an empty cache is exact for every
format) and begins at layer L with what layer L - 1 gave.

Works for decoders that are a list of layers, each of which takes and gives hidden states; `find_layers` says whether a
model looks like one, and `measure_sensitivities` compares the first result with that of a whole run.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...cache.layer import PagedLayer
from ...cache.model_shape import decoder_config
from ...cache.paged_cache import PagedCache
from ..teacher_forcing import forced_logits, next_chunk


@dataclass
class Recording:
    """The exact run of one text.

    Attributes:
        ids: [tokens], the text.
        prompt_tokens: those that are not scored.
        logits: [scored, vocab], fp32, of the exact cache.
        prompt: (keys, values) of each layer for the prompt; empty where it cannot be filled in again.
        outputs: for each layer what it gave for the scored tokens, [1, scored, hidden]; empty likewise.
    """

    ids: torch.Tensor
    prompt_tokens: int
    logits: torch.Tensor
    prompt: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


class _RecordingCache(PagedCache):
    """An exact cache that keeps the first keys and values of each layer as they came."""

    prompt: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx not in self.prompt:
            self.prompt[layer_idx] = (key_states.detach().clone(), value_states.detach().clone())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def find_layers(model: nn.Module) -> nn.ModuleList | None:
    """Return the list of the decoder's layers, or None where that is not clear."""
    count = decoder_config(model.config).num_hidden_layers
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and count > 0
    ]
    # lists of parts (one expert or one adapter per layer) have no attention inside
    found = [
        layers
        for layers in found
        if all(
            any("attn" in n or "attention" in n for n, _ in one.named_modules()) for one in layers
        )
    ]
    return found[0] if len(found) == 1 else None


@torch.no_grad()
def record(
    model: Any,
    ids: torch.Tensor,
    prompt_tokens: int,
    options: dict[str, Any],
    layers: nn.ModuleList | None,
) -> Recording:
    """Run a text through exact pages, in the chunks that every paged cache of these options is read in.

    Args:
        ids: [tokens], int64, on the model's device.
        prompt_tokens: leading tokens, which are not scored; at least 1.
        options: CacheConfig's, without formats.
        layers: what to record the outputs of; None records logits alone.
    Raises: ValueError where prompt_tokens leaves nothing to score.
    """
    cache = _RecordingCache(model.config, **options)
    cache.prompt = {}
    pieces: list[list[Any]] = [[] for _ in layers or ()]
    logits = []
    with ExitStack() as stack:
        for index, layer in enumerate(layers or ()):
            hook = layer.register_forward_hook(
                lambda module, args, output, index=index: pieces[index].append(output)
            )
            stack.callback(hook.remove)
        for _, found in forced_logits(model, ids, cache, prompt_tokens):
            logits.append(found)
    made = Recording(ids, prompt_tokens, torch.cat(logits))
    whole = all(isinstance(layer, PagedLayer) for layer in cache.layers)
    plain = all(
        isinstance(one, torch.Tensor) and one.ndim == 3 for outputs in pieces for one in outputs
    )
    if layers is not None and whole and plain and len(cache.prompt) == len(layers):
        made.prompt = [cache.prompt[index] for index in range(len(layers))]
        made.outputs = [torch.cat(outputs[1:], 1) for outputs in pieces]  # the first is the prompt
    return made


def rerun(
    model: Any,
    recording: Recording,
    cache: PagedCache,
    lowest: int,
    layers: nn.ModuleList | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield what `forced_logits` would yield for a cache that is exact below layer `lowest`.

    Args:
        cache: an empty cache of the options that were recorded, formats apart.
        layers: those of the model; None runs all of it.
    Yields: the position of the chunk's first token, and fp32 logits [chunk, vocab].
    """
    if layers is None or not recording.outputs:
        yield from forced_logits(model, recording.ids, cache, recording.prompt_tokens)
        return
    with torch.no_grad():
        for index in range(lowest, len(layers)):
            cache.update(*recording.prompt[index], index)
        position, first = recording.prompt_tokens, recording.prompt_tokens
        while position < len(recording.ids):
            end = min(len(recording.ids), position + next_chunk(cache, position))
            below = recording.outputs[lowest - 1][:, position - first : end - first]
            with _skipped(layers[:lowest], below):
                out = model(
                    recording.ids[None, position:end],
                    past_key_values=cache,
                    use_cache=True,
                    **_positions(model, recording.ids, position, end),
                )
            yield position, out.logits[0].float()
            position = end


def _positions(model: Any, ids: torch.Tensor, start: int, end: int) -> dict[str, torch.Tensor]:
    """Return the positions of tokens for a model that would else ask a layer that has seen none."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(start, end, device=ids.device)[None]}


@contextmanager
def _skipped(layers: Iterable[nn.Module], output: torch.Tensor) -> Iterator[None]:
    """Let each of `layers` give `output` without computing anything."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return output

    kept: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for layer in layers:
            kept.append((layer, vars(layer).get("forward")))  # accelerate's hooks put one there
            layer.forward = forward
        yield
    finally:
        for layer, before in kept:
            if before is None:
                del layer.forward
            else:
                layer.forward = before
