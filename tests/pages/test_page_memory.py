"""Pages on a CPU lie in mappings of their own, and grow there without being copied."""

import mmap
import os
import pickle

import pytest
import torch

from kv_hf.formats import key_scheme, value_scheme
from kv_hf.pages import cpu_memory
from kv_hf.pages.cpu_memory import AHEAD, LEAST_BYTES, mapped_zeros
from kv_hf.pages.storage import SideStorage
from kv_hf.spec import PageSpec

needs_mappings = pytest.mark.skipif(
    not hasattr(mmap, "MAP_PRIVATE"), reason="this system has no private mappings"
)
CPU = torch.device("cpu")
PAGES = 64  # of 6 KiB codes: enough for a mapping


def side() -> SideStorage:
    """Return an empty side of SmolLM2-135M's sizes in int4."""
    spec = PageSpec.build(
        key_scheme("int4"),
        value_scheme("int4"),
        num_kv_heads=3,
        key_dim=64,
        value_dim=64,
        page_size=64,
        dtype=torch.bfloat16,
    )
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
    storage.check_integrity()
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
    for name, field in storage.fields.items():
        assert field.data_ptr() == before[name].data_ptr()
        assert len(before[name]) == PAGES  # whoever reads these goes on
    storage.fields = storage.grown(AHEAD * PAGES)
    check(storage, PAGES, AHEAD * PAGES)
    assert storage.fields["codes"].data_ptr() == before["codes"].data_ptr()
    storage.fields = storage.grown(AHEAD * PAGES + 1)
    check(storage, PAGES, AHEAD * PAGES + 1)
    assert storage.fields["codes"].data_ptr() != before["codes"].data_ptr()
    assert bool((before["codes"][3].view(torch.uint8) == 3).all())


@needs_mappings
def test_grown_counts_the_pages_alone():
    storage = filled(PAGES)
    spec = storage.spec.fields
    assert storage.nbytes == {
        name: PAGES * shape.numel() * dtype.itemsize
        for name, (shape, dtype) in ((n, (torch.Size(s), d)) for n, (s, d) in spec.items())
    }


@needs_mappings
def test_fields_share_no_memory():
    """A compiled forward changes fields in place; tensors over one storage would hinder it."""
    storage = filled(PAGES)
    storages = {field.untyped_storage().data_ptr() for field in storage.fields.values()}
    assert len(storages) == len(storage.fields)


def test_small_sides_and_other_devices_stay_with_torch():
    codes = side().fields["codes"]
    page_bytes = codes[0:1].new_empty((1, *codes.shape[1:])).nbytes
    assert mapped_zeros(codes, LEAST_BYTES // page_bytes - 1) is None
    assert mapped_zeros(codes.to("meta"), 1000) is None


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
    for room in (AHEAD * PAGES + 1, AHEAD * PAGES + 2):
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
