"""The text of a call of generate(): whether a cache holds its beginning, and what the cache knows of it when the call ends.

Looks at ids at the beginning and the end of a call, never in a decode step.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from ..bridge.masks import within_generate
from ..cache.identity import virtual_owner
from ..cache.model_shape import CACHE
from ..cache.paged_cache import PagedCache
from ..errors import CacheMismatchError
from ..notices import held_back, warn_once
from .generation import with_hint


def first_difference(
    known: torch.Tensor, given: torch.Tensor, mask: torch.Tensor | None
) -> tuple[int, int] | None:
    """Return (row, column) of the first token that differs, None where all agree; waits for the device once.

    Args:
        known: [rows, columns] token ids.
        given: [rows, columns] token ids; what one of the two is longer is not compared.
        mask: [rows, columns of `given`], 0 or False = hidden: such columns are not compared; None hides none.
    """
    columns = min(known.shape[1], given.shape[1])
    differs = known[:, :columns].to(given.device) != given[:, :columns]
    if mask is not None:
        differs &= mask[:, :columns].to(given.device, torch.bool)
    places = differs.T.nonzero()[:1].tolist()  # by columns first
    return (places[0][1], places[0][0]) if places else None


class Text:
    """The text that a call of generate() is given, beside the cache that it is given.

    Args:
        cache: as it was given, one of an encoder-decoder too.
        own: the paged half of `cache`, or the cache itself.
        ids: [rows, columns] token ids, or those of new tokens alone.
        inputs: the other inputs of the model, as `_prefill` gets them.
    Attributes:
        cache: of the text's own tokens.
        mask: [rows, columns of the whole text], 0 or False = padding, or None.
        seen: columns that the cache holds.
        is_whole: whether the ids are the whole text: where the mask is longer they are new tokens alone.
        is_comparable: whether keys and values come from these ids alone, one column each; drafts for another model are not asked.
        is_embedded: whether embeddings are given in place of ids.
        is_known: whether the ids of the tokens that come will be known, too.
        may_be_short: whether the text may be no longer than the cache: columns may come from elsewhere.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        own: Any,
        ids: torch.Tensor,
        generation_config: Any,
        inputs: dict[str, Any],
    ) -> None:
        self.cache = own
        self.ids = ids
        self.seen = own.get_seq_length()
        # a pair's mask is the encoder's
        mask = self.mask = inputs.get("attention_mask") if own is cache else None
        width = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        self.is_whole = width in (-1, ids.shape[1])
        # a drafting model is called every few tokens by another one, which crops what it refuses
        drafts = bool(getattr(generation_config, "is_assistant", False))
        flat = ids.ndim == 2 and (mask is None or mask.ndim == 2)
        self.is_comparable = comes_from_ids(model, cache, own, inputs) and not drafts and flat
        kind = type(model)
        usual = kind._sample is GenerationMixin._sample
        self.is_known = self.is_comparable and usual and (generation_config.num_beams or 1) <= 1
        # a model that cuts the text by itself may have put columns in front that the text does not have (CPMAnt)
        cuts = kind.prepare_inputs_for_generation
        cuts_by_itself = cuts is not GenerationMixin.prepare_inputs_for_generation
        embedded = inputs.get("inputs_embeds") is not None
        self.is_embedded = embedded and own is cache and not drafts
        self.may_be_short = own is not cache or cuts_by_itself or embedded

    def check(self) -> None:
        """Compare this text with what the cache knows of the one that it holds; warn once where it does not know all.

        With on_edit="crop" the cache keeps what this text begins with, and forgets the rest.

        Raises: CacheMismatchError where the cache holds another text, or more of this one than is given.
        """
        cache, columns = self.cache, self.ids.shape[1]
        if not self.seen or not (self.is_whole or self.is_embedded):
            return
        cache.forward.check()
        known = cache.token_ids
        held = 0 if known is None else min(self.seen, cache.origin.known_columns)
        if cache.options.on_edit == "crop" and self.is_whole and self.is_comparable:
            self._keep_beginning(known, min(held, columns - 1))
            return
        if self.is_comparable and known is not None and known.shape[0] == len(self.ids):
            self._check_same(known[:, :held])
        if self.is_embedded or (self.is_comparable and held < self.seen):
            warn_once(
                "unknown columns",
                "A cache holds columns of which it does not know the token ids, or the new text has none: the model was called "
                "without generate(), with embeddings or beams, or a call was stopped. They are not compared with the text that "
                "generate() is given: call cache.note(ids) after such calls",
            )
        if self.is_whole and 0 < columns <= self.seen and not self.may_be_short:
            raise CacheMismatchError(
                f"input_ids of {columns} tokens do not continue a cache that has seen {self.seen}: pass the whole text so "
                "far and at least one new token, or the new tokens with an attention_mask of the whole text; to go back "
                f"to these tokens call cache.crop({columns - 1 - self.seen}); for another text make a new cache, or call "
                "cache.reset()"
            )

    def _keep_beginning(self, known: torch.Tensor | None, columns: int) -> None:
        """Drop all that the cache holds but the beginning of its `columns` known ids that this text has, too."""
        if known is None or known.shape[0] != len(self.ids):
            columns = 0
        else:
            real, own = self._real(known[:, :columns]), known[:, :columns].to(self.ids.device)
            given = torch.ones_like(own) if self.mask is None else self.mask[:, :columns]
            given = given.to(self.ids.device, torch.bool)
            same = (real == given) & ((own == self.ids[:, :columns]) | ~given)
            columns = int(same.all(0).long().cumprod(0).sum())
        try:
            if 0 < columns < self.seen:
                self.cache.crop(columns - self.seen)
            elif not columns:
                self.cache.reset()
        except (CacheMismatchError, RuntimeError):  # states and windows that cannot go back
            self.cache.reset()
        self.seen = self.cache.get_seq_length()

    def _real(self, known: torch.Tensor) -> torch.Tensor:
        """Return which columns of `known` the cache holds as tokens, not as left padding."""
        padding = torch.tensor([row.padding for row in self.cache._group.rows], device="cpu")
        columns = torch.arange(known.shape[1], device="cpu")
        return (columns >= padding[:, None]).to(self.ids.device)

    def _check_same(self, known: torch.Tensor) -> None:
        """Raise CacheMismatchError where the text begins otherwise than the text that the cache holds."""
        found = first_difference(known, self.ids, self.mask)
        if found is None:
            return
        row, column = found
        pair = int(self.ids[row, column]), int(known[row, column])
        less = f"call cache.crop({column - self.seen}) to keep the {column} tokens before it, or "
        if not column:
            less = "call "
        raise CacheMismatchError(
            f"input_ids do not begin with the {self.seen} tokens that this cache holds: token {column} of row {row} is "
            f"{pair[0]}, and {pair[1]} in the cache, so keys and values would be those of another text. After an edit "
            f"{less}cache.reset() for another text; the option on_edit='crop' does so by itself, and a prefix_store finds "
            "common beginnings of many texts"
        )

    def note(self) -> int | None:
        """Note this text in the cache, which holds it now; return the columns in front of it, None where it is not known.

        Columns that were not known are from now on those that this text has.
        """
        front = 0 if self.is_whole else self.seen
        end, seen = front + self.ids.shape[1], self.cache.get_seq_length()
        # a model may have put other columns into the cache than its tokens
        if not self.is_known or seen != end or self.cache.origin.known_columns < front:
            return None
        self.cache.origin.note_text(self.ids, front, end)
        return front


def comes_from_ids(model: Any, cache: Any, own: Any, inputs: dict[str, Any]) -> bool:
    """Say whether a decoder's keys and values come from token ids: not from embeddings, or peft's virtual tokens.

    Args:
        cache, own: as `Text` takes them.
        inputs: of the model.
    """
    return own is cache and inputs.get("inputs_embeds") is None and virtual_owner(model) is None


# -- the end of a call -------------------------------------------------------------------------------------------------

# of the call that runs: caches that it fills, the columns in front of its text, and whether a store keeps its answer
_filled: ContextVar[list[tuple[Any, int, bool]] | None] = ContextVar("kv_hf_filled", default=None)


def note_at_end(cache: Any, columns_in_front: int, kept: bool = False) -> None:
    """Have the call of generate() that runs now note the tokens that it makes in `cache`.

    Args:
        columns_in_front: of the text that the call is given.
        kept: whether the tokens go into the cache's store too.
    """
    filled = _filled.get()
    if filled is not None:
        filled.append((cache, columns_in_front, kept))


def around_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GenerationMixin.generate."""
    place = list(inspect.signature(original).parameters).index("streamer") - 1

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        streamer = args[place] if len(args) > place else kwargs.get("streamer")
        filled: list[tuple[Any, int, bool]] = []
        before = _filled.set(filled)
        given = kwargs.get("past_key_values", kwargs.get(CACHE))
        forward = given.forward if isinstance(given, PagedCache) else None
        try:
            if forward is not None:
                forward.states_moved = False
            with nullcontext() if streamer is None else held_back(), within_generate():
                result = original(self, *args, **kwargs)
        except BaseException as error:
            if forward is not None and forward.states_moved:
                forward.changing = True  # states may have moved that no page has followed
            told = with_hint(error)
            if told is error:
                raise
            raise told from error
        finally:
            _filled.reset(before)
        made = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
        # what code of others made of a text is not taken for what it is
        if isinstance(made, torch.Tensor) and kwargs.get("custom_generate") is None:
            for cache, front, kept in filled:
                if made.ndim == 2 and made.shape[0] == len(cache._group):
                    cache.origin.note_text(made, front, cache.get_seq_length())
                    if kept:
                        _keep(cache)
        return result

    return generate


def _keep(cache: Any) -> None:
    """Add the text that a cache holds to its store, where all of it is known."""
    seen = cache.get_seq_length()
    if cache.origin.known_columns == seen:
        rows = zip(cache.token_ids[:, :seen].tolist(), cache._held_rows(), strict=True)
        cache.options.prefix_store.add(cache, [ids[seen - count :] for ids, (count, _) in rows])
