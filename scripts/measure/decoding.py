"""Decode steps of a model with one cache, and what they take in time and memory."""

from typing import Any

import torch

from kv_hf.cache.model_shape import decoder_config, latent_rank, page_sizes
from kv_hf.evaluation.caches import CacheKind, held_bytes
from kv_hf.evaluation.memory import Meter, timed


def fill_random(cache: Any, model: Any, batch: int, tokens: int, seed: int = 0) -> None:
    """Put `tokens` random keys and values into every layer, the same for every cache of the same sizes.

    A prefill of a long prompt takes minutes on a CPU, and what a step costs does not depend on the numbers.

    Raises: ValueError for a model whose layers differ in their sizes.
    """
    config = decoder_config(model.config)
    sizes = page_sizes(config)
    if sizes is None:
        raise ValueError(f"the config of {config.model_type} states no single size of a head")
    heads = 1 if latent_rank(config) is not None else config.num_key_value_heads
    like = {"device": model.device, "dtype": model.dtype}
    numbers = torch.Generator(model.device).manual_seed(seed)
    for index in range(config.num_hidden_layers):
        states = [
            torch.randn((batch, heads, tokens, sizes[side]), generator=numbers, **like)
            for side in ("key_dim", "value_dim")
        ]
        cache.update(*states, index)


class Decoding:
    """A model that decodes greedily with one cache.

    Args:
        prompt: [batch, tokens], int64; its last token is the first that a step takes.
        fill: "prompt" for a real prefill, "random" for random keys and values in its place.
        room: steps that will be taken, for caches that must know.

    Attributes:
        prefill_ms: of a real prefill, None of a random one.
        token: [batch, 1], what the next step takes.
        transient_bytes: see `note_peak`.
    """

    def __init__(
        self,
        model: Any,
        kind: CacheKind,
        prompt: torch.Tensor,
        fill: str = "prompt",
        room: int = 64,
    ) -> None:
        self.model, self.kind, self.device = model, kind, prompt.device
        self.token = prompt[:, -1:]
        self.prefill_ms: float | None = None
        self.transient_bytes: int | None = None
        self.before()
        self.cache = kind.make(model.config, prompt.shape[1] + room + 8)
        if fill == "random":
            fill_random(self.cache, model, *prompt.shape)
        else:
            self.prefill_ms = timed(lambda: self._forward(prompt), self.device)

    def before(self) -> None:
        """Give the model the attention that this cache is used with; not part of a step's time."""
        now = self.model.config.get_text_config(decoder=True)._attn_implementation
        if now != self.kind.attention:
            self.model.set_attn_implementation(self.kind.attention)

    def step(self) -> torch.Tensor:
        """Decode one token; return the logits [batch, vocab]."""
        logits = self._forward(self.token)
        self.token = logits.argmax(-1, keepdim=True)
        return logits

    def note_peak(self) -> None:
        """Take a step and note the memory that it took at most: `transient_bytes`, None where the system does not tell."""
        self.before()
        meter = Meter(self.device)
        self.step()
        self.transient_bytes = meter.peak()

    @property
    def tokens(self) -> int:
        """Columns that the cache holds."""
        return int(self.cache.get_seq_length())

    @property
    def kv_bytes(self) -> int:
        """Bytes that the cache holds."""
        return held_bytes(self.cache)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]
