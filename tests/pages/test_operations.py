"""Random runs of everything that can happen to caches of every kind, exceptions included, against plain caches that undergo the same."""

import copy
import gc
import random
from collections import Counter
from itertools import pairwise

import pytest
import rounding
import tiny_latent
import torch
from faults import throw
from harness import slow
from tiny_models import make_model, make_sliding
from token_states import PAGE, offload_to
from transformers import DynamicCache

import kv_hf
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.dispatch import paged_attention
from kv_hf.errors import (
    CacheFileError,
    CacheMismatchError,
    DeviceBudgetError,
    InterruptedForwardError,
)

# what is thrown into a generator that is being closed is ignored by Python, and said
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
WORDS, LONGEST = 50, 260
OPERATIONS = [
    *["append"] * 6,
    *["share"] * 4,
    *["crop"] * 2,
    "reorder",
    "select",
    "repeat",
    "reset",
]
OPERATIONS += ["fork", "drop", "save", "keep"]
OTHERS = [*OPERATIONS, "restart", "weights"]  # into which nothing is thrown
MODELS = {
    "llama": lambda: make_model("llama"),
    "sliding": lambda: make_sliding("gemma3_text", 24),
    "latent": lambda: tiny_latent.make_model("deepseek_v3"),
}


class World:
    """What caches of one model hold follows from their tokens: `truth` is a cache that shares nothing, and that nothing is thrown into.

    Args:
        keys: "exact" is compared with DynamicCache, another format with a growing cache of pages.
        forwards: the model computes keys and values, cut at the same places for `truth`, whose bits are expected; tokens of
            "exact" are those of one forward, too. Else they are made up of tokens and places.
        recording: tokens of each forward may be taken back, as in assisted decoding.
        faults: exceptions are thrown into half of the operations.
        place: options that offload pages.
    """

    def __init__(
        self,
        seed,
        path,
        place,
        keys="exact",
        kind="llama",
        recording=False,
        faults=False,
        forwards=False,
    ):
        torch.manual_seed(seed)
        self.rng, self.keys, self.path, self.place = random.Random(seed), keys, path, place
        self.sliding, self.recording, self.faults = kind == "sliding", recording, faults
        self.model, self.forwards = MODELS[kind](), forwards
        self.weight = next(iter(self.model.parameters())).data[0, :1]
        self.state, self.known, self.hits = 0, set(), 0
        self.config = self.model.config
        self.layers = self.config.num_hidden_layers
        shape = (2, WORDS, self.config.num_key_value_heads, self.config.head_dim)
        self.words, self.places = torch.randn(shape), torch.randn(2, 400, *shape[2:])
        self.store = None if recording else self.make_store()
        self.text = [self.rng.randrange(WORDS) for _ in range(400)]
        # a row takes whole pages of a store, those of its recent tokens too; where these are exact, sums are taken in another order
        whole = self.store is not None and (keys != "exact" or forwards)
        recent = 0 if whole else self.rng.choice([0, 10])
        self.options = {"sink_tokens": self.rng.choice([0, 4]), "recent_tokens": recent}
        self.twins = [Twin(self) for _ in range(2)]
        self.counts, self.thrown, self.at = Counter(), Counter(), None

    def make_store(self):
        """Return a store of the folder, often one that keeps little."""
        most, room = self.rng.choice([1, 50_000, 10**6]), self.rng.choice([10**5, 10**8])
        folder = self.path.with_name("prefixes")
        return kv_hf.PrefixStore(most, folder=folder, folder_bytes=room)

    def states(self, rows, padding, first, layer):
        """Keys and values [2, rows, heads, columns, dim] of the tokens `rows` from column `first` on."""
        width = padding[0] + len(rows[0])
        out = torch.zeros(2, len(rows), width - first, *self.words.shape[2:])
        for index, (row, start) in enumerate(zip(rows, padding, strict=True)):
            new = torch.tensor(row[max(0, first - start) :], dtype=torch.long)
            if len(new):
                places = self.places[:, len(row) - len(new) : len(row)]
                out[:, index, -len(new) :] = self.words[:, new] * (layer + 1) + places
        return out.transpose(2, 3)

    def make(self, kind=None):
        """Make an empty cache, often one that shares pages, has them elsewhere or cannot grow."""
        kinds = ["plain", "offloaded", "some offloaded", "fixed", *["store"] * 2 * bool(self.store)]
        some = 204_800 if self.keys == "exact" else 38_400
        options = {
            "offloaded": self.place,
            "some offloaded": {**self.place, "device_bytes": some},
            "fixed": {"max_length": 800},
            "store": {"prefix_store": self.store},
        }.get(kind or self.rng.choice(kinds), {})
        return self.begin(self.plain(**options))

    def plain(self, **options):
        return kv_hf.PagedCache(
            self.config, page_size=PAGE, keys=self.keys, **self.options, **options
        )

    def make_truth(self):
        dense = self.keys == "exact" and not self.forwards
        return self.begin(DynamicCache(config=self.config) if dense else self.plain())

    def begin(self, cache):
        if self.recording:
            cache.activate_past_recording()
        return cache

    def append(self, cache, rows, padding, first, cut=False):
        """Append the columns from `first` on to all layers; return what their updates, or the model, gave.

        Args:
            cut: the model ends a forward where a page ends.
        """
        if self.forwards:
            return self.forward(cache, rows, padding, first, cut)
        if isinstance(cache, kv_hf.PagedCache):
            for group in cache.groups:
                group.observe_padding(real_columns(rows, padding).long())
        layers = range(self.layers)
        return [cache.update(*self.states(rows, padding, first, n), n) for n in layers]

    @torch.no_grad()
    def forward(self, cache, rows, padding, first, cut):
        """Return the logits [rows, columns, words] of the columns from `first` on; `cache` is None for one forward of all."""
        real = real_columns(rows, padding)
        ids, width = real.long(), real.shape[1]
        ids[real] = torch.tensor([token for row in rows for token in row])
        ends = range(self.options["sink_tokens"] + PAGE, width, PAGE) if cut else ()
        places = [first, *(end for end in ends if end > first), width]
        logits = [
            self.model(ids[:, start:end], attention_mask=real[:, :end].long(), past_key_values=cache, use_cache=cache is not None).logits
            for start, end in pairwise(places)
        ]  # fmt: skip
        return torch.cat(logits, 1)

    def compare(self, found, expected, rows, padding, seen):
        """Compare what an append behind `seen` columns gave: logits to the bit, and attention up to rounding."""
        count = padding[0] + len(rows[0]) - seen
        if self.forwards:
            real = real_columns(rows, padding)[:, seen:]
            assert torch.equal(found[real], expected[:, -count:][real])
            if self.keys == "exact":
                uncut = self.forward(None, rows, padding, 0, False)[:, seen:]
                rounding.assert_close(found[real], uncut[real])
                assert torch.equal(found[real].argmax(-1), uncut[real].argmax(-1))
        elif seen and self.keys == "exact" and not self.recording:
            self.compare_attention(found, expected, rows, padding, count)

    def compare_attention(self, updated, expected, rows, padding, count):
        """Attend to what the layers' updates gave, as a model does: over pages, and over DynamicCache's tensors."""
        seen = padding[0] + len(rows[0])
        at = seen - count + torch.arange(count)[:, None]
        start = torch.tensor(padding)[:, None, None, None]
        for (handle, _), (keys, values) in zip(updated, expected, strict=True):
            view = handle.view_of_pages
            query = torch.randn(len(rows), 2 * keys.shape[1], count, keys.shape[3])
            call = AttentionCall(query, view.kv, 0.2, sliding_window=view.sliding_window)
            found = paged_attention(call, kernel=view.kernel)
            columns = seen - keys.shape[2] + torch.arange(keys.shape[2])
            visible = (columns <= at) & (columns >= start)
            if view.sliding_window:
                visible = visible & (columns > at - view.sliding_window)
            query, keys, values = (one.double() for one in (query, keys, values))
            wanted = torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, visible, scale=0.2, enable_gqa=True
            )
            real = (at >= start).expand(*found.shape[:3], 1).expand_as(found)
            rounding.assert_close(found[real].double(), wanted[real])

    # -- one operation ---------------------------------------------------------------------------------------

    def step(self, kind=None, twin=None):
        """Do an operation, or a random one, to a twin, or a random one."""
        kind = kind or self.rng.choice(OTHERS)
        self.counts[kind] += 1
        twin = twin or self.rng.choice(self.twins)
        if kind == "fork":
            self.fork(twin)
        elif kind == "drop":
            self.twins.remove(twin)
            del twin
            self.twins += [] if len(self.twins) > 1 else [Twin(self)]
        elif kind == "share":
            self.share()
        elif kind in ("save", "keep"):
            getattr(self, kind)(twin)
        elif kind in ("restart", "weights"):
            if self.store is not None:
                getattr(self, kind)()
        else:
            self.change(twin, kind)

    def run(self, kind, call):
        """Call, often throwing into it; return whether something was thrown."""
        if self.at is None and (not self.faults or self.rng.random() < 0.5):
            call()
            return False
        error = self.rng.choice([KeyboardInterrupt, MemoryError])
        place = throw(call, self.at or int(2 ** self.rng.uniform(0, 11.5)), error)
        self.thrown[kind] += bool(place)
        return bool(place)

    def change(self, twin, kind):
        drawn = twin.draw(kind)
        if drawn is None:
            return
        operation, rows, padding = drawn
        again = kind == "reset" or (kind == "crop" and self.sliding)
        after = self.make_truth() if again else copy.deepcopy(twin.truth)
        expected = None if again else operation(after)
        if again and rows:  # transformers' own windows cannot go back
            self.append(after, rows, padding, 0)
        refusals = (DeviceBudgetError, *[CacheMismatchError] * (again and bool(rows)))
        found = []
        try:
            thrown = self.run(kind, lambda: found.append(operation(twin.paged)))
        except refusals as error:  # nothing has changed
            self.counts[type(error).__name__] += 1
            assert twin.holds(twin.truth)
            return
        if thrown:
            if twin.holds(after):
                pass
            elif twin.holds(twin.truth):
                try:
                    operation(twin.paged)
                except refusals:
                    return
                except InterruptedForwardError:
                    twin.reset()
                    return
            else:  # it says so by itself, not only when it is compared
                if twin.whole():  # a first forward that did not reach all layers: the layers that it missed say so
                    with pytest.raises(InterruptedForwardError):
                        operation(twin.paged)
                twin.reset()
                return
        elif expected is not None:
            self.compare(found[0], expected, rows, padding, twin.seen)
        twin.truth, twin.rows, twin.padding = after, rows, padding

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
        rng, twin = self.rng, Twin(self, self.make("store"))
        tenant = twin.tenant = rng.choice(["", "a"])
        # another number of rows would round otherwise
        rows = [self.prompt() for _ in range(1 if self.forwards else rng.randint(1, 3))]
        width = max(map(len, rows))
        rows.sort(key=len, reverse=True)
        padding, found = [width - len(row) for row in rows], []

        def begin():
            for group in twin.paged.groups:
                group.observe_padding(real_columns(rows, padding).long())
            space = self.store.for_tenant(tenant).bind_model(self.model)
            seen = self.store.attach(twin.paged, space, rows, padding)
            for row, held in zip(rows, twin.paged.groups[0].rows, strict=False):
                pages = self.pages_of(tenant, row)[: len(held.pages)]
                assert len(held.pages) == len(pages) and self.known.issuperset(pages)
            self.hits += bool(seen)
            found.extend([seen, self.append(twin.paged, rows, padding, seen, cut=True)])
            self.note(tenant, rows)
            self.store.add(twin.paged, rows, space)

        if self.run("share", begin):
            twin.paged.reset()
        else:
            twin.rows, twin.padding = rows, padding
            expected = self.append(twin.truth, rows, padding, 0, cut=True)
            if self.forwards:
                self.compare(found[1], expected, rows, padding, found[0])
        self.twins = [*self.twins[-3:], twin]
        if self.rng.random() < 0.1:
            self.run("clear", self.store.clear)

    def prompt(self):
        """Return tokens that begin as many others do, now and then with another one among them."""
        whole = self.options["sink_tokens"] + PAGE * self.rng.randrange(7)
        known = self.text[: self.rng.choice([self.rng.randrange(120), whole])]
        if known and self.rng.random() < 0.3:
            place = self.rng.choice([0, self.rng.randrange(len(known))])
            known[place] = self.rng.randrange(WORDS)
        new = self.rng.choice([0, self.rng.randint(1, 30)])
        return known + [self.rng.randrange(WORDS) for _ in range(new)] or [1]

    def pages_of(self, tenant, row):
        """Return what a store may know of a row: for each page all that it depends on."""
        ends = range(self.options["sink_tokens"] + PAGE, len(row) + 1, PAGE)
        return [(tenant, self.state, tuple(row[:end])) for end in ends]

    def note(self, tenant, rows):
        self.known.update(page for row in rows for page in self.pages_of(tenant, row))

    def keep(self, twin):
        """Keep the pages of a cache that has grown by other steps than a prompt: where these make no difference."""
        if twin.paged.options.prefix_store is self.store is not None and not self.forwards:
            self.note(twin.tenant, twin.rows)
            space = self.store.for_tenant(twin.tenant).bind_model(self.model)
            self.run("keep", lambda: self.store.add(twin.paged, twin.rows, space))

    def restart(self):
        """Go on as a process does that finds the folder, in which a file may be damaged."""
        self.store.flush()
        files = sorted(self.path.parent.glob("prefixes/*/*"))
        for path in self.rng.sample(files, min(len(files), self.rng.choice([0, 1, 3]))):
            alike = [one for one in files if one.name == path.name]
            self.damage(path, self.rng.choice(files), self.rng.choice(alike))
        self.store = self.make_store()

    def damage(self, path, *others):
        """Flip a bit of a file, cut it off, or put another one in its place."""
        raw = bytearray(path.read_bytes())
        raw[self.rng.randrange(len(raw))] ^= 1
        path.write_bytes(self.rng.choice([raw, raw[:-9], *(one.read_bytes() for one in others)]))

    def weights(self):
        """Change a weight, or take the change back; what was computed before is of another model."""
        self.state = 1 - self.state
        self.weight.copy_(-self.weight)
        for twin in self.twins if self.forwards else ():
            twin.reset()

    def save(self, twin):
        keeps_all = self.sliding and twin.paged.options.prefix_store is not None
        if (
            not twin.rows
            or keeps_all
            or self.run("save", lambda: twin.paged.save(self.path, self.model))
        ):
            return
        loaded, load = [], kv_hf.PagedCache.load
        if self.rng.random() < 0.2:
            self.damage(self.path)
            with pytest.raises(CacheFileError):
                load(self.path, self.model)
        elif not self.run("load", lambda: loaded.append(load(self.path, self.model))):
            twin.paged = loaded[0]

    def check(self, twins):
        for twin in twins:
            twin.paged.check_integrity()
            assert twin.holds(twin.truth)

    def end(self):
        """Let all caches go: nobody holds a page then but the store, and it gives all back."""
        memories = [twin.paged.page_memory for twin in self.twins]
        self.twins.clear()
        gc.collect()
        for memory in memories:
            of_store = self.store is not None and memory is self.store.page_memory
            assert memory.num_held == (self.store.stats().pages if of_store else 0)
        if self.store is not None:
            self.store.flush()
            self.store.clear()
            assert self.store.page_memory.num_held == 0


def real_columns(rows, padding):
    """Return [rows, columns], bool: where tokens lie, and no padding."""
    return torch.arange(padding[0] + len(rows[0])) >= torch.tensor(padding)[:, None]


class Twin:
    """A paged cache, and a plain one to which the same has happened; row 0 has tokens, and ends at the last column."""

    def __init__(self, world, paged=None):
        self.world, self.paged, self.tenant = world, paged or world.make(), ""
        self.truth, self.rows, self.padding = world.make_truth(), [], []

    @property
    def seen(self):
        return self.padding[0] + len(self.rows[0]) if self.rows else 0

    def reset(self):
        self.paged.reset()
        self.world.begin(self.paged)
        self.truth, self.rows, self.padding = self.world.make_truth(), [], []

    def draw(self, kind):
        """Return an operation on a cache, and rows and padding behind it; None where it makes no sense."""
        rng, rows, seen = self.world.rng, self.rows, self.seen
        if kind == "reset" or (kind == "append" and seen > LONGEST):
            return (lambda cache: (cache.reset(), self.world.begin(cache))[0]), [], []
        if kind == "append":
            return self.draw_append()
        if not seen:
            return None
        if kind == "crop":
            encoded = self.world.keys != "exact"  # a crop decodes, and a run without it does not
            if self.world.recording or (self.world.sliding and (encoded or self.world.forwards)):
                return None
            count = rng.randrange(1, max(2, len(min(rows, key=len))))
            count = min(count, rng.choice([8, 24, 300]))
            if count >= seen:
                return None
            return (lambda cache: cache.crop(-count)), [row[:-count] for row in rows], self.padding
        if kind == "repeat":
            take = [index for index in range(len(rows)) for _ in range(2)]
            if len(rows) > 3:
                return None
            operation = lambda cache: cache.batch_repeat_interleave(2)  # noqa: E731
        elif kind == "reorder":
            take = [rng.randrange(len(rows)) for _ in rows]
            operation = lambda cache: cache.reorder_cache(torch.tensor(take))  # noqa: E731
        else:
            take = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
            operation = lambda cache: cache.batch_select_indices(torch.tensor(take))  # noqa: E731
        if not rows[take[0]]:  # the columns are counted by row 0
            return None
        return operation, [rows[index] for index in take], [self.padding[index] for index in take]

    def draw_append(self):
        world, rng, seen = self.world, self.world.rng, self.seen
        padding = self.padding
        if not self.rows:
            padding = [0, *(rng.choice([0, 0, 7, 30]) for _ in range(rng.randint(0, 2)))]
        before = self.rows or [[] for _ in padding]
        count = rng.choice([1, 1, 1, 2, 5, 16, 17, 40, 90])
        rows = [
            row + [rng.randrange(WORDS) for _ in range(seen + count - max(seen, start))]
            for row, start in zip(before, padding, strict=True)
        ]
        back = rng.choice([0, 0, 1, count // 2, count]) if world.recording and seen else 0

        def operation(cache):
            updated = world.append(cache, rows, padding, seen)
            if world.recording:  # as assisted decoding does behind each of its forwards
                cache.crop(-back)
            return updated

        end = seen + count - back
        return (
            operation,
            [row[: max(0, end - p)] for row, p in zip(rows, padding, strict=True)],
            padding,
        )

    def whole(self):
        """Say whether no forward stopped half-way; until a reset pages may be counted as held by more than hold them."""
        try:
            self.paged._held_rows()
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
            if theirs.get_seq_length() and not (
                torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
            ):
                return False
        return True


KINDS = {
    "exact": {},
    "int4": {"keys": "int4"},
    "sliding": {"kind": "sliding"},
    "recording": {"recording": True},
    "int4 recording": {"keys": "int4", "recording": True},
    "sliding recording": {"kind": "sliding", "recording": True},
    "llama forwards": {"forwards": True},
    "llama int4 forwards": {"forwards": True, "keys": "int4"},
    "sliding int8 forwards": {"forwards": True, "keys": "int8", "kind": "sliding"},
    "latent forwards": {"forwards": True, "kind": "latent"},
    "latent int4 forwards": {"forwards": True, "keys": "int4", "kind": "latent"},
    "exact, faults": {"faults": True},
    "int4, faults": {"keys": "int4", "faults": True},
    "sliding, faults": {"kind": "sliding", "faults": True},
    "sliding int4, faults": {"keys": "int4", "kind": "sliding", "faults": True},
}
SLOW = pytest.mark.slow
# (seed, operations): few in `make test`, many in `make test-all`
RUNS = [(0, 40), pytest.param(1, 1500, marks=SLOW)]
FORWARDS = [kind for kind in KINDS if "forwards" in kind]
PLACES = [
    *((kind, "disk") for kind in KINDS),
    *((kind, "late") for kind in KINDS if "faults" in kind),
    *(slow((kind, "late")) for kind in KINDS if "faults" not in kind and kind not in FORWARDS),
    *(slow((kind, "eager")) for kind in KINDS if kind not in FORWARDS),
]


@pytest.mark.parametrize(("kind", "place"), PLACES)
@pytest.mark.parametrize(("seed", "operations"), RUNS)
def test_random_operations_equal_plain_caches(kind, seed, operations, place, tmp_path, monkeypatch):
    walk(kind, seed, operations, place, tmp_path, monkeypatch)


def walk(kind, seed, operations, place, tmp_path, monkeypatch):
    """Do random operations to a world of a kind; its caches are compared with plain ones all along."""
    world = World(
        seed, tmp_path / "cache.safetensors", offload_to(place, monkeypatch), **KINDS[kind]
    )
    for number in range(operations):
        world.step()
        world.check(world.twins if number % 5 == 0 else world.rng.sample(world.twins, 1))
    thrown = f"thrown into {world.thrown.total()}: {dict(world.thrown)}" if world.faults else ""
    print(
        f"\n{kind}: {world.counts.total()} operations {dict(world.counts)} {thrown} {world.hits} hits"
    )
    assert operations < 1000 or world.hits > 10 or world.store is None
    world.end()


# kinds of caches -> worlds in which an operation on one of them is stopped at places one after the other
FAST = ("plain, exact", "store, exact", "offloaded, int4", "some offloaded, int4", "fixed, int4", "plain, sliding", "fixed, sliding")  # fmt: skip
STOPPED = {
    **{f"{kind}, {keys}": (kind, {"keys": keys}) for kind in ("plain", "offloaded", "some offloaded", "fixed", "store") for keys in ("exact", "int4")},
    "plain, sliding": ("plain", {"kind": "sliding"}),
    "fixed, sliding": ("fixed", {"kind": "sliding"}),
}  # fmt: skip


@pytest.mark.parametrize("most", [6, pytest.param(10**6, marks=SLOW)], ids=["some", "every"])
@pytest.mark.parametrize("operation", dict.fromkeys(OPERATIONS))
@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=SLOW) for kind in STOPPED]
)
def test_operations_stopped_at_places_leave_the_cache_or_say_reset(
    kind, operation, most, tmp_path, monkeypatch
):
    """A cache that was stopped is as before, as afterwards, or asks for a reset; those that share its pages notice nothing."""
    made, options = STOPPED[kind]
    world = World(0, tmp_path / "cache.safetensors", offload_to("disk", monkeypatch), **options)
    base = Twin(world, world.make(made))
    for _ in range(2):
        world.change(base, "append")
    places = 2000 if most > 2000 else 400  # those behind an operation's end stop nothing
    for at in range(1, places, max(1, places // most)):
        twin = copy.copy(base)
        twin.paged, twin.truth = copy.deepcopy(base.paged), copy.deepcopy(base.truth)
        world.twins, world.at = [base, twin], at
        world.step(operation, twin)
        world.at = None
        assert base.holds(base.truth)
        for one in world.twins[1:]:
            one.reset()
            world.change(one, "append")
        world.check(world.twins)
        del twin, one
    del base
    world.end()
