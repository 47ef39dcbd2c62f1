"""Caches and layers without a model: keys and values that follow from tokens and places, and pages off a device that is not there."""

import functools

import torch
import transformers

from kv_hf.pages import offload
from kv_hf.pages.cpu_memory import DiskMemory, HostMemory
from kv_hf.pages.staging import Copies
from kv_hf.pages.storage import carve, carved_bytes

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


CPU = torch.device("cpu")


class LateCopies(Copies):
    """Two buffers, and copies that run as late as they may: when a kernel waits for them."""

    late = True

    def __init__(self):
        super().__init__(CPU)
        self.buffers = 2
        self.waiting, self.kept = [], []

    def mark(self):
        return None

    def run(self, copy, after):
        self.waiting.append(copy)
        if not self.late:
            self.wait()
        return "running"

    def keep(self, target):
        self.kept.append(target.data_ptr())

    def join(self, event):
        if event is not None:
            self.wait()

    def wait(self):
        while self.waiting:
            self.waiting.pop(0)()


class EagerCopies(LateCopies):
    """Two buffers, and copies that run as early as they may."""

    late = False


class FakeLayer:
    """An offloaded layer of a few pages."""

    def __init__(self, layer_idx, spec, pages=12):
        self.layer_idx, self.spec, self.written = layer_idx, spec, None
        self.host = HostMemory()
        self.sides = carve(self.host.allocate(carved_bytes(spec, pages)), spec, pages)

    def fetch(self, runs, targets):
        for side, fields in zip(self.sides, targets, strict=True):
            self.host.fetch(side, runs, fields)

    def expect(self, pages):
        raise AssertionError("there are two buffers")


def offload_to(place, monkeypatch):
    """Return options that offload pages: "disk", or through two buffers as on a GPU, copied "eager" or "late"."""
    if place == "disk":
        monkeypatch.setattr(
            DiskMemory, "piece_bytes", 5000
        )  # a few pages of these layers at a time
        return {"offload": "disk"}
    copies = {"eager": EagerCopies, "late": LateCopies}[place]
    monkeypatch.setattr(offload, "Copies", lambda device: copies())
    monkeypatch.setattr(offload.OffloadMemory, "check_device", lambda self, device: None)
    return {"offload": "cpu"}
