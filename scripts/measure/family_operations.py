"""What is compared on each family: a model with its inputs, and a table of operations, run with each kind of cache.

An operation returns tensors by name: tokens are compared exactly, logits and scores within a tolerance.
"""

import copy
import inspect
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import kv_hf
from kv_hf.backends import dispatch
from kv_hf.backends.base import Backend
from kv_hf.cache.model_shape import CACHE
from kv_hf.read_budget import ReadBudget
from measure.family_models import TEXT_IDS, twin

Outcome = dict[str, Any]
Options = Mapping[str, Any]
NONE: Options = {}
PAGE_SIZE = 16
# with 4 sinks and pages of 16 tokens, rows of these lengths seal a page within the new tokens
LENGTHS = (158, 37, 93)
NEW_TOKENS = 10
SOURCE_TOKENS, FRAMES = 40, 80  # of what an encoder reads
# kinds of cache without a part of kv_hf; "plain" is no cache in a model whose attention is the plainest there is
STOCK = ("dynamic", "plain")


class NotOffered(Exception):
    """The model has no such operation, whatever its cache."""


class Subject:
    """A tiny model of one family, and what it reads beside a text.

    Attributes:
        model: the model whose attention kv_hf may switch; `unswitched` is a copy of it.
        fixed: arguments of every forward that do not depend on the text (what an encoder reads, images), for one row.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.unswitched = copy.deepcopy(model)
        self.decodes = bool(model.config.is_encoder_decoder)  # the text goes to the decoder
        self.fixed = other_inputs(model, torch.Generator().manual_seed(0))

    def of(self, kind: str) -> Any:
        """Return the model for a kind of cache: what is expected comes from one that kv_hf has never touched."""
        if kind == "plain":
            return self.plain
        return self.unswitched if kind in STOCK else self.model

    @cached_property
    def plain(self) -> Any:
        """A copy whose text model attends in plain operations, transformers' own.

        Towers and encoders beside it keep their attention, as they do where kv_hf switches a model.
        """
        model = copy.deepcopy(self.unswitched)
        text = model.config.get_text_config(decoder=True)
        parts = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
        model.set_attn_implementation({parts[0]: "eager"} if parts else "eager")
        return model

    def inputs(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        """Return arguments of generate() or forward() for a text [rows, length]."""
        given = {name: value.repeat_interleave(len(ids), 0) for name, value in self.fixed.items()}
        prefix = "decoder_" if self.decodes else ""
        given[f"{prefix}input_ids"] = ids
        if mask is not None:
            given[f"{prefix}attention_mask"] = mask
        return given


def text(rows: int = 2, length: int = LENGTHS[0], seed: int = 0) -> Tensor:
    """Return token ids [rows, length] without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(*TEXT_IDS, (rows, length), generator=generator)


def longer(ids: Tensor) -> Tensor:
    """Return a text [rows, length] with 30 tokens more."""
    return torch.cat([ids, text(len(ids), 30, seed=1)], 1)


def other_inputs(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what the encoder of a model reads, or images of models that take no text without one; one row of each.

    Raises: KeyError for a main input that nothing is known of.
    """
    parameters = inspect.signature(model.forward).parameters
    config = model.config
    if not config.is_encoder_decoder:
        names = [one.name for one in parameters.values() if one.default is one.empty]
        names = [name for name in names if name in SHAPES]
    else:
        name = getattr(model.get_encoder(), "main_input_name", "input_ids")
        names = [model.main_input_name if name == "input_ids" else name]
    if names not in (["input_ids"], ["decoder_input_ids"]):
        return {name: torch.randn(SHAPES[name](config), generator=generator) for name in names}
    ids = torch.randint(*TEXT_IDS, (1, SOURCE_TOKENS), generator=generator)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "bbox" in parameters:  # where the words of a document lie
        given["bbox"] = torch.rand(1, SOURCE_TOKENS, 4)
    return given


def _features(config: Any) -> tuple[int, ...]:
    """Return the shape of log-mel features: [1, bins, frames] for whisper's kind, else [1, frames, bins]."""
    parts = (vars(config).get(name) for name in ("audio_config", "encoder_config"))
    encoder = next(filter(None, parts), config)
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size")
    bins = next(getattr(encoder, name) for name in names if hasattr(encoder, name))
    if config.model_type == "whisper":
        return (1, bins, 2 * config.max_source_positions)
    return (1, FRAMES, bins)


def _pixels(config: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", getattr(config, "encoder", config))
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return (1, getattr(vision, "num_channels", 3), height, width)


SHAPES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "input_features": _features,
    "input_values": lambda config: (1, 4000),
    "pixel_values": _pixels,
    # each patch with its row and column in front
    "flattened_patches": lambda config: (1, 20, config.vision_config.patch_embed_hidden_size + 2),
}


@contextmanager
def kernel_calls() -> Iterator[Counter[str]]:
    """Count what the kernels of caches that are made inside are called for.

    Yields: "decode" and "several", the calls of attention over pages with one query and with more (up to 16), and "dense", the
        layers that were written out for another attention, once per forward. The same backends as ever do the work.
    """
    calls = Counter[str]()

    def counted(name: str) -> Backend:
        kernel, last = loaded(name), [None]

        def attend(call: Any) -> Tensor:
            calls["decode" if call.query.shape[2] == 1 else "several"] += 1
            return kernel.attend(call)

        def dense(kv: Any, side: str) -> Tensor:
            calls["dense"] += kv is not last[0]
            last[0] = kv
            return kernel.dense(kv, side)

        return replace(kernel, attend=attend, dense=dense)

    loaded = dispatch.load
    with patch.object(dispatch, "load", cache(counted)):
        yield calls


def new_cache(model: Any, kind: str) -> Any:
    """Return an empty cache of a kind for forward() calls and for several turns; None for "plain"."""
    encoder_decoder = bool(model.config.is_encoder_decoder)
    if kind == "plain":
        return None
    if kind in STOCK:
        made = DynamicCache(config=model.config.get_text_config(decoder=True))
        return EncoderDecoderCache(made, DynamicCache()) if encoder_decoder else made
    paged = kv_hf.PagedEncoderDecoderCache if encoder_decoder else kv_hf.PagedCache
    return paged.from_implementation(model.config, kind, {"page_size": PAGE_SIZE})


def pages_held(held: Any) -> int:
    """Return the number of sealed pages of a cache; 0 of caches that have none."""
    report = getattr(held, "memory", None)
    return report().pages_held if callable(report) else 0


def generate(
    subject: Subject,
    kind: str,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
    new_tokens: int = NEW_TOKENS,
    cache_config: Options = NONE,
    with_cache: Options = NONE,
    **more: Any,
) -> Outcome:
    """Generate and return the sequences, and the logits [rows, steps, vocabulary] where there are any.

    Args:
        ids: a text [rows, length]; None: two rows of one length.
        cache_config: further options of paged caches.
        with_cache: options of generate() that need a cache.
        more: options of generate().
    """
    model = subject.of(kind)
    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, **more}
    if kind == "plain":
        asked["use_cache"] = False
    else:
        asked |= with_cache
    if kind not in STOCK and CACHE not in asked:
        asked["cache_implementation"] = kind
        asked["cache_config"] = {"page_size": PAGE_SIZE, **cache_config}
    inputs = subject.inputs(text() if ids is None else ids, mask)
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **asked)
    found = {"tokens": out.sequences, "pages": pages_held(getattr(out, CACHE, None))}
    if getattr(out, "logits", None):
        found["logits"] = torch.stack([logits.float() for logits in out.logits], 1)
    if getattr(out, "sequences_scores", None) is not None:
        found["scores"] = out.sequences_scores
    return found


def assisted(subject: Subject, kind: str) -> Outcome:
    """Candidates of a draft model that is right often, not always."""
    draft = {"assistant_model": twin(subject.unswitched)}
    return generate(subject, kind, text(1), new_tokens=20, with_cache=draft)


def two_turns(subject: Subject, kind: str, between: Callable[..., Any] | None = None) -> Outcome:
    """One cache for a text and for a longer one that begins with it; `between` gives another cache for the second."""
    model = subject.of(kind)
    held = {CACHE: new_cache(model, kind)}
    one = generate(subject, kind, text(length=90), with_cache=held)
    if between is not None and kind not in STOCK:
        held = {CACHE: between(held[CACHE], model)}
    two = generate(subject, kind, longer(one["tokens"]), with_cache=held)
    return {"tokens": two["tokens"], "logits": torch.cat([one["logits"], two["logits"]], 1)}


def read_again(held: Any, model: Any) -> Any:
    """Return a cache that was written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache.safetensors")
        held.save(path, model)
        return type(held).load(path, model)


def saved(subject: Subject, kind: str) -> Outcome:
    """A cache that was a file between two turns."""
    if subject.decodes:
        raise NotOffered("caches of encoder-decoder models are not saved")
    return two_turns(subject, kind, read_again)


def prefix(subject: Subject, kind: str) -> Outcome:
    """A text whose beginning another call has left in a prefix store."""
    store = {"prefix_store": kv_hf.PrefixStore()}
    generate(subject, kind, text(), cache_config=store)
    return generate(subject, kind, longer(text()), cache_config=store)


def forwards(
    subject: Subject,
    kind: str,
    counts: Sequence[int] = (110, 5, 21, 1),
    keep: Sequence[int] = (0, 0, 0, 0),
    model: Any = None,
) -> Outcome:
    """Forwards of several tokens behind a filled cache.

    Args:
        counts, keep: tokens of each forward, and how many logits are asked for (0: all).
    """
    model = model or subject.of(kind)
    ids = text(length=sum(counts))
    held = new_cache(model, kind)
    found, start = [], 0
    for count, kept in zip(counts, keep, strict=True):
        inputs = subject.inputs(ids[:, 0 if held is None else start : start + count])
        inputs |= {"logits_to_keep": kept} if kept else {}
        inputs |= {"use_cache": False} if held is None else {CACHE: held}
        with torch.no_grad():
            logits = model(**inputs).logits
        found.append(logits[:, -(kept or count) :].float())
        start += count
    return {"logits": torch.cat(found, 1), "pages": pages_held(held)}


def logits_to_keep(subject: Subject, kind: str) -> Outcome:
    """Forwards of several tokens behind a filled cache, of which only the last logits are asked for."""
    if "logits_to_keep" not in inspect.signature(subject.model.forward).parameters:
        raise NotOffered("forward() has no logits_to_keep")
    return forwards(subject, kind, (110, 5, 7, 9, 1), (1, 1, 2, 3, 1))


def after(subject: Subject, kind: str) -> Outcome:
    """The model that attended over pages before, with DynamicCache again: nothing of the switch may be left to see."""
    if kind in STOCK:
        return forwards(subject, kind)
    return forwards(subject, "dynamic", model=subject.model)


def reading(subject: Subject, kind: str) -> Outcome:
    """Pages are chosen, and none is left out: what attention reads of them has to be right."""
    with patch.object(ReadBudget, "chooses", lambda budget, pages, seen: pages > 0):
        return generate(subject, kind, cache_config={"read": {"tokens": 10**6, "from": 48}})


SHOWN = (torch.arange(LENGTHS[0]) >= LENGTHS[0] - torch.tensor(LENGTHS)[:, None]).long()
PHRASE = text(1, 25).repeat(1, 7)[:, : LENGTHS[0]]  # comes again and again
OPERATIONS: dict[str, Callable[[Subject, str], Outcome]] = {
    "greedy": generate,
    "padded": partial(generate, ids=text(3) * SHOWN, mask=SHOWN),
    "beams": partial(
        generate, ids=text(length=93), num_beams=3, output_scores=True, output_logits=False
    ),
    "lookup": partial(
        generate, ids=PHRASE, new_tokens=20, with_cache={"prompt_lookup_num_tokens": 5}
    ),
    "assisted": assisted,
    "forwards": forwards,
    "logits_to_keep": logits_to_keep,
    "chunked": partial(generate, with_cache={"prefill_chunk_size": 40}),
    "two_turns": two_turns,
    "saved": saved,
    "prefix": prefix,
    "max_length": partial(generate, cache_config={"max_length": 256}),
    "offload": partial(generate, cache_config={"offload": "disk"}),
    "reading": reading,
    "after": after,
}
