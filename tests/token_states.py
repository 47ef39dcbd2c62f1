"""Caches without a model: keys and values that follow from tokens and places, as those of a model do."""

import functools

import torch
import transformers

PAGE, WINDOW, HEADS, DIM = 16, 24, 2, 32
VOCABULARY = torch.randn(2, 50, HEADS, DIM, generator=torch.Generator().manual_seed(3))
PLACES = torch.randn(2, 2000, HEADS, DIM, generator=torch.Generator().manual_seed(4))


def config_of(kinds):
    return transformers.Gemma3TextConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=WINDOW,
    )


FULL = config_of(["full_attention"] * 2)
HYBRID = config_of(["sliding_attention", "full_attention", "sliding_attention"])


def states(rows, padding, first, count, layer):
    """Keys and values [2, rows, heads, count, dim] of columns `first` and later; zeros where they are padding."""
    out = torch.zeros(2, len(rows), HEADS, count, DIM)
    for index, (tokens, start) in enumerate(zip(rows, padding, strict=True)):
        for column in range(max(first, start), first + count):
            place = column - start
            state = VOCABULARY[:, tokens[place]] * (layer + 1) + PLACES[:, place]
            out[:, index, :, column - first] = state
    return out


@functools.lru_cache(maxsize=256)
def _columns_of(rows, first, last, layer):
    return states([row[:last] for row in rows], [0] * len(rows), first, last - first, layer)


def feed(cache, rows, first, last):
    """Append columns first .. last - 1 of the token lists `rows` to all layers, as one forward."""
    for layer in range(len(cache.layers)):
        cache.update(*_columns_of(tuple(map(tuple, rows)), first, last, layer), layer)


def text(seed, length=160):
    return [(seed * 7 + place * (3 + seed)) % 50 for place in range(length)]


def dense(cache):
    """All that the cache holds, as tensors of its own; None for layers without tokens."""
    found = []
    for layer in cache.layers:
        held = int(layer.get_seq_length())
        found += [layer.keys.clone(), layer.values.clone()] if held else [None, None]
    return found


def same(a, b):
    """Say whether two results of `dense` are equal."""
    return len(a) == len(b) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )
