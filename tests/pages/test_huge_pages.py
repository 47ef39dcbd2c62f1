"""Large page storage on a CPU asks the system for huge pages of memory; results and bytes do not depend on that."""

import mmap
from pathlib import Path

import pytest
import torch

from kv_hf.formats import key_scheme, value_scheme
from kv_hf.pages import cpu_memory
from kv_hf.pages.cpu_memory import advise, huge_page_bytes
from kv_hf.pages.storage import SideStorage
from kv_hf.spec import PageSpec

needs_huge_pages = pytest.mark.skipif(
    not 0 < huge_page_bytes() <= 4 << 20,
    reason="no huge pages here, or huger ones than a test should fill",
)


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


@needs_huge_pages
def test_advise_reaches_whole_huge_pages_alone() -> None:
    size = huge_page_bytes()
    memory = torch.empty(6 * size, dtype=torch.uint8)
    begin = (
        -memory.data_ptr() % size + size // 2
    )  # a tensor that begins and ends inside of a huge page
    part = memory[begin : begin + 3 * size]
    assert advise(part)
    start = part.data_ptr()
    assert advised(start + size // 2) and advised(start + 2 * size)
    assert not advised(start) and not advised(start + 3 * size - 1)


@needs_huge_pages
def test_advise_leaves_small_tensors_and_other_devices() -> None:
    assert not advise(torch.empty(huge_page_bytes(), dtype=torch.uint8))
    assert not advise(torch.empty(4 * huge_page_bytes(), dtype=torch.uint8, device="meta"))


def test_advise_does_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "huge_page_bytes", lambda: 0)
    assert not advise(torch.empty(1 << 24, dtype=torch.uint8))


@needs_huge_pages
def test_grown_asks_for_huge_pages_and_keeps_pages() -> None:
    spec = PageSpec.build(
        key_scheme("exact"),
        value_scheme("exact"),
        num_kv_heads=8,
        key_dim=128,
        value_dim=128,
        page_size=64,
        dtype=torch.float32,
    )
    storage = SideStorage(spec.keys, torch.device("cpu"))
    storage.fields = storage.grown(3)
    storage.fields["codes"].fill_(7)
    pages = 3 * huge_page_bytes() // spec.keys.payload_bytes
    codes = storage.grown(pages)["codes"]
    assert advised(codes.data_ptr() + codes.nbytes // 2)
    assert bool((codes[:3] == 7).all()) and not codes[3:].any()


@needs_huge_pages
def test_advise_asks_for_what_was_added_and_puts_together_what_was_written() -> None:
    size = huge_page_bytes()
    # of its own: the heap may hand out memory that an earlier test advised
    mapped = mmap.mmap(-1, 8 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -memory.data_ptr() % size
    part = memory[begin : begin + 6 * size + 100]
    written = 2 * size + size // 2
    assert advise(part[:written])
    part[:written] = 7
    start = part.data_ptr()
    assert not advised(start + 2 * size)
    assert advise(part, written=written)
    assert advised(start + 2 * size) and advised(start + 6 * size - 1)
    assert bool((part[:written] == 7).all())
    assert not advise(part, written=part.nbytes)  # nothing was added
