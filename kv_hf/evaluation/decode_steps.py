"""Whole decode steps of a model with one cache: filling it, stepping, and what it holds."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..cache.model_shape import decoder_config, latent_rank, page_sizes
from ..cache.paged_cache import PagedCache
from ..spec import predict_memory
from .cache_kinds import CacheKind, held_bytes
from .memory_meter import AllocatedMeter, ResidentMeter
from .timing import Budget, interleave, timed

WARMUP = 2


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Return (heads, key channels, value channels) of what a decoder's layers cache; latents have one head."""
    config = decoder_config(config)
    sizes = page_sizes(config)
    if sizes is None:
        raise ValueError(f"the config of {config.model_type} states no single size of a head")
    heads = 1 if latent_rank(config) is not None else config.num_key_value_heads
    return heads, sizes["key_dim"], sizes["value_dim"]


def fill_random(cache: Any, model: Any, batch: int, tokens: int, seed: int = 0) -> None:
    """Put `tokens` random keys and values into every layer, the same for every cache of the same sizes.

    A prefill of a long prompt takes minutes on a CPU, and what a step costs does not depend on the numbers.
    """
    heads, *dims = kv_shape(model.config)
    numbers = torch.Generator(model.device).manual_seed(seed)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for index in range(layers):
        keys, values = (
            torch.randn(
                (batch, heads, tokens, dim),
                generator=numbers,
                device=model.device,
                dtype=model.dtype,
            )
            for dim in dims
        )
        cache.update(keys, values, index)


def predicted_bytes(cache: Any) -> int | None:
    """Return what `predict_memory` says of a paged cache's tokens, None for other caches."""
    if not isinstance(cache, PagedCache):
        return None
    return predict_memory(
        [layer.spec for layer in cache.paged_layers if layer.spec is not None],
        [cache.group.tokens(row) for row in cache.group.rows],
        sink_tokens=cache.options.sink_tokens,
        recent_tokens=cache.options.recent_tokens,
    ).total


def kernel_of(cache: Any) -> str | None:
    """Return the name of the kernel that a paged cache's attention runs on, None for other caches."""
    if not isinstance(cache, PagedCache):
        return None
    store = cache.paged_layers[0].store
    store = getattr(store, "base", store)  # a preallocated store wraps the plain one
    return None if store is None else store.kernel.name


class Decoding:
    """A model that decodes greedily with one cache.

    Args:
        prompt: [batch, tokens], int64; its last token is the first that a step takes. With `mask` (0 = left
            padding, the shape of the prompt) the rows may have different lengths.
        fill: "prompt" for a real prefill, "random" for random keys and values in its place.
        room: steps that will be taken, for caches that must know.
    """

    def __init__(
        self,
        model: Any,
        kind: CacheKind,
        prompt: torch.Tensor,
        *,
        fill: str = "prompt",
        room: int = 64,
        mask: torch.Tensor | None = None,
    ) -> None:
        self.model, self.kind, self.device = model, kind, prompt.device
        self.mask = mask
        self.token = prompt[:, -1:]
        self.prefill_ms: float | None = None
        rss, allocated = _rss(), self._allocated()
        self.use()
        self.cache = kind.make(model.config, prompt.shape[1] + room + 8)
        if isinstance(self.cache, PagedCache):
            self.cache.observe_padding(mask)
        self._reset_peak()
        if fill == "random":
            fill_random(self.cache, model, *prompt.shape)
        else:
            self.prefill_ms = timed(lambda: self._forward(prompt, mask), self.device)
        self.peak_bytes = self._peak(allocated)
        self.own_bytes = self._allocated() - allocated
        self.transient_bytes: int | None = None
        self.rss_bytes = _rss() - rss

    def use(self) -> None:
        """Give the model the attention that this cache is used with; not part of a step's time."""
        now = self.model.config.get_text_config(decoder=True)._attn_implementation
        if now != self.kind.attention:
            self.model.set_attn_implementation(self.kind.attention)

    def before(self) -> None:
        """Prepare a step: attention, and one more column of the mask."""
        self.use()
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)

    def step(self) -> torch.Tensor:
        """Decode one token; return the logits [batch, vocab]."""
        logits = self._forward(self.token, self.mask)
        self.token = logits.argmax(-1, keepdim=True)
        return logits

    def note_peak(self) -> None:
        """Take a step and note what it allocated at most: `transient_bytes`, None where the system does not tell.

        On CUDA `peak_bytes` rises to that, the cache included.
        """
        self.before()
        cuda = self.device.type == "cuda"
        meter = AllocatedMeter(self.device) if cuda else ResidentMeter()
        self.step()
        self.transient_bytes = meter.peak()
        if cuda:
            self.peak_bytes = max(self.peak_bytes, self.own_bytes + (self.transient_bytes or 0))

    @property
    def tokens(self) -> int:
        """Columns that the cache holds."""
        return int(self.cache.get_seq_length())

    @property
    def kv_bytes(self) -> int:
        """Bytes that the cache holds."""
        return held_bytes(self.cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        more: dict[str, Any] = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            more = {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **more)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self, base: int) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self.device) - base


def random_prompt(vocab: int, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return random token ids [batch, tokens], the same on every device."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab, (batch, tokens), generator=numbers).to(device)


def _rss() -> int:
    """Return the resident bytes of this process (0 where /proc does not tell)."""
    path = Path("/proc/self/statm")
    if not path.is_file():
        return 0
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step_times(
    found: Mapping[str, Decoding], steps: int, budget: Budget | None = None
) -> dict[str, list[float]]:
    """Return the milliseconds of `steps` interleaved decode steps of each, behind WARMUP others."""
    device = next((decoding.device for decoding in found.values()), torch.device("cpu"))
    return interleave(
        {name: decoding.step for name, decoding in found.items()},
        steps,
        device,
        warmup=WARMUP,
        budget=budget,
        before=lambda name: found[name].before(),
    )
