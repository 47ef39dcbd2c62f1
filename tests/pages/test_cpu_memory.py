"""Pages on a CPU lie in mappings of their own and grow there, in all layers or in none; memory goes back once behind a prefill."""

import mmap
import os
import pickle
from pathlib import Path

import pytest
import torch
from beside_stock import pages, run
from paged_inputs import page_spec
from tiny_models import make_model, tokens
from token_states import FULL, HYBRID, PAGE, feed, text

import kv_hf
from kv_hf.pages import cpu_memory
from kv_hf.pages.cpu_memory import (
    LEAST_BYTES,
    LEAST_COLUMNS,
    LEAST_HUGE,
    RESERVE_FACTOR,
    TRIM_VARIABLE,
    give_back_freed,
    runs_of,
    trim_heap,
)  # fmt: skip
from kv_hf.pages.storage import SideStorage

needs_mappings = pytest.mark.skipif(
    not hasattr(mmap, "MAP_PRIVATE"), reason="this system has no private mappings"
)
CPU = torch.device("cpu")
PAGES = 64  # of 6 KiB codes: enough for a mapping


def side() -> SideStorage:
    """Return an empty side of SmolLM2-135M's sizes in int4."""
    spec = page_spec("int4", heads=3, dtype=torch.bfloat16)
    return SideStorage(spec.keys, CPU)


def filled(pages: int) -> SideStorage:
    """Return a side of `pages` pages, each byte of page i being i."""
    storage = side()
    storage.fields = storage.grown(pages)
    for page in range(pages):
        for field in storage.fields.values():
            field[page].view(torch.uint8).fill_(page)
    return storage


def check(storage: SideStorage, pages: int, room: int) -> None:
    """Check that pages hold what `filled` wrote, and zeros behind."""
    assert storage.capacity == room
    for field in storage.fields.values():
        for page in range(pages):
            assert bool((field[page].view(torch.uint8) == page).all())
        assert not field[pages:].view(torch.uint8).any()


@needs_mappings
def test_grown_stays_in_its_memory_as_long_as_there_are_addresses():
    storage = filled(PAGES)
    before = dict(storage.fields)
    storage.fields = storage.grown(PAGES + 1)
    check(storage, PAGES, PAGES + 1)
    assert RESERVE_FACTOR * before["codes"].nbytes >= LEAST_BYTES
    for name, field in storage.fields.items():
        stays = RESERVE_FACTOR * before[name].nbytes >= LEAST_BYTES
        assert (field.data_ptr() == before[name].data_ptr()) or not stays
        assert len(before[name]) == PAGES  # whoever reads these goes on
    storage.fields = storage.grown(RESERVE_FACTOR * PAGES)
    check(storage, PAGES, RESERVE_FACTOR * PAGES)
    assert storage.fields["codes"].data_ptr() == before["codes"].data_ptr()
    storage.fields = storage.grown(RESERVE_FACTOR * PAGES + 1)
    check(storage, PAGES, RESERVE_FACTOR * PAGES + 1)
    assert storage.fields["codes"].data_ptr() != before["codes"].data_ptr()
    assert bool((before["codes"][3].view(torch.uint8) == 3).all())


@pytest.mark.parametrize("refused", [1, 10**6], ids=["once", "always"])
def test_grown_does_without_mappings_that_the_system_refuses(refused, monkeypatch):
    real, asked = mmap.mmap, []

    def mapping(*args, **kwargs):
        asked.append(args)
        if len(asked) <= refused:
            raise OSError("Cannot allocate memory")
        return real(*args, **kwargs)

    storage = filled(PAGES)
    monkeypatch.setattr(cpu_memory.mmap, "mmap", mapping)
    for room in (RESERVE_FACTOR * PAGES + 1, RESERVE_FACTOR * PAGES + 2):
        storage.fields = storage.grown(room)
        check(storage, PAGES, room)
    assert asked or not hasattr(mmap, "MAP_PRIVATE")


def test_pickle_holds_the_pages_alone():
    storage = filled(PAGES)
    storage.fields = storage.grown(PAGES + 1)
    data = pickle.dumps(storage)
    assert len(data) < sum(storage.nbytes.values()) + 20_000
    loaded = pickle.loads(data)
    check(loaded, PAGES, PAGES + 1)
    loaded.fields = loaded.grown(PAGES + 2)
    check(loaded, PAGES, PAGES + 2)
    check(storage, PAGES, PAGES + 1)


@needs_mappings
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_pages_of_its_own():
    storage = filled(PAGES)
    child = os.fork()
    if not child:
        storage.fields["codes"][0, 0, 0] = 99
        os._exit(int(storage.fields["codes"].view(torch.uint8).flatten()[0] != 99))
    assert os.waitpid(child, 0)[1] == 0
    check(storage, PAGES, PAGES)


def test_runs_of_joins_neighbours():
    assert runs_of(enumerate([3, 4, 5, 9, 10, 2])) == [(0, 3, 3), (3, 9, 2), (5, 2, 1)]


# -- huge pages


def advised(address: int) -> bool:
    """Say whether huge pages were asked for at an address, by the flags that Linux shows."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)
def test_large_fields_are_offered_as_huge_pages_and_small_ones_are_not() -> None:
    spec = page_spec("exact", heads=8, key_dim=128)
    storage = SideStorage(spec.keys, torch.device("cpu"))
    for size, huge in ((LEAST_BYTES, False), (LEAST_HUGE, True)):
        storage.fields = storage.grown(size // spec.keys.payload_bytes)
        codes = storage.fields["codes"]
        assert advised(codes.data_ptr() + codes.nbytes // 2) == huge
        assert not codes[-1].any()


# -- the heap

LONG = LEAST_COLUMNS


@pytest.fixture
def calls(monkeypatch):
    """One entry for each time that memory was given back."""
    found = []
    monkeypatch.setattr(cpu_memory, "give_back_freed", lambda: found.append(1))
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": LONG}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
@pytest.mark.parametrize("held", [{}, {"max_length": 400}], ids=str)
def test_generate_gives_back_once_per_prompt(calls, held, options):
    inputs = {"input_ids": tokens(1, 2 * LONG + 5)}
    run(make_model("llama"), inputs, pages("paged_int4", **held), max_new_tokens=12, **options)
    assert len(calls) == 1


def test_own_loop_gives_back_at_its_first_step_or_when_it_says_so(calls):
    model = make_model("llama")
    for says_so in (False, True):
        cache = kv_hf.PagedCache(model.config, keys="int4", values="int4")
        with torch.no_grad():
            model(tokens(1, 100), past_key_values=cache)
            if says_so:
                cache.end_prefill()
                assert len(calls) == 2
            for _ in range(4):
                model(tokens(1, 1), past_key_values=cache)
    assert len(calls) == 2


@pytest.fixture
def asked(monkeypatch):
    """The arguments of malloc_trim, which is replaced."""
    found = []
    monkeypatch.setattr(cpu_memory, "_malloc_trim", lambda: found.append)
    return found


def test_give_back_freed_obeys_its_switch(asked, monkeypatch):
    monkeypatch.delenv(TRIM_VARIABLE, raising=False)
    assert give_back_freed() and asked == [0]
    monkeypatch.setenv(TRIM_VARIABLE, "never")
    assert not give_back_freed() and asked == [0]


@pytest.mark.parametrize("version", ["musl 1.2", "", None, ValueError, OSError])
def test_trim_heap_does_nothing_beside_other_libraries(version, monkeypatch):
    def confstr(name):
        if isinstance(version, type):
            raise version
        return version

    monkeypatch.setattr(os, "confstr", confstr)
    cpu_memory._malloc_trim.cache_clear()
    try:
        assert not trim_heap()
    finally:
        cpu_memory._malloc_trim.cache_clear()


# -- growth in all layers or in none ------------------------------------------------------------------------

ROWS = [text(1, 400)]


@pytest.mark.parametrize("config", [FULL, HYBRID], ids=["full", "hybrid"])
def test_memory_that_growth_has_freed_is_given_back_once_all_layers_have_grown(monkeypatch, config):
    given = []
    cache = kv_hf.PagedCache(config, page_size=PAGE, keys="int4")

    def note():
        given.append([layer.storage.capacity for layer in cache.layers])

    monkeypatch.setattr("kv_hf.pages.rows.give_back_replaced", note)
    feed(cache, ROWS, 0, 60)
    assert not given  # nothing was there that a larger tensor replaced
    feed(cache, ROWS, 60, 61)
    assert not given
    feed(cache, ROWS, 61, 300)
    assert given[-1] == [layer.storage.capacity for layer in cache.layers]
    assert len(given) == len(cache.groups)
