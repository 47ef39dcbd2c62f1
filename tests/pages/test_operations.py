"""Long random runs of everything that can happen to a cache, against DynamicCaches that undergo the same."""

import copy
import gc
import random

import pytest
import rounding
import torch
import transformers

import kv_hf
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.dispatch import paged_attention

PAGE, WINDOW, HEADS, DIM = 16, 24, 2, 32
VOCABULARY = torch.randn(2, 50, HEADS, DIM, generator=torch.Generator().manual_seed(3))
PLACES = torch.randn(2, 2000, HEADS, DIM, generator=torch.Generator().manual_seed(4))

# two in `make test`, the others in `make test-all`
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]


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
    """Keys and values [2, rows, heads, count, dim] that follow from tokens and places, as those of a model do."""
    out = torch.zeros(2, len(rows), HEADS, count, DIM)
    for index, (tokens, start) in enumerate(zip(rows, padding, strict=True)):
        for column in range(max(first, start), first + count):
            place = column - start
            state = VOCABULARY[:, tokens[place]] * (layer + 1) + PLACES[:, place]
            out[:, index, :, column - first] = state
    return out


class Pair:
    """A paged cache, the DynamicCache that it must equal, and the tokens of its rows."""

    def __init__(self, config, rng, recording, **options):
        self.config, self.rng, self.recording = config, rng, recording
        self.paged = kv_hf.PagedCache(config, page_size=PAGE, **options)
        self.dynamic = transformers.DynamicCache(config=config)
        self.begin(rng.randint(1, 3))

    def begin(self, rows):
        self.rows = [[] for _ in range(rows)]
        self.padding = [self.rng.choice([0, 0, 7, 30]) for _ in range(rows)]
        self.padding[0] = 0
        self.seen = 0
        if self.recording:
            self.paged.activate_past_recording()
            self.dynamic.activate_past_recording()

    def copy(self):
        other = copy.copy(self)
        other.paged, other.dynamic = copy.deepcopy(self.paged), copy.deepcopy(self.dynamic)
        other.rows = [list(row) for row in self.rows]
        other.padding = list(self.padding)
        return other

    # -- operations: each does the same to both ------------------------------------------------------------

    def append(self):
        if self.seen > 300:
            return self.crop()
        count = self.rng.choice([1, 1, 1, 2, 5, 16, 17, 40, 90])
        first, self.seen = self.seen, self.seen + count
        for row, start in zip(self.rows, self.padding, strict=True):
            row += [self.rng.randrange(50) for _ in range(self.seen - max(first, start))]
        columns = torch.arange(self.seen)
        self.paged.learn_padding((columns >= torch.tensor(self.padding)[:, None]).long())
        for layer in range(len(self.paged.layers)):
            keys, values = states(self.rows, self.padding, first, count, layer)
            ours = self.paged.update(keys, values, layer)
            theirs = self.dynamic.update(keys, values, layer)
            if first:
                self.attend(layer, ours, theirs, count)
        if self.recording:  # as assisted decoding does behind each of its forwards
            self.crop(at_most=count)

    def attend(self, layer, ours, theirs, count):
        view = ours[0].view_of_pages
        query = torch.randn(len(self.rows), HEADS, count, DIM)
        found = paged_attention(
            AttentionCall(query, view.kv, 0.2, sliding_window=view.sliding_window),
            kernel=view.kernel,
        )
        keys, values = theirs
        offset = self.seen - keys.shape[2]
        at = self.seen - count + torch.arange(count)[:, None]
        columns = offset + torch.arange(keys.shape[2])
        shown = (columns <= at) & (columns >= torch.tensor(self.padding)[:, None, None, None])
        if view.sliding_window:
            shown = shown & (columns > at - view.sliding_window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.double(), keys.double(), values.double(), attn_mask=shown, scale=0.2
        )
        real = torch.tensor(self.padding)[:, None] <= at.T
        real = real[:, None, :, None].expand_as(found)
        rounding.assert_close(found[real].double(), expected[real])

    def crop(self, at_most=None):
        most = self.seen if at_most is None else at_most
        if any(self.dynamic.is_sliding) and not self.recording:
            return  # tokens that left the window cannot come back: both refuse, in their ways
        count = self.rng.choice([0, 1, most // 2, most]) if self.rng.random() < 0.5 else 0
        if count >= self.seen and at_most is not None:
            count = 0
        if (self.recording and at_most is None) or not (self.recording or count):
            return
        if self.seen and count < self.seen:
            self.paged.crop(-count)
            self.dynamic.crop(-count)
            self.seen -= count
            for row, start in zip(self.rows, self.padding, strict=True):
                del row[max(0, self.seen - start) :]

    def take(self, sources):
        self.rows = [list(self.rows[source]) for source in sources]
        self.padding = [self.padding[source] for source in sources]

    def reorder(self):
        if self.seen:
            sources = [self.rng.randrange(len(self.rows)) for _ in self.rows]
            for cache in (self.paged, self.dynamic):
                cache.reorder_cache(torch.tensor(sources))
            self.take(sources)

    def select(self):
        if self.seen:
            kept = [self.rng.random() < 0.7 for _ in self.rows]
            if any(kept):
                for cache in (self.paged, self.dynamic):
                    cache.batch_select_indices(torch.tensor(kept))
                self.take([index for index, keep in enumerate(kept) if keep])

    def repeat(self):
        if self.seen and len(self.rows) <= 3:
            for cache in (self.paged, self.dynamic):
                cache.batch_repeat_interleave(2)
            self.take([index for index in range(len(self.rows)) for _ in range(2)])

    def reset(self):
        self.paged.reset()
        self.dynamic = transformers.DynamicCache(config=self.config)
        self.begin(self.rng.randint(1, 3))

    # -- what must hold after each -------------------------------------------------------------------------

    def check(self):
        self.paged.check_integrity()
        for ours, theirs in zip(self.paged.layers, self.dynamic.layers, strict=True):
            assert ours.get_seq_length() == theirs.get_seq_length() == self.seen
            if not self.seen:
                continue
            held = theirs.keys.shape[2]
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert torch.equal(a, b[:, :, b.shape[2] - held :])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["full", "hybrid", "full recording", "hybrid recording"])
def test_random_operations_equal_dynamic_cache(kind, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = HYBRID if "hybrid" in kind else FULL
    options = {"sink_tokens": rng.choice([0, 4]), "recent_tokens": rng.choice([0, 10])}
    pairs = [Pair(config, rng, "recording" in kind, **options)]
    operations = ["append"] * 6 + ["crop", "reorder", "select", "repeat", "reset", "copy", "drop"]
    for _ in range(60):
        pair = rng.choice(pairs)
        operation = rng.choice(operations)
        if operation == "copy" and len(pairs) < 3:
            pairs.append(pair.copy())
        elif operation == "drop" and len(pairs) > 1:
            pairs.remove(pair)
            pair = None
            gc.collect()
        elif operation not in ("copy", "drop"):
            getattr(pair, operation)()
        for other in pairs:
            other.check()
    pools = [pool for pair in pairs for pool in pair.paged.arena.pools.values()]
    del pair, other
    pairs.clear()
    gc.collect()
    assert not any(pool.holders for pool in pools)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sharing_of_prefixes(seed):
    """Caches come and go over one small store; what they hold must be what their tokens say."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    store = kv_hf.PrefixStore(max_bytes=rng.choice([1, 40 * 2 * 2 * HEADS * PAGE * DIM * 4]))
    texts = [[rng.randrange(50) for _ in range(150)] for _ in range(2)]
    live = []
    for _ in range(40):
        rows = []
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(texts)[: rng.randrange(150)]
            rows.append(text + [rng.randrange(50) for _ in range(rng.randint(1, 20))])
        width = max(map(len, rows))
        padding = [width - len(row) for row in rows]
        cache = kv_hf.PagedCache(FULL, page_size=PAGE, prefix_store=store)
        dynamic = transformers.DynamicCache(config=FULL)
        mask = torch.arange(width) >= torch.tensor(padding)[:, None]
        cache.learn_padding(mask.long())
        seen = store.attach(cache, (), rows, padding) if store._tree.roots else 0
        for layer in range(2):
            cache.update(*states(rows, padding, seen, width - seen, layer), layer)
            dynamic.update(*states(rows, padding, 0, width, layer), layer)
        store.add(cache, rows)
        live.append((cache, dynamic))
        if len(live) > 3:
            live.pop(rng.randrange(len(live)))
        if rng.random() < 0.1:
            store.clear()
        for ours, theirs in live:
            ours.check_integrity()
            for a, b in zip(ours.layers, theirs.layers, strict=True):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    del cache, ours, theirs, a
    live.clear()
    gc.collect()
    assert store.arena.num_held == store.stats().pages
    store.clear()
    assert store.arena.num_held == 0
