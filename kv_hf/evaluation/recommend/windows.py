"""Windows of token ids that caches are compared on, cut from several texts; those to choose on and those to judge on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ...texts import longest_context, text_windows

Source = str | Path | Sequence[Any]


@dataclass(frozen=True)
class Windows:
    """Windows of texts.

    Attributes:
        ids: [tokens] int64 of each, on the model's device.
        texts: the name of the text that each was cut from; numbers where only token ids were given.
        named: whether they are names.
    """

    ids: tuple[torch.Tensor, ...]
    texts: tuple[str, ...]
    named: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The texts, each once."""
        return tuple(dict.fromkeys(self.texts))


def cut_windows(
    model: Any, tokenizer: Any, argument: str, given: Source, window: int, count: int
) -> Windows:
    """Cut the first `count` windows of `window` tokens of each text.

    Args:
        tokenizer: None takes the one that lies beside the model's weights.
        argument: what messages call the texts.
        given: a text as kv_hf.texts.load_text takes it, several of them, or token ids: one sequence per window.
    Raises: ValueError naming the argument, for none, and for texts that cannot be read.
    """
    sources = [given] if isinstance(given, (str, Path)) else list(given)
    if not sources:
        raise ValueError(f"{argument} must hold at least one text, got none")
    if not any(isinstance(one, (str, Path)) for one in sources):
        ids = [torch.as_tensor(one, dtype=torch.long, device=model.device) for one in sources]
        return Windows(tuple(ids), tuple(map(str, range(len(ids)))), named=False)
    if tokenizer is None:
        tokenizer = _tokenizer_of(model, argument)
    most = longest_context(model.config)
    if window > most:
        raise ValueError(f"window must be at most the model's {most} positions, got {window}")
    cut: list[torch.Tensor] = []
    names: list[str] = []
    for source in sources:
        if not isinstance(source, (str, Path)):
            raise ValueError(f"{argument} must be all names of texts or all token ids, got both")
        found = text_windows(tokenizer, source, window, count)
        cut += [torch.tensor(ids, device=model.device) for ids in found]
        names += [str(source)] * len(found)
    return Windows(tuple(cut), tuple(names), named=True)


def _tokenizer_of(model: Any, argument: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"tokenizer must be given: none lies at the model's {model.name_or_path!r} ({str(error)[:120]}); or give "
            f"{argument} as token ids"
        ) from None


def check_held_out(chosen_on: Windows, held_out: Windows) -> None:
    """Raise ValueError where a window to judge on is one that was chosen on, or of the same text."""
    both = []
    if chosen_on.named and held_out.named:
        both = sorted(set(chosen_on.names) & set(held_out.names))
    for ids in held_out.ids:
        if any(torch.equal(ids, other) for other in chosen_on.ids):
            both.append("a window of token ids")
    if both:
        raise ValueError(
            f"held_out must be other text than text, got {both[0]} in both: what was chosen on a text is not judged on it"
        )
