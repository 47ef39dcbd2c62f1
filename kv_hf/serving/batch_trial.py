"""The trial of a model before it serves: two requests in one forward must come out as each of them alone."""

from typing import Any

import torch

from ..errors import UnsupportedModelError
from .batch_cache import BatchCache

# tokens of two requests, and how many of them a first forward takes
_REQUESTS = {"trial 0": [1, 4, 2, 5, 3], "trial 1": [3, 5, 1, 2]}
_FIRST = {"trial 0": 3, "trial 1": 2}
# of the logits' standard deviation, root mean square: attention that mixes two requests up is off by 0.5 and more
_MOST = {torch.float64: 0.01, torch.float32: 0.02}
_MOST_OTHERS = 0.2  # half precision rounds in another order


class _Trial:
    """A request, as far as the cache asks for one."""

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        self.request_id, self.initial_tokens = request_id, tokens
        self.held = 0

    def current_len(self) -> int:
        """Return the tokens that the cache holds."""
        return self.held


def try_model(model: Any, cache: BatchCache) -> None:
    """Run two small requests through `cache` together, and compare with each alone; the cache is empty again afterwards.

    Raises: UnsupportedModelError where an attention layer did not get the cache, or requests influence each other.
    """
    name = type(model).__name__
    most = model.config.get_text_config(decoder=True).vocab_size - 1
    some = list(_REQUESTS.items())[: cache.room.rows]
    texts = {one: [min(token, most) for token in tokens] for one, tokens in some}
    states = [_Trial(request_id, tokens) for request_id, tokens in texts.items()]
    found: list[torch.Tensor] = []
    reached: set[int] = set()
    try:
        for counts in (_FIRST, {one: len(texts[one]) - _FIRST[one] for one in texts}):
            found.append(_forward(model, cache, states, texts, counts, reached))
    except UnsupportedModelError:
        raise
    except Exception as error:
        _check_reached(name, cache, cache.layers_reached)
        raise UnsupportedModelError(
            f"{name} cannot take the tokens of several requests in one row, as continuous batching passes them: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        cache.free_all_requests()
    _check_reached(name, cache, reached)
    alone = [
        model(input_ids=_ids(model, tokens), use_cache=False).logits[0] for tokens in texts.values()
    ]
    expected = [
        torch.cat([one[: _FIRST[name]] for one, name in zip(alone, texts, strict=True)]),
        torch.cat([one[_FIRST[name] :] for one, name in zip(alone, texts, strict=True)]),
    ]
    far = max(
        float((one - other).float().square().mean().sqrt() / other.float().std().clamp(min=1e-6))
        for one, other in zip(found, expected, strict=True)
    )
    if not far <= _MOST.get(model.dtype, _MOST_OTHERS):
        raise UnsupportedModelError(
            f"{name} computes other numbers for two requests in one row than for each alone (logits differ by {far:.2g} of their "
            "standard deviation): its attention or its positions take the row for one text. Use generate()"
        )


def _check_reached(name: str, cache: BatchCache, reached: set[int]) -> None:
    """Raise UnsupportedModelError where some layers' attention did not get the cache."""
    missing = sorted(set(cache.stores) - reached)
    if missing:
        raise UnsupportedModelError(
            f"{name} does not hand continuous batching's cache down to its attention (layers {missing} did not get it), so that "
            "requests would not find their own tokens; use generate()"
        )


def _forward(
    model: Any,
    cache: BatchCache,
    states: list[_Trial],
    texts: dict[str, list[int]],
    counts: dict[str, int],
    reached: set[int],
) -> torch.Tensor:
    """Run the next `counts` tokens of the requests in one row; return the logits [tokens, vocabulary]."""
    ids: list[int] = []
    positions: list[int] = []
    for state in states:
        request_id, held, count = state.request_id, state.held, counts[state.request_id]
        if not cache.can_store_request_tokens(state, count):
            raise UnsupportedModelError(
                "the cache has no room for two short requests; give it more"
            )
        cache.extend_read_and_write_indices(request_id, held, count, None, [])
        ids += texts[request_id][held : held + count]
        positions += range(held, held + count)
        state.held += count
    cache.begin(len(ids))
    row = _ids(model, ids)
    out = model(
        input_ids=row,
        position_ids=torch.tensor([positions], device=row.device),
        attention_mask=row.new_zeros((1, 1, len(ids), 0), dtype=torch.bool),
        use_cache=False,
        cache=cache,
    )
    reached |= cache.layers_reached
    logits: torch.Tensor = out.logits[0]
    return logits


def _ids(model: Any, tokens: list[int]) -> torch.Tensor:
    return torch.tensor([tokens], device=model.device)
