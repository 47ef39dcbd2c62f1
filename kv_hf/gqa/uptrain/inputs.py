"""The inputs of a run: its sources of text, the held-out windows, the folder that it works in."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConversionError
from .documents import HELD, SELF, Source, check_source, documents, name_of, place_of
from .models import Pair
from .progress import read_settings
from .sampling import sampled
from .settings import UptrainSettings
from .windows import held_out, packed, token_documents, write_windows


def sources_of(data: str | Path | Sequence[Source]) -> list[Source]:
    """Return data as a list of sources."""
    if isinstance(data, str | Path):
        return [data]
    if not data:
        raise ConversionError("data is empty: it names no text")
    return list(data)


def held_windows(
    pair: Pair, held: Source | None, sources: list[Source], length: int
) -> list[list[int]]:
    """Return the windows of a held-out text; none where there is no such text.

    Raises: ConversionError for a text that is trained on, or has nothing to score.
    """
    if held is None:
        return []
    if place_of(held) in map(place_of, sources) and held != SELF:
        raise ConversionError(f"{HELD} {name_of(held)!r} is among the data; give another text")
    check_source(held, HELD)
    found = held_out(token_documents(pair.tokenizer, documents(held, HELD)), length, 10_000_000)
    if not found:
        raise ConversionError(f"{HELD} {name_of(held)!r} has no text of two tokens")
    return found


def check_tokens(settings: UptrainSettings, sources: list[Source], length: int, held: bool) -> None:
    """Raise ConversionError where no more tokens are to be taken than make no window, or none to evaluate on (`held`: a text is)."""
    least = length if held else 2 * length
    why = f"a window of {length} tokens" + ("" if held else " to train on, and one to evaluate on")
    for name in ("tokens", *(["sample_tokens"] if sources == [SELF] else [])):
        if getattr(settings, name) < least:
            raise ConversionError(
                f"{name} must be at least {least} ({why}), got {getattr(settings, name)}"
            )


def check_work(work: Path, resume: bool, settings: UptrainSettings, asked: dict[str, Any]) -> None:
    """Raise ConversionError unless a run can begin, or go on, in its working folder."""
    if not resume:
        if work.exists():
            raise ConversionError(
                f"{str(work)!r} holds an unfinished run: go on with it (resume), or delete it"
            )
        return
    before = read_settings(work)
    other = settings.differences(before)
    names = ("student", "teacher", "data", "held", "window", "processes")
    other += [
        f"{name}: {before.get(name)!r} then, {asked[name]!r} now"
        for name in names
        if before.get(name) != asked[name]
    ]
    if other:
        raise ConversionError(f"resume: {work} holds a run of other settings: {'; '.join(other)}")


def write_data(
    work: Path,
    pair: Pair,
    teacher: Any,
    sources: list[Source],
    settings: UptrainSettings,
    length: int,
    sampling: Callable[[int, int], object],
) -> None:
    """Write the windows of all sources, unless they are there."""
    folder = work / "data"
    if folder.exists():
        return

    def every() -> Iterator[list[int]]:
        for source in sources:
            ids: Iterable[list[int]]
            if source == SELF:
                ids = sampled(
                    lambda: teacher, pair, settings.sample_tokens, length, settings.seed, sampling
                )
            else:
                ids = token_documents(pair.tokenizer, documents(source))
            yield from ids

    aside = work / "data.unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        name = ", ".join(name_of(source) for source in sources)
        write_windows(aside, packed(every(), length, settings.tokens), length, name)
    except ConversionError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    aside.rename(folder)
