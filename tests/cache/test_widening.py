"""Formats that are too narrow: models with the outputs of another one, the pages that their layers get, and the warning of two bits."""

import copy
import pickle
import warnings
from functools import cache

import pytest
import rounding
import torch
from harness import at_once, interrupt
from paged_inputs import page_spec as spec
from tiny_models import (
    all_values,
    key_bias,
    key_pairs,
    make_model,
    shared_model,
    stressed,
    tokens,
    value_channel,
)

import kv_hf
from kv_hf.pages.storage import PageStorage, Wider
from kv_hf.quant.codec import decode, encode, order_of
from kv_hf.quant.damage import Sample, usual_damage
from kv_hf.spec import LANES, ROWS, predict_memory

PAGE = 64
PROMPT = 4 + 3 * PAGE
SHIPPED = kv_hf.cache_names()
STRESSES = {
    "value channel x100": value_channel(100),
    "rope pairs x50": key_pairs(50),
    "one rope pair x50": key_pairs(50, (1,)),
    "values x1e-4": all_values(1e-4),
    "values x2000": all_values(2000),
    "values x1e-6": all_values(1e-6),
    "bias of slow channels": key_bias(10, (15, 31)),
    "bias of fast channels": key_bias(1, (0, 16)),
}
# times the usual divergence; 16-bit scales lose digits there, which is just short of a wider format
MOST = {("values x1e-6", f"paged_{name}"): 40 for name in ("int6", "k8v4", "int4")}
LOUD = value_channel(100, layers=[1])


@cache
def plain():
    return make_model("llama", head_dim=32)


@cache
def loud():
    return stressed(plain(), LOUD)


def words(rows, length, seed=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def cache_of(name="paged_int4", **options):
    return kv_hf.PagedCache.from_implementation(
        plain().config, name, {"recent_tokens": 0} | options
    )


@torch.no_grad()
def fed(model, held, ids, step=16):
    """Return the logits of `ids` [rows, n], given to the model `step` columns at a time."""
    parts = [
        model(ids[:, first : first + step], past_key_values=held).logits
        for first in range(0, ids.shape[1], step)
    ]
    return torch.cat(parts, 1)


@torch.no_grad()
def divergence(model, held):
    """Return the mean KL of 64 tokens behind a prompt of three pages."""
    ids = words(2, PROMPT + 64)
    exact = model(ids).logits[:, PROMPT:].double().log_softmax(-1)
    model(ids[:, :PROMPT], past_key_values=held, logits_to_keep=1)
    found = fed(model, held, ids[:, PROMPT:]).double().log_softmax(-1)
    return (exact.exp() * (exact - found)).sum(-1).mean().item()


@cache
def usual(name):
    return divergence(plain(), cache_of(name))


def formats_of(held):
    return [(row.keys, row.values) for row in held.report()]


def widened(held):
    return [row.layer_idx for row in held.report() if row.reason is not None]


@pytest.mark.parametrize("name", SHIPPED)
def test_no_format_is_widened_for_an_ordinary_model(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", kv_hf.KVCacheWarning)
        warnings.filterwarnings("ignore", "Paged attention runs as 'reference'")  # without C
        held = cache_of(name)
        divergence(plain(), held)
    assert widened(held) == []


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("stress", STRESSES)
def test_no_stress_triples_the_divergence(stress, name):
    held = cache_of(name)
    most = MOST.get((stress, name), 3) * max(usual(name), 1e-6)
    assert divergence(stressed(plain(), STRESSES[stress]), held) <= most
    held.check_integrity()


@pytest.mark.parametrize(
    ("stress", "name", "least"),
    [
        ("value channel x100", "paged_int4", 20),
        ("value channel x100", "paged_int8", 400),
        ("rope pairs x50", "paged_int8", 100),
        ("values x1e-6", "paged_int8", 4000),
    ],
)
def test_widen_never_keeps_the_formats_and_their_divergence(stress, name, least):
    held = cache_of(name, widen="never")
    assert divergence(stressed(plain(), STRESSES[stress]), held) > least * usual(name)
    assert widened(held) == []


def test_widened_layers_are_counted_reported_and_said_once(said):
    ids = words(2, PROMPT + 30)
    for _ in range(2):
        held = cache_of()
        fed(loud(), held, ids, 300)
    (warning,) = said("wider")
    for part in ("Layer 1", "values int4 -> fp8", "channels far larger"):
        assert part in warning
    assert formats_of(held) == [("int4", "int4"), ("int4", "fp8")]
    assert widened(held) == [1] and "values int4 -> fp8" in held.report()[1].reason
    specs = [layer.spec for layer in held.paged_layers]
    assert [spec.values.scheme.name for spec in specs] == ["int4", "fp8"]
    expected = predict_memory(specs, [ids.shape[1]] * 2, sink_tokens=4, recent_tokens=0)
    assert held.memory() == expected


def test_the_first_pages_decide_and_those_that_are_there_keep_their_formats():
    """Pages never change: what a model damages later is stored in the formats of the pages before it."""
    ids = words(2, PROMPT + 3 * PAGE)
    held = cache_of()
    fed(plain(), held, ids[:, :PROMPT], 300)
    before = held.paged_layers[1].values
    fed(loud(), held, ids[:, PROMPT:], 16)
    assert widened(held) == []
    assert torch.equal(held.paged_layers[1].values[:, :, 4:PROMPT], before[:, :, 4:])
    held.reset()
    fed(loud(), held, ids, 16)
    assert widened(held) == [1]
    exact = cache_of("paged_exact")
    fed(loud(), exact, ids, 16)
    assert damage(held, exact).max() < 0.05


def damage(held, exact):
    """Return the error of layer 1's values in the two pages behind the prompt, over their power, [rows, heads, channels]."""
    late = slice(PROMPT, PROMPT + 2 * PAGE)
    values, expected = (one.paged_layers[1].values[:, :, late] for one in (held, exact))
    return (values - expected).square().mean(2) / expected.square().mean(2)


def test_a_copy_made_before_the_first_page_follows_the_cache_that_brings_it():
    ids = words(2, PROMPT + 3 * PAGE)
    held = cache_of()
    fed(loud(), held, ids[:, :20], 300)
    other = copy.deepcopy(held)
    fed(loud(), held, ids[:, 20:], 16)
    assert formats_of(other) == formats_of(held) == [("int4", "int4"), ("int4", "fp8")]
    fed(loud(), other, ids[:, 20:], 16)
    assert other.paged_layers[1].storage is held.paged_layers[1].storage
    other.check_integrity()
    torch.testing.assert_close(other.paged_layers[1].values, held.paged_layers[1].values)


@pytest.mark.parametrize("options", [{}, {"page_size": 16, "values": "int3"}], ids=str)
def test_widened_caches_pickle_and_save(options, tmp_path):
    """3 bits of 16 tokens fill no whole words: their wider pages stayed in that layout, and with the reference kernel until a load."""
    ids = words(2, PROMPT + 3 * PAGE)
    held = cache_of(**options)
    fed(loud(), held, ids, 16)
    held.save(tmp_path / "cache.safetensors", loud())
    loaded = kv_hf.PagedCache.load(tmp_path / "cache.safetensors", loud())
    read = pickle.loads(pickle.dumps(held))
    more = words(2, 20, seed=5)
    expected = fed(loud(), held, more)
    for one in (loaded, read):
        assert formats_of(one) == formats_of(held)
        assert [layer.spec for layer in one.layers] == [layer.spec for layer in held.layers]
        rounding.assert_close(fed(loud(), one, more), expected)
        for mine, theirs in zip(one.paged_layers, held.paged_layers, strict=True):
            assert torch.equal(mine.values, theirs.values)
            assert mine.store.kernel.name == theirs.store.kernel.name


def test_caches_of_one_store_in_threads_read_what_they_wrote():
    """Whoever seals the store's first page of a layer decides for all; nobody loses a page by it."""
    store = kv_hf.PrefixStore()
    ids = words(4, PROMPT + 3 * PAGE)
    caches = [cache_of(prefix_store=store) for _ in range(4)]
    expected = []
    for row in range(4):
        alone = cache_of("paged_exact")
        fed(loud(), alone, ids[row : row + 1])
        narrow = cache_of()
        fed(loud(), narrow, ids[row : row + 1])
        expected.append((alone, narrow.paged_layers[0].keys))

    made = at_once(lambda row: fed(loud(), caches[row], ids[row : row + 1]), 4)
    assert all(isinstance(logits, torch.Tensor) for logits in made)
    assert len({tuple(formats_of(one)) for one in caches}) == 1
    for one, (exact, keys) in zip(caches, expected, strict=True):
        one.check_integrity()
        assert torch.equal(one.paged_layers[0].keys, keys)  # of the tokens alone
        if widened(one):
            assert damage(one, exact).max() < 0.05


def test_whoever_seals_the_first_pages_of_a_layer_decides():
    """Another cache of the store began before, and comes to that layer later: it zeroes nobody's pages."""
    store = kv_hf.PrefixStore()
    early, late = (cache_of(prefix_store=store) for _ in range(2))
    keys, values = torch.randn(2, 1, 2, PROMPT, 32, generator=torch.Generator().manual_seed(1))
    values[:, 0, :, 3] *= 1000
    early.update(keys, values, 0)
    for layer in range(2):
        late.update(-keys, -values, layer)
    held = late.paged_layers[1].values
    early.update(keys, values, 1)
    assert widened(late) == widened(early) == [0, 1]
    assert torch.equal(late.paged_layers[1].values, held)


@pytest.mark.parametrize("stopped", [True, False], ids=["a stopped forward", "one token repeated"])
def test_pages_that_tell_nothing_leave_it_to_the_next(stopped):
    """Those of a forward that stopped before the layer, and pages of one token: what they hold is kept in the wider format."""
    store = kv_hf.PrefixStore()
    first, then = (cache_of(prefix_store=store) for _ in range(2))
    ids = words(1, PROMPT) if stopped else torch.full((1, PROMPT), 7)
    model = loud()
    with pytest.MonkeyPatch.context() as patch:
        if stopped:
            patch.setattr(model.model.layers[1], "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                fed(model, first, ids, PROMPT)
        else:
            fed(model, first, ids, PROMPT)
    before = None if stopped else first.paged_layers[1].values
    fed(model, then, words(1, PROMPT, seed=2), PROMPT)
    assert widened(then) == [1]
    if before is not None:
        kept = first.paged_layers[1].values - before
        assert 0 < kept.norm() < 0.05 * before.norm()


@pytest.mark.parametrize(
    ("narrow", "wide"), [("int3", "int8"), ("int3", "int4"), ("plain4", "int4")]
)
def test_pages_that_are_encoded_anew_have_one_order_of_channels(narrow, wide):
    before, after = (spec(name, key_dim=64, dtype=torch.float32) for name in (narrow, wide))
    storage = PageStorage(before, torch.device("cpu"), None)
    storage.grow(12)
    numbers = torch.randn(12, before.keys.num_kv_heads, before.keys.page_size, 64)
    order = order_of(numbers[3:4], before.keys)
    storage.keys.put(range(12), encode(numbers, before.keys, order)[0])
    stored = decode(storage.keys.fields, before.keys, torch.float32)
    storage.sealed = 12
    storage.widen(after, Wider(), 0)
    found = decode(storage.keys.fields, after.keys, torch.float32)
    assert (found - stored).norm() < 0.15 * stored.norm()
    if after.keys.scheme.wide:
        orders = storage.keys.fields["order"]
        assert (orders == orders[0]).all() and (order is None or (orders == order).all())


def test_a_folder_gives_no_pages_to_a_layer_of_other_formats(tmp_path):
    """A new store's layers are as narrow as asked, and the pages are those of wider ones: neither read nor taken for damaged."""
    for _ in range(2):
        store = kv_hf.PrefixStore(folder=tmp_path)
        held = cache_of(prefix_store=store)
        loud().generate(words(1, PROMPT + PAGE), past_key_values=held, max_new_tokens=1)
        store.flush()
        assert widened(held) and store.stats().pages == 4
        assert (store.stats().pages_read, store.stats().pages_damaged) == (0, 0)


def test_offloaded_pages_say_why_they_stay():
    held = cache_of(offload="disk", device_bytes=311_296)
    with pytest.warns(
        kv_hf.KVCacheWarning, match="keeps its format, because its pages may leave the device"
    ):
        fed(loud(), held, words(2, PROMPT + 10), 300)
    assert widened(held) == []


def test_memory_that_is_too_short_keeps_the_formats(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("kv_hf.pages.storage.PageStorage.widen", fail)
    held = cache_of()
    with pytest.warns(kv_hf.KVCacheWarning, match="no memory for wider pages"):
        fed(loud(), held, words(2, PROMPT + 10), 300)
    assert widened(held) == []
    held.check_integrity()


# -- two bits -----------------------------------------------------------------------------------------------

TWO_BITS = {"keys": "int2", "values": "int2"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (TWO_BITS, True),
        ({"keys": "int4", "values": "int2"}, False),
        ({"keys": "int2", "values": "int4"}, False),
        ({**TWO_BITS, "layers": {"0": "int4"}}, False),
    ],
    ids=str,
)
def test_generate_warns_once_of_two_bits(options, says, said):
    model = shared_model("llama")
    for _ in range(2):
        cache = kv_hf.PagedCache(model.config, **options)
        model.generate(tokens(1, 9), past_key_values=cache, max_new_tokens=2)
    assert len(said("2 bits")) == says


# -- the damage that formats do ------------------------------------------------------------------------------

FORMATS = ("fp8", "int8", "int4", "int2")


def pages(seed=0):
    return torch.randn((2, 2, 64, 64), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", [ROWS, LANES])
@pytest.mark.parametrize("name", FORMATS)
def test_random_numbers_take_the_usual_damage(name, layout):
    made = spec(name, layout=layout)
    sample = Sample(pages(1) + 8, pages(2))  # a constant of all keys shifts all scores alike
    assert sample.says_something
    for side in range(2):
        assert sample.damage(made, side) == pytest.approx(usual_damage(made.sides[side]), rel=0.25)


@pytest.mark.parametrize("different", [1, 2])
def test_pages_of_one_or_two_tokens_say_nothing(different):
    values = pages(2)[:, :, :different].repeat(1, 1, 64 // different, 1)
    assert not Sample(pages(1), values).says_something


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e5])
def test_pages_beyond_float16_say_nothing(bad):
    values = pages(2)
    values[0, 1, 3, 7] = bad
    keys = pages(1)
    sample = Sample(keys, values)
    assert sample.counts.tolist() == [False, True]
    found = sample.damage(spec("int4"), 1)
    expected = Sample(keys[1:], values[1:]).damage(spec("int4"), 1)
    assert found == pytest.approx(expected, rel=1e-4)
    values[1, 0, 0, 0] = bad
    assert not Sample(keys, values).says_something
