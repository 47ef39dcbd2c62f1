"""Windows of tokens: documents one behind the other, cut at equal lengths; which window comes in which step."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from ...errors import ConversionError

TOGETHER = 64  # documents that are tokenized at a time


def begins_with_bos(tokenizer: Any) -> bool:
    """Say whether the tokenizer begins texts with its BOS."""
    return tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("").input_ids


def token_documents(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the token ids of texts, each begun as the tokenizer begins texts, or else ended with EOS."""
    ending = [] if begins_with_bos(tokenizer) else [tokenizer.eos_token_id]
    ending = [token for token in ending if token is not None]
    texts = iter(texts)
    while group := list(itertools.islice(texts, TOGETHER)):
        for ids in tokenizer(group, verbose=False).input_ids:
            yield [*ids, *ending]


def packed(documents: Iterable[list[int]], length: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield windows of `length` ids of documents one behind the other, `tokens` at most; the rest is left out."""
    held: list[int] = []
    left = tokens // length
    for ids in documents:
        held += ids
        while len(held) >= length:
            if not left:
                return
            yield {"input_ids": held[:length]}
            del held[:length]
            left -= 1


def write_windows(folder: Path, windows: Iterable[dict[str, Any]], length: int, name: str) -> None:
    """Write windows as a dataset that is mapped from disk, not read.

    Raises: ConversionError when there is none.
    """
    import datasets

    features = datasets.Features(
        {"input_ids": datasets.Sequence(datasets.Value("int32"), length=length)}
    )
    found = iter(windows)
    first = next(found, None)
    if first is None:
        raise ConversionError(
            f"data {name!r} is shorter than one window of {length} tokens: take more text, or a smaller length"
        )
    from datasets.arrow_writer import ArrowWriter

    folder.mkdir(parents=True)
    with ArrowWriter(features=features, path=str(folder / "windows.arrow")) as writer:
        for window in itertools.chain([first], found):
            writer.write(window)
        writer.finalize()


def read_windows(folder: Path) -> Any:
    """Return the dataset that `write_windows` wrote; items are {"input_ids": [length] int64}."""
    import datasets

    return datasets.Dataset.from_file(str(folder / "windows.arrow")).with_format("torch")


def held_out(documents: Iterable[list[int]], length: int, tokens: int) -> list[list[int]]:
    """Return windows to evaluate on: the first `length` ids of each document; of a single document, all windows of it."""
    found: list[list[int]] = []
    count = 0
    every = iter(documents)
    first, second = next(every, None), next(every, None)
    if first is None:
        return found
    if second is None:
        every = (first[i : i + length] for i in range(0, len(first), length))
    else:
        every = (ids[:length] for ids in itertools.chain([first, second], every))
    for ids in every:
        if len(ids) > 1 and count < tokens:
            found.append(ids)
            count += len(ids)
    return found


class WindowOrder(Sampler[list[int]]):
    """Endless batches of window numbers for one process: every epoch in an order of its own, from any batch on.

    Batches are dealt to the processes in turn, so that N processes see in one step what one process sees that accumulates
    N times as many.
    """

    def __init__(
        self,
        count: int,
        batch: int,
        seed: int,
        *,
        start: int = 0,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self.start, self.rank, self.processes = start, rank, processes
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __iter__(self) -> Iterator[list[int]]:
        for number in itertools.count(self.start):
            first = (number * self.processes + self.rank) * self.batch
            yield [self.window(place) for place in range(first, first + self.batch)]

    def window(self, place: int) -> int:
        """Return the window at a place of the endless order."""
        epoch, within = divmod(place, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
        return int(self._order[within])
