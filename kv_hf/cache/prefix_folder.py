"""Pages of a prefix store in a folder, where later processes and others on the machine find them.

    FOLDER/<state>/<prefix>.safetensors             "<layer>.<side>": the exact first tokens of a beginning
    FOLDER/<state>/<prefix>.<formats>.safetensors   "page": a page of all layers, one behind the other, in layout "rows"
    FOLDER/<state>/<prefix>.<formats>.states.safetensors   "<layer>.<name>": what layers hold beside pages behind a page, where
                                                           that is known (states.py)

<state> is a digest of everything besides tokens that decides a page: model, weights, adapters, options, salt. <prefix> is one
of all tokens up to the page's end, chained page by page, and <formats> one of the layers' page specs. Metadata holds both names and
the SHA-256 of the tensors: a file that does not fit is no page, is said once and removed. So readers need no lock, and a
process may be killed at any moment. Files are written aside and renamed, by a thread, and read when a prompt begins with
them; those used least recently, by their time stamps, are removed beyond a bound.
"""

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..errors import CacheOptionError, reason
from ..notices import warn_once
from ..pages.prefix_tree import Prefix
from ..pages.storage import PageStorage, Pair, Sides, Tensors, carve, carved_bytes
from ..quant.codec import is_order
from ..spec import ROWS, PageSpec
from .saved import VERSION, digest, put, taken
from .states import States

SUFFIX, ASIDE = ".safetensors", ".aside"
QUEUED = 512  # pages that wait to be written, at most; others are written when they are used again
OFTEN = 60.0  # seconds within which a page is not noted as used again
KEPT = 0.9  # part of the bound that stays when it is passed, so that not every page looks through the folder
STATES = "states"
LETTERS = 32  # hexadecimal digits of a name


def name_of(*parts: Any) -> str:
    """Return a name, the same in every process, for parts that differ in `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:LETTERS]


def prefix_names(places: Iterable[bytes]) -> list[str]:
    """Return the names of the beginnings that end with each of `places`, the tokens of the sinks and of each page behind them.

    Each is made of the one before it, too.
    """
    return [*accumulate(places, name_of, initial="")][1:]


@dataclass(eq=False)
class Waiting:
    """A node of the tree that is to be written.

    Attributes:
        path: its place in the folder.
        node: whose page is held until then.
        storages: of all layers.
        used: when, in nanoseconds; the end of a beginning a little before what leads to it.
        ready: on a device with streams: when the page is there.
        tensors: what is written by name, which nobody changes any more; None: the page.
    """

    path: Path
    node: Prefix
    storages: Sequence[PageStorage]
    used: int
    ready: Any
    tensors: States | None


class PrefixFolder:
    """The files of one prefix store; other processes may use the folder at the same time.

    Args:
        path: of the folder, which is made with the first page.
        max_bytes: bound of all files in it.
    Attributes:
        counts: of pages read, written and damaged, first tokens among these, by their names in PrefixStats.
    Raises: CacheOptionError for what is no path.
    """

    def __init__(self, path: Any, max_bytes: int) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise CacheOptionError(f"folder must be the path of a folder, got {path!r}")
        self.path, self.max_bytes = Path(os.fspath(path)).absolute(), max_bytes
        self.counts: Counter[str] = Counter()
        self._states: set[str] = set()
        self._waiting: deque[Waiting] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._bytes: int | None = None  # of all files, as far as this process knows

    def held_pages(self) -> Iterator[tuple[int, ...]]:
        """Yield the pages that wait to be written: until then nobody may take them."""
        with self._lock:
            waiting = list(self._waiting)
        yield from ((one.node.page,) for one in waiting if one.node.page is not None)

    # -- reading -------------------------------------------------------------------------------------------------

    def first_tokens(self, state: str, prefix: str) -> list[Pair] | None:
        """Return the exact first keys and values [num_kv_heads, tokens, ..] of each layer; None where they are not there."""
        return self._read(self._path(state, prefix), in_pairs)

    def pages(
        self, state: str, prefixes: Sequence[str], specs: Sequence[PageSpec], of_states: bool
    ) -> tuple[list[Any], States]:
        """Return what follows a known beginning, as far as it is there: for each page the fields of both sides of each layer.

        Args:
            prefixes: of the pages, in order.
            specs: of all layers.
            of_states: whether pages end with the last one whose states are there, which are returned by layer and name.
        """
        rows, states = [in_rows(spec) for spec in specs], dict[str, torch.Tensor]()
        formats, found = name_of(*rows), list[Any]()
        for prefix in prefixes:
            page = self._read(self._path(state, prefix, formats), partial(carved, rows))
            if page is None:
                break
            found.append(page)
        self.counts["pages_read"] += len(found)
        while of_states and found and not states:
            last = self._path(state, prefixes[len(found) - 1], formats, STATES)
            states = self._read(last, dict) or {}
            found = found if states else found[:-1]
        return found, states

    def _path(self, state: str, *name: str) -> Path:
        """Return the place of first tokens, named by their prefix, or of a page or its states, named by prefix and formats."""
        self._states.add(state)
        return self.path / state / f"{'.'.join(name)}{SUFFIX}"

    def _read(self, path: Path, use: Callable[[Any], Any]) -> Any:
        """Return what `use` makes of the tensors of a file; None where it is not there. What does not fit is removed."""
        try:
            with safe_open(path, "pt") as file:
                told = file.metadata()
                # copies: those of safetensors change with the file, and end the process where it is cut off
                found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
            if told == about(path, found):
                return use(found)
            why = "it does not fit its checksum"
        except OSError:  # not there, or not ours to read
            return None
        except Exception as error:  # cut off, forged, or whatever else lies there
            why = reason(error)
        self.counts["pages_damaged"] += 1
        warn_once(
            "prefix_store damaged",
            f"A page of the prefix_store in {path.parent} is damaged ({why}): it is removed and computed anew. So are others, "
            "without a word; stats() counts them",
        )
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    # -- writing -------------------------------------------------------------------------------------------------

    def keep(
        self,
        state: str,
        nodes: Sequence[Prefix],
        places: Iterable[bytes],
        storages: Sequence[PageStorage],
    ) -> None:
        """Have what is new of a beginning written soon, and the rest noted as used, under the lock of its pool.

        Args:
            nodes: the root, and its pages in order.
            places: tokens of each, see PrefixTree.places.
            storages: of all layers.
        """
        now, stamp = time.monotonic(), time.time_ns()
        old = {number: node for number, node in enumerate(nodes) if now - node.filed > OFTEN}
        if not old:
            return
        names, ready = prefix_names(places), None
        formats = name_of(*(in_rows(one.spec) for one in storages))
        if storages[0].device.type != "cpu":
            ready = torch.Event(storages[0].device)
            ready.record()
        with self._lock:
            for number, node in [*old.items()][: max(0, QUEUED - len(self._waiting))]:
                name = [names[number]] if node.page is None else [names[number], formats]
                files = [(name, first_tokens_of(node) if node.page is None else None)]
                files += [([*name, STATES], node.states)] if node.states is not None else []
                for place, tensors in files:
                    path = self._path(state, *place)
                    self._waiting.append(
                        Waiting(path, node, storages, stamp - number, ready, tensors)
                    )
                node.filed = now
            # not a daemon: a process that ends writes what waits
            if self._waiting and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._write_all, name="kv_hf prefixes")
                self._thread.start()

    def flush(self) -> None:
        """Wait until all pages that are kept are written."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def clear(self) -> None:
        """Remove all files of the states that this process has written or looked for, and write none of those that wait."""
        with self._lock:
            self._waiting.clear()
        self.flush()
        for _, _, path in (found for state in self._states for found in self._files(state)):
            with contextlib.suppress(OSError):
                path.unlink()
        self._bytes = None

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                one = self._waiting[0]
            try:
                self._write(one)
            except Exception as error:
                warn_once(
                    "prefix_store full",
                    f"Pages of a prefix_store cannot be written to {self.path} ({reason(error)}): the store goes on in memory",
                )
            finally:
                with self._lock:
                    if self._waiting and self._waiting[0] is one:
                        self._waiting.popleft()

    def _write(self, one: Waiting) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(one.path, ns=(one.used, one.used))
            return
        if one.ready is not None:
            one.ready.synchronize()
        held = page_of(one.node.page, one.storages) if one.tensors is None else one.tensors
        tensors = {name: tensor.cpu().contiguous() for name, tensor in held.items()}
        data = save(tensors, about(one.path, tensors))
        one.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = one.path.with_name(f"{one.path.name}.{secrets.token_hex(8)}{ASIDE}")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            os.utime(aside, ns=(one.used, one.used))
            os.replace(aside, one.path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        self.counts["pages_written"] += one.tensors is None
        self._make_room(len(data))

    def _make_room(self, new: int) -> None:
        """Remove the files that were used least recently where the bound is passed by `new` bytes more."""
        if self._bytes is not None and self._bytes + new <= self.max_bytes:
            self._bytes += new
            return
        files = sorted(self._files("*"))
        left = sum(size for _, size, _ in files)
        if left > self.max_bytes:
            for _, size, path in files:
                if left <= KEPT * self.max_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                left -= size
        self._bytes = left

    def _files(self, state: str) -> Iterator[tuple[int, int, Path]]:
        """Yield (time of last use, bytes, path) of the files of some states, unfinished ones among them."""
        for path in self.path.glob(f"{state}/*"):
            with contextlib.suppress(OSError):
                found = path.stat()
                if path.suffix in (SUFFIX, ASIDE):
                    yield found.st_mtime_ns, found.st_size, path


def about(path: Path, tensors: Tensors) -> dict[str, str]:
    """Return the metadata of a file in this place, which holds tensors [any shape] by these names."""
    # sizes too: a tensor of no numbers has the sum of every other one
    sums = [(name, str(a.dtype), [*a.shape], digest(a)) for name, a in sorted(tensors.items())]
    return {"version": VERSION, "name": "/".join(path.parts[-2:]), "sums": json.dumps(sums)}


def in_rows(spec: PageSpec) -> PageSpec:
    """Return a spec in the layout of files."""
    return PageSpec(*(replace(side, layout=ROWS) for side in spec.sides))


def page_of(page: Any, storages: Sequence[PageStorage]) -> Tensors:
    """Return a page of all layers as {"page": [bytes]}, uint8, on the CPU."""
    specs = [in_rows(one.spec) for one in storages]
    sizes = [carved_bytes(spec, 1) for spec in specs]
    raw = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
    for part, spec, storage in zip(raw.split(sizes), specs, storages, strict=True):
        for side, fields in zip(storage.sides, carve(part, spec, 1), strict=True):
            for name, held in taken(side, [page]).items():
                fields[name].copy_(held)
    return {"page": raw}


def carved(specs: Sequence[PageSpec], tensors: Tensors) -> list[Sides]:
    """Return the fields [1, ..] of both sides of each layer, views of the tensor that `page_of` made.

    Raises an error where they do not fit.
    """
    parts = tensors["page"].split([carved_bytes(spec, 1) for spec in specs])
    page = [carve(part, spec, 1) for part, spec in zip(parts, specs, strict=True)]
    if not all(is_order(side["order"]) for both in page for side in both if "order" in side):
        raise ValueError("it names a channel twice")
    return page


def put_pages(ids: Sequence[int], pages: Sequence[Any], storages: Sequence[PageStorage]) -> None:
    """Write pages, fields [1, ..] as PrefixFolder.pages returned them, to these ids; under the lock of the storages."""
    for place, storage in enumerate(storages):
        storage.grow(max(storage.capacity, max(ids) + 1))
        storage.sealed += len(ids)
        for number, side in enumerate(storage.sides):
            parts = [page[place][number] for page in pages]
            put(side, ids, {name: torch.cat([one[name] for one in parts]) for name in parts[0]})


def in_pairs(tensors: Tensors) -> list[Pair]:
    """Return the first keys and values [num_kv_heads, tokens, ..] of each layer from tensors by layer and side.

    Raises an error where they do not fit.
    """
    if any(one.ndim != 3 or not one.is_floating_point() for one in tensors.values()):
        raise ValueError("it holds no keys and values")
    return [(tensors[f"{n}.0"], tensors[f"{n}.1"]) for n in range(-(-len(tensors) // 2))]


def first_tokens_of(node: Prefix) -> Tensors:
    """Return the exact first keys and values [num_kv_heads, tokens, ..] of a root by layer and side."""
    return {
        f"{place}.{side}": tokens
        for place, both in enumerate(node.sinks)
        for side, tokens in enumerate(both)
    }
