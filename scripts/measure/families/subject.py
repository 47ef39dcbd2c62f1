"""A model under test with the inputs and the two kinds of cache that operations compare."""

import copy
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

import kv_hf
from measure.families.build import twin
from measure.families.shrink import TEXT_IDS

PAGE_SIZE = 16
# with 4 sinks and pages of 16 tokens, rows of these lengths seal a page within the new tokens
LENGTHS = (158, 37, 93)
NEW_TOKENS = 10
# kinds of cache without a part of kv_hf; "eager" is DynamicCache in a model whose attention is the plainest there is
STOCK = ("dynamic", "eager", "none")
Tensors = dict[str, torch.Tensor]


@dataclass
class Subject:
    """A tiny model of one family, and how it is asked.

    Attributes:
        model: the model whose attention kv_hf may switch; `unswitched` and `kept` are copies of it.
        fixed: arguments of every generate() that do not depend on the text (an encoder's inputs), for one row.
        decodes: the text goes to the decoder of an encoder-decoder model.
    """

    model: Any
    fixed: Tensors = field(default_factory=dict)
    decodes: bool = False

    def __post_init__(self) -> None:
        self.unswitched = copy.deepcopy(self.model)
        self.kept = copy.deepcopy(self.model)

    def of(self, kind: str) -> Any:
        """Return the model for a kind of cache: what is expected comes from one that kv_hf has never touched."""
        if kind == "eager":
            return self.eager
        return self.unswitched if kind in STOCK else self.model

    @cached_property
    def eager(self) -> Any:
        """A copy whose text model attends in plain operations, transformers' own: what sdpa has to agree with.

        Towers and encoders beside it keep their attention, as they do where kv_hf switches a model.
        """
        model = copy.deepcopy(self.unswitched)
        text = model.config.get_text_config(decoder=True)
        parts = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
        model.set_attn_implementation({parts[0]: "eager"} if parts else "eager")
        return model

    def text(self, rows: int = 2, length: int = LENGTHS[0], seed: int = 0) -> torch.Tensor:
        """Return token ids [rows, length] without special ids."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(*TEXT_IDS, (rows, length), generator=generator)

    def repetitive(self, length: int = LENGTHS[0]) -> torch.Tensor:
        """Return one row of ids [1, length] in which a phrase comes again, for prompt lookup to find."""
        return self.text(1, 25).repeat(1, length // 25 + 1)[:, :length]

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Return arguments of generate() or forward() for a text."""
        rows = ids.shape[0]
        given = {name: value.repeat_interleave(rows, 0) for name, value in self.fixed.items()}
        names = (
            ("decoder_input_ids", "decoder_attention_mask")
            if self.decodes
            else ("input_ids", "attention_mask")
        )
        given[names[0]] = ids
        if mask is not None:
            given[names[1]] = mask
        return given

    def padded(self) -> dict[str, Any]:
        """Return a batch of three lengths, padded on the left."""
        width = max(LENGTHS)
        ids, mask = (
            self.text(len(LENGTHS), width),
            torch.zeros(len(LENGTHS), width, dtype=torch.long),
        )
        for row, length in enumerate(LENGTHS):
            mask[row, width - length :] = 1
        return self.inputs(ids * mask, mask)

    def takes(self, name: str) -> bool:
        """Say whether the model's forward has a parameter of this name."""
        return name in inspect.signature(self.model.forward).parameters

    def assistant(self) -> Any:
        """Return a draft model, a little off."""
        other = twin(self.unswitched)
        other.generation_config.num_assistant_tokens = 4
        return other


def options(kind: str, **more: Any) -> dict[str, Any]:
    """Return what generate() is asked for to use a kind of cache: dynamic, none, or a name of kv_hf."""
    if kind == "none":
        return {"use_cache": False}
    if kind in STOCK:
        return {}
    return {"cache_implementation": kind, "cache_config": {"page_size": PAGE_SIZE, **more}}


def new_cache(model: Any, kind: str) -> Any:
    """Return an empty cache of a kind for forward() calls and for several turns."""
    encoder_decoder = bool(model.config.is_encoder_decoder)
    if kind in STOCK:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        if encoder_decoder:
            return EncoderDecoderCache(cache, DynamicCache())
        return cache
    made = kv_hf.PagedEncoderDecoderCache if encoder_decoder else kv_hf.PagedCache
    return made.from_implementation(model.config, kind, {"page_size": PAGE_SIZE})
