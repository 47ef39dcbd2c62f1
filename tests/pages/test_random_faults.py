"""Long random runs of operations on caches that share pages, with exceptions thrown into them, against plain caches."""

import copy
import gc
import random
from collections import Counter

import pytest
import torch
from fault_points import throw
from test_sliding import make as make_sliding
from tiny_models import make_model
from transformers import DynamicCache

import kv_hf
from kv_hf.errors import InterruptedForwardError

# what is thrown into a generator that is being closed is ignored by Python, and said
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PAGE, WORDS, LONGEST = 16, 50, 260


class World:
    """What caches of one model hold follows from their tokens: `truth` is a cache that nothing is thrown into."""

    def __init__(self, seed, keys, sliding, tmp_path):
        self.rng, self.keys, self.path = random.Random(seed), keys, tmp_path / "cache.safetensors"
        self.model = make_sliding("gemma3", 24) if sliding else make_model("llama")
        self.config, self.sliding = self.model.config, sliding
        self.layers = self.config.num_hidden_layers
        shape = (2, WORDS, self.config.num_key_value_heads, self.config.head_dim)
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randn(shape, generator=generator)
        self.places = torch.randn((2, 400, *shape[2:]), generator=generator)
        self.store = None if sliding else kv_hf.PrefixStore(max_bytes=self.rng.choice([1, 10**6]))
        self.text = [self.rng.randrange(WORDS) for _ in range(400)]
        self.twins = [Twin(self) for _ in range(2)]
        self.counts, self.thrown = Counter(), Counter()

    def states(self, rows, first, layer):
        """Keys and values [2, rows, heads, columns, dim] of the tokens `rows` from column `first` on."""
        ids = torch.tensor([row[first:] for row in rows])
        found = (
            self.words[:, ids] * (layer + 1) + self.places[:, first : first + ids.shape[1]][:, None]
        )
        return found.transpose(2, 3)

    def make(self):
        """Make an empty cache, often one that shares pages or has them elsewhere."""
        kind = self.rng.choice(["plain", "disk", "some on disk", "store", "store"])
        options = {
            "disk": {"offload": "disk"},
            "some on disk": {
                "offload": "disk",
                "device_bytes": 204_800 if self.keys == "exact" else 38_400,
            },
            "store": {"prefix_store": self.store},
        }.get(kind, {})
        return kv_hf.PagedCache(self.config, page_size=PAGE, keys=self.keys, **options)

    def make_truth(self):
        if self.keys == "exact":
            return DynamicCache(config=self.config)
        return kv_hf.PagedCache(self.config, page_size=PAGE, keys=self.keys)

    def append(self, cache, rows, first):
        for layer in range(self.layers):
            cache.update(*self.states(rows, first, layer), layer)

    # -- one operation ---------------------------------------------------------------------------------------

    def step(self):
        kind = self.rng.choice(
            ["append"] * 6
            + ["crop", "reorder", "select", "repeat", "reset", "fork", "drop"]
            + ["share", "share", "save"]
        )
        self.counts[kind] += 1
        twin = self.rng.choice(self.twins)
        if kind == "fork":
            self.fork(twin)
        elif kind == "drop":
            self.twins.remove(twin)
            del twin
            self.twins += [] if len(self.twins) > 1 else [Twin(self)]
        elif kind == "share":
            self.share()
        elif kind == "save":
            self.save(twin)
        else:
            self.change(twin, kind)

    def run(self, kind, call):
        """Call, often throwing into it; return whether something was thrown."""
        if self.rng.random() < 0.5:
            call()
            return False
        error = self.rng.choice([KeyboardInterrupt, MemoryError])
        place = throw(call, int(2 ** self.rng.uniform(0, 11.5)), error)
        self.thrown[kind] += bool(place)
        return bool(place)

    def change(self, twin, kind):
        operation, rows = twin.draw(kind)
        if operation is None:
            return
        after = copy.deepcopy(twin.truth) if kind != "reset" else self.make_truth()
        if kind != "reset":
            operation(after)
        if self.run(kind, lambda: operation(twin.paged)):
            if twin.holds(after):
                pass
            elif twin.holds(twin.truth):
                try:
                    operation(twin.paged)
                except InterruptedForwardError:
                    return twin.reset()
            else:  # it says so by itself, not only when it is compared
                if twin.whole():  # a first forward that did not reach all layers: the layers that it missed say so
                    with pytest.raises(InterruptedForwardError):
                        operation(twin.paged)
                return twin.reset()
        twin.truth, twin.rows = after, rows
        return None

    def fork(self, twin):
        copies = []
        self.run("fork", lambda: copies.append(copy.deepcopy(twin.paged)))
        if copies:
            other = copy.copy(twin)
            other.paged, other.truth = copies[0], copy.deepcopy(twin.truth)
            self.twins = [*self.twins[-3:], other]

    def share(self):
        """Begin a batch of prompts with what the store knows of them, and keep their pages."""
        if self.store is None:
            return
        twin = Twin(
            self,
            kv_hf.PagedCache(self.config, page_size=PAGE, keys=self.keys, prefix_store=self.store),
        )
        length = self.rng.randrange(30, 150)
        rows = []
        for _ in range(self.rng.randint(1, 3)):
            known = self.rng.randrange(length)
            rest = [self.rng.randrange(WORDS) for _ in range(length - known)]
            rows.append(self.text[:known] + rest)

        def begin():
            seen = self.store.attach(twin.paged, (), rows, [0] * len(rows))
            self.append(twin.paged, rows, seen)
            self.store.add(twin.paged, rows)

        if self.run("share", begin):
            twin.paged.reset()
        else:
            twin.rows = rows
            self.append(twin.truth, rows, 0)
        self.twins = [*self.twins[-3:], twin]
        if self.rng.random() < 0.1:
            self.run("clear", self.store.clear)

    def save(self, twin):
        if not twin.rows:
            return
        if self.run("save", lambda: twin.paged.save(self.path, self.model)):
            return
        loaded = []
        kind = type(twin.paged)
        if not self.run("load", lambda: loaded.append(kind.load(self.path, self.model))):
            twin.paged = loaded[0]

    def check(self, twins):
        for twin in twins:
            twin.paged.check_integrity()
            assert twin.holds(twin.truth)


class Twin:
    """A paged cache, and a plain one to which the same has happened."""

    def __init__(self, world, paged=None):
        self.world, self.paged, self.truth, self.rows = (
            world,
            paged or world.make(),
            world.make_truth(),
            [],
        )

    def reset(self):
        self.paged.reset()
        self.truth, self.rows = self.world.make_truth(), []

    def draw(self, kind):
        """Return an operation on a cache, and the rows behind it; (None, None) where it makes no sense."""
        world, rng, rows = self.world, self.world.rng, self.rows
        seen = len(rows[0]) if rows else 0
        if kind == "reset":
            return (lambda cache: cache.reset()), []
        if kind == "append":
            if seen > LONGEST:
                return (lambda cache: cache.reset()), []
            before = rows or [[] for _ in range(rng.randint(1, 3))]
            count = rng.choice([1, 1, 2, 5, 17, 40, 90])
            rows = [row + [rng.randrange(WORDS) for _ in range(count)] for row in before]
            return (lambda cache: world.append(cache, rows, seen)), rows
        if not seen:
            return None, None
        if kind == "crop":
            if world.sliding or seen < 2:
                return None, None  # both refuse, in their ways
            count = rng.randrange(1, seen)
            return (lambda cache: cache.crop(-count)), [row[: seen - count] for row in rows]
        if kind == "repeat":
            if len(rows) > 3:
                return None, None
            return (lambda cache: cache.batch_repeat_interleave(2)), [
                r for r in rows for _ in (0, 1)
            ]
        if kind == "reorder":
            order = [rng.randrange(len(rows)) for _ in rows]
            return (lambda cache: cache.reorder_cache(torch.tensor(order))), [
                rows[i] for i in order
            ]
        kept = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        return (lambda cache: cache.batch_select_indices(torch.tensor(kept))), [
            rows[i] for i in kept
        ]

    def whole(self):
        try:
            self.paged.check_integrity()
        except InterruptedForwardError:
            return False
        return True

    def holds(self, truth):
        """Say whether the paged cache is whole, and holds what `truth` does."""
        if not self.whole():
            return False
        for ours, theirs in zip(self.paged.layers, truth.layers, strict=True):
            if ours.get_seq_length() != theirs.get_seq_length():
                return False
            if not theirs.get_seq_length():
                continue
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                if not torch.equal(a, b):
                    return False
        return True


def run(world, operations):
    for number in range(operations):
        world.step()
        world.check(world.twins if number % 10 == 0 else world.rng.sample(world.twins, 1))
    arenas = [twin.paged.arena for twin in world.twins]
    world.twins.clear()
    gc.collect()
    for arena in arenas:
        held = 0
        if world.store is not None and arena is world.store.arena:
            held = world.store.stats().pages
        assert arena.num_held == held
    if world.store is not None:
        world.store.clear()
        assert world.store.arena.num_held == 0


@pytest.mark.parametrize(("keys", "sliding"), [("exact", False), ("int4", False), ("exact", True)])
def test_random_operations_with_exceptions_equal_plain_caches(keys, sliding, tmp_path):
    run(World(0, keys, sliding, tmp_path), 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(
    ("keys", "sliding"), [("exact", False), ("int4", False), ("exact", True), ("int4", True)]
)
def test_two_thousand_random_operations_with_exceptions(keys, sliding, seed, tmp_path):
    world = World(seed, keys, sliding, tmp_path)
    run(world, 2000)
    print(
        f"\n{keys}, sliding={sliding}: {sum(world.counts.values())} operations {dict(world.counts)}, "
        f"thrown into {sum(world.thrown.values())}: {dict(world.thrown)}"
    )
