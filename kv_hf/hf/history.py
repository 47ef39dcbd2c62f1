"""Text that a call of generate() continues: whether a cache holds its beginning, and what the cache then knows of it.

Looks at ids once per call, never in a decode step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from ..cache.identity import model_mark, virtual_owner
from ..cache.origin import first_difference
from ..cache.static_cache import StaticPagedCache
from ..errors import CacheMismatchError
from ..notices import warn_once

NOT_COMPARED = (
    "The text that a cache holds is not known, or the new one is not (direct calls of the model, beams, embeddings): they are "
    "not compared, and a cache of another text gives wrong answers. Say the text of direct calls with cache.note(ids)"
)


@dataclass(frozen=True)
class Text:
    """The text that a call of generate() is given, beside the cache that it is given.

    Attributes:
        cache: of the text's own tokens.
        ids: [rows, columns] token ids, or those of new tokens alone.
        width: columns of the mask; -1 where none is known.
        mask: [rows, width], 0 or False = padding, or None.
        is_pair: whether the cache is half of an encoder-decoder cache.
        assists: whether the model drafts for another one, which calls it every few tokens and crops what it refuses.
        embedded: whether embeddings are given in place of ids.
        comparable: whether keys and values come from these ids alone, one column each.
        told: whether those of the tokens that come will, too, and the call ends with them.
    """

    model: Any
    cache: Any
    ids: torch.Tensor
    width: int
    mask: torch.Tensor | None
    is_pair: bool
    assists: bool
    embedded: bool
    comparable: bool
    told: bool

    @classmethod
    def of(
        cls,
        model: Any,
        cache: Any,
        own: Any,
        input_ids: torch.Tensor,
        generation_config: Any,
        inputs: dict[str, Any],
    ) -> "Text":
        """Take over the arguments of `_prefill`.

        Args:
            own: the paged half of `cache`, or the cache itself.
            input_ids: [rows, columns] token ids.
            inputs: the other inputs of the model.
        """
        mask = inputs.get("attention_mask") if own is cache else None  # a pair's is the encoder's
        width = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        embedded = inputs.get("inputs_embeds") is not None
        comparable = (
            own is cache
            and not embedded
            and input_ids.ndim == 2
            and (mask is None or mask.ndim == 2)
            and virtual_owner(model) is None
            and not (_chooses_its_inputs(model) and isinstance(own, StaticPagedCache))
        )
        usual = type(model)._sample is GenerationMixin._sample
        told = comparable and usual and max(generation_config.num_beams or 1, 1) == 1
        assists = bool(getattr(generation_config, "is_assistant", False))
        kinds = (own is not cache, assists, embedded, comparable, told)
        return cls(model, own, input_ids, width, mask, *kinds)

    @property
    def is_whole(self) -> bool:
        """Whether the ids are the whole text: where the mask is longer they are new tokens alone."""
        return self.width in (-1, self.ids.shape[1])

    def check(self) -> None:
        """Raise CacheMismatchError where the cache holds another text, or more of this one than is given.

        A text that cannot be compared with what the cache holds is said once.
        """
        known = self.cache.token_ids
        if not self.assists and (self.is_whole or self.embedded):
            if self.comparable and known is not None:
                self._check_same(known)
            elif not self.is_pair and self._seen():
                warn_once("text not compared", NOT_COMPARED)
        if not self.is_pair and not _chooses_its_inputs(self.model):
            self._check_longer()

    def note(self) -> None:
        """Note this text, and the model's weights, in the cache. Raises CacheMismatchError for other weights than before."""
        if self.assists:
            return
        self.cache.note_weights(model_mark(self.model), type(self.model).__name__)
        seen = self._seen()
        known = self.cache.token_ids
        if not seen and self.told:
            self.cache.note_prompt(self.ids)
        elif not self.told or known is None or known.shape[0] != len(self.ids):
            self.cache.note_prompt(None)
        elif self.is_whole:
            self.cache.note_prompt(self.ids)
        else:
            self.cache.note_prompt(self.ids if self.cache.known_columns >= seen else None, seen)

    def check_columns(self) -> None:
        """Forget the text behind a first forward where the model put other columns into the cache than its tokens."""
        known, seen = self.cache.token_ids, self.cache.get_seq_length()
        if known is not None and isinstance(seen, int) and seen != known.shape[1]:
            self.cache.note_prompt(None)

    def _seen(self) -> int:
        """Return the columns that the cache holds; a preallocated cache is asked on its device."""
        return int(self.cache.get_seq_length())

    def _check_longer(self) -> None:
        """Raise CacheMismatchError when the whole text is no longer than what the cache has seen of it."""
        seen = self.cache.get_seq_length()
        columns = self.ids.shape[1]
        if isinstance(seen, int) and 0 < columns <= seen and self.is_whole and not self.embedded:
            raise CacheMismatchError(
                f"input_ids of {columns} tokens do not continue a cache that has seen {seen}: pass the whole text so "
                "far and at least one new token, or the new tokens with an attention_mask of the whole text; to go back "
                f"to these tokens call cache.crop({columns - 1 - seen}); for another text make a new cache, or call "
                "cache.reset()"
            )

    def _check_same(self, known: torch.Tensor) -> None:
        """Raise CacheMismatchError where the text begins otherwise than the text that the cache holds."""
        if known.shape[0] != len(self.ids):
            return  # the first forward refuses another number of rows
        seen = self._seen()
        held = min(seen, self.cache.known_columns)
        found = first_difference(known[:, :held], self.ids, self.mask)
        if found is None:
            return
        row, column = found
        pair = int(self.ids[row, column]), int(known[row, column])
        less = f"call cache.crop({column - seen}) to keep the {column} tokens before it, or "
        if isinstance(self.cache, StaticPagedCache) or not column:
            less = "call "
        raise CacheMismatchError(
            f"input_ids do not begin with the {seen} tokens that this cache holds: token {column} of row {row} is "
            f"{pair[0]}, and {pair[1]} in the cache, so keys and values would be those of another text. After an edit "
            f"{less}cache.reset() for another text; cache_config={{'prefix_store': kv_hf.PrefixStore()}} finds common "
            "beginnings by itself"
        )


def expect_drafts(model: Any, cache: Any, own: Any, inputs: dict[str, Any]) -> None:
    """Prepare a cache for assisted decoding, which has no prefill of its own: the text is noted at the end of the call.

    Args:
        cache, own: as `Text.of` takes them.
        inputs: of the model.
    Raises: CacheMismatchError for other weights than the cache was filled with.
    """
    own.note_weights(model_mark(model), type(model).__name__)
    told = (
        own is cache
        and inputs.get("inputs_embeds") is None
        and type(model)._assisted_decoding is GenerationMixin._assisted_decoding
        and virtual_owner(model) is None
    )
    if told and not own.get_seq_length():
        own.note_prompt(torch.empty(1, 0, dtype=torch.long))


def _chooses_its_inputs(model: Any) -> bool:
    """Say whether a model cuts the text by itself: it may have put columns in front that the text does not have (CPMAnt)."""
    own = type(model).prepare_inputs_for_generation
    return own is not GenerationMixin.prepare_inputs_for_generation
