"""Read the next-token distributions of a text through a cache, as a user's decoding would see them.

The protocol: the prompt is one forward on an empty cache (exact attention, like any prefill); from then on
every scored token attends to what a decode step at its position would attend to: sealed pages encoded,
sinks and tail exact. A forward over several tokens gives the same as one token at a time as long as no page
becomes full inside it, so chunks end where pages do; a test compares both.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import (
    Cache,
    DynamicCache,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import QuantizedLayer

from ..cache.paged_cache import PagedCache
from ..config_reading import is_reading_part
from ..geometry import Geometry
from .prefill import Prefill, last_logits

EXACT_CHUNK = (
    64  # tokens per forward where a token's stored form does not depend on what comes behind it
)
# layers of a QuantizedCache that encode each token as it comes; transformers has them from 5.20 or so on
PER_TOKEN = tuple(
    filter(None, (getattr(cache_utils, name, None) for name in ("Fp8QuantizedLayer",)))
)


def next_chunk(cache: Cache, position: int) -> int:
    """Return how many tokens from `position` on may go into one forward without changing a result.

    Pages are sealed when they are full. A forward of several tokens makes one choice of pages for all of them, and one
    of many reads every page: where a cache chooses pages, tokens go one by one, as they do in `generate`. transformers'
    quanto and hqq caches encode everything anew when `residual_length` exact tokens have gathered; its fp8 cache encodes
    each token as it comes, and exact caches none, so that any chunk will do there. A cache of another class is read token
    by token.
    """
    if isinstance(cache, PagedCache):
        options = cache.options
        places = Geometry(options.page_size, options.sink_tokens, options.recent_tokens)
        room = places.slots - places.exact(position)
        if is_reading_part(options):
            room = min(room, max(1, options.read_from - 1 - position))  # so far all is read
        return room
    if type(cache) in (DynamicCache, StaticCache):
        return EXACT_CHUNK
    if type(cache) is QuantizedCache:
        layer = cache.layers[0]
        if not isinstance(layer, QuantizedLayer):
            return EXACT_CHUNK if type(layer) in PER_TOKEN else 1
        tail = layer.keys
        held = tail.shape[-2] if tail is not None and tail.dim() == 4 else 0
        # the token that fills the residual goes alone: transformers before 5.23 looks at the length before a forward
        return max(1, layer.residual_length - 1 - held)
    return 1


@torch.no_grad()
def decoded_logits(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    position: int,
    chunk: Callable[[Cache, int], int] = next_chunk,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position, logits) of token_ids[position:], read through a cache that holds what is before them.

    Args and yields are those of `forced_logits`.
    """
    while position < len(token_ids):
        end = min(len(token_ids), position + chunk(cache, position))
        out = model(token_ids[None, position:end], past_key_values=cache, use_cache=True)
        yield position, out.logits[0].float()
        position = end


@torch.no_grad()
def forced_logits(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    prompt_tokens: int,
    chunk: Callable[[Cache, int], int] = next_chunk,
    prefill: Prefill | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position, logits) of the scored part of one text, chunk by chunk.

    Args:
        model: a causal language model, in eval mode.
        token_ids: [tokens], int64, on the model's device.
        cache: an empty cache; it holds the text afterwards.
        prompt_tokens: tokens of the prompt, which are not scored; at least 1.
        chunk: tokens per forward at a position (see `next_chunk`).
        prefill: of this prompt, from an earlier run; None computes it.
    Yields: the position of the chunk's first token, and fp32 logits [chunk, vocab]: row i predicts the token
        behind position + i.
    """
    if not 1 <= prompt_tokens < len(token_ids):
        raise ValueError(
            f"prompt_tokens must be between 1 and {len(token_ids) - 1}, got {prompt_tokens}"
        )
    if prefill is None:
        last_logits(model, token_ids[None, :prompt_tokens], cache)
    else:
        prefill.fill(cache)
    yield from decoded_logits(model, token_ids, cache, prompt_tokens, chunk)
