"""What is compared on each family: a model with its inputs, and one function per operation, run with each kind of cache.

An operation returns tensors by name: tokens are compared exactly, the others within a tolerance.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

import kv_hf
from kv_hf.backends import (
    AttentionCall,
    Backend,
    PagedKV,
    layout_for,
    load,
    register_backend,
    unregister_backend,
    why_not,
)
from measure.family_models import TEXT_IDS, build_model, twin

Outcome = dict[str, Any]
PAGE_SIZE = 16
# with 4 sinks and pages of 16 tokens, rows of these lengths seal a page within the new tokens
LENGTHS = (158, 37, 93)
NEW_TOKENS = 10
SOURCE_TOKENS, FRAMES = 40, 80  # of what an encoder reads
# kinds of cache without a part of kv_hf; "plain" is no cache in a model whose attention is the plainest there is
STOCK = ("dynamic", "plain")
BACKENDS = ("c", "sdpa", "reference")  # those of CPUs, the best first
PARTS = (
    (110, 0),
    (5, 0),
    (21, 0),
    (1, 0),
)  # tokens of each forward, and how many logits are kept (0: all)
SHOW = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}


class NotOffered(Exception):
    """The model has no such operation, whatever its cache."""


class Subject:
    """A tiny model of one family, and how it is asked.

    Attributes:
        model: the model whose attention kv_hf may switch; `unswitched` and `kept` are copies of it.
        fixed: arguments of every generate() that do not depend on the text (what an encoder reads, images), for one row.
    """

    def __init__(self, model: Any, seed: int = 0) -> None:
        self.model = model
        self.unswitched, self.kept = copy.deepcopy(model), copy.deepcopy(model)
        self.decodes = bool(model.config.is_encoder_decoder)  # the text goes to the decoder
        self.fixed = other_inputs(model, torch.Generator().manual_seed(seed))

    def of(self, kind: str) -> Any:
        """Return the model for a kind of cache: what is expected comes from one that kv_hf has never touched."""
        if kind == "plain":
            return self.plain
        return self.unswitched if kind in STOCK else self.model

    @cached_property
    def plain(self) -> Any:
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

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Return arguments of generate() or forward() for a text."""
        given = {name: value.repeat_interleave(len(ids), 0) for name, value in self.fixed.items()}
        prefix = "decoder_" if self.decodes else ""
        given[f"{prefix}input_ids"] = ids
        if mask is not None:
            given[f"{prefix}attention_mask"] = mask
        return given


@contextmanager
def kernel_calls() -> Iterator[Counter[str]]:
    """Count what the kernels of caches that are made inside are called for.

    Yields: "decode" and "several", the calls of attention over pages with one query and with more, and "dense", the layers
        that were written out for another attention. A layer counts once per forward. The same backends as ever do the work.
    """
    calls: Counter[str] = Counter()

    def counted(name: str) -> Backend:
        kernel, last = load(name), [None]

        def attend(call: AttentionCall) -> torch.Tensor:
            calls["decode" if call.query.shape[2] == 1 else "several"] += 1
            return kernel.attend(call)

        def dense(kv: PagedKV, side: str) -> torch.Tensor:
            calls["dense"] += kv is not last[0]
            last[0] = kv
            return kernel.dense(kv, side)

        return replace(kernel, attend=attend, dense=dense)

    cpu = torch.device("cpu")
    for place, name in enumerate(BACKENDS):
        register_backend(
            f"counted_{name}",
            cache(partial(counted, name)),
            why_not=partial(why_not, name),
            priority=1000 - place,
            runs_on="cpu",
            layout=layout_for(cpu),
        )
    try:
        yield calls
    finally:
        for name in BACKENDS:
            unregister_backend(f"counted_{name}")


def build_subject(family: str, role: str) -> Subject:
    """Return a tiny model of a family with the inputs that it needs."""
    return Subject(build_model(family, role))


def other_inputs(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return what the encoder of a model reads, or images of models that take no text without one; one row of each.

    Raises: KeyError for a main input that nothing is known of.
    """
    parameters = inspect.signature(model.forward).parameters
    if not model.config.is_encoder_decoder:
        needed = (one.name for one in parameters.values() if one.default is one.empty)
        return {
            name: torch.randn(SHAPES[name](model.config), generator=generator)
            for name in needed
            if name in SHAPES
        }
    name = getattr(model.get_encoder(), "main_input_name", "input_ids")
    name = model.main_input_name if name == "input_ids" else name
    if name not in ("input_ids", "decoder_input_ids"):
        return {name: torch.randn(SHAPES[name](model.config), generator=generator)}
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


def options(kind: str, **more: Any) -> dict[str, Any]:
    """Return what generate() is asked for to use a kind of cache: dynamic, plain, or a name of kv_hf."""
    if kind in STOCK:
        return {"use_cache": False} if kind == "plain" else {}
    return {"cache_implementation": kind, "cache_config": {"page_size": PAGE_SIZE, **more}}


def new_cache(model: Any, kind: str) -> Any:
    """Return an empty cache of a kind for forward() calls and for several turns."""
    encoder_decoder = bool(model.config.is_encoder_decoder)
    if kind in STOCK:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        return EncoderDecoderCache(cache, DynamicCache()) if encoder_decoder else cache
    made = kv_hf.PagedEncoderDecoderCache if encoder_decoder else kv_hf.PagedCache
    return made.from_implementation(model.config, kind, {"page_size": PAGE_SIZE})


def pages_held(cache: Any) -> torch.Tensor:
    """Return the number of sealed pages of a cache; 0 of caches that have none."""
    report = getattr(cache, "memory", None)
    return torch.tensor(report().pages_held if callable(report) else 0)


def generated(
    model: Any, inputs: dict[str, Any], new_tokens: int = NEW_TOKENS, **more: Any
) -> Outcome:
    """Generate and return the sequences, and the logits [rows, steps, vocabulary] where there are any."""
    out = model.generate(**inputs, max_new_tokens=new_tokens, **{**SHOW, **more})
    found = {"tokens": out.sequences, "pages": pages_held(getattr(out, "past_key_values", None))}
    if getattr(out, "logits", None):
        found["logits"] = torch.stack([logits.float() for logits in out.logits], 1)
    if getattr(out, "sequences_scores", None) is not None:
        found["scores"] = out.sequences_scores
    return found


def greedy(subject: Subject, kind: str) -> Outcome:
    """Two rows of one length."""
    return generated(subject.of(kind), subject.inputs(subject.text()), **options(kind))


def padded(subject: Subject, kind: str) -> Outcome:
    """Three rows of different lengths, padded on the left."""
    width = max(LENGTHS)
    mask = (torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]).long()
    inputs = subject.inputs(subject.text(len(LENGTHS), width) * mask, mask)
    return generated(subject.of(kind), inputs, **options(kind))


def beams(subject: Subject, kind: str) -> Outcome:
    """Three beams for each of two rows."""
    inputs = subject.inputs(subject.text(length=93))
    how = {"num_beams": 3, "output_scores": True, "output_logits": False}
    return generated(subject.of(kind), inputs, **how, **options(kind))


def lookup(subject: Subject, kind: str) -> Outcome:
    """Candidates found in the prompt, in which a phrase comes again."""
    phrase = subject.text(1, 25).repeat(1, 1 + LENGTHS[0] // 25)[:, : LENGTHS[0]]
    more = {} if kind == "plain" else {"prompt_lookup_num_tokens": 5}
    return generated(subject.of(kind), subject.inputs(phrase), 20, **more, **options(kind))


def assisted(subject: Subject, kind: str) -> Outcome:
    """Candidates of a draft model that is right often, not always."""
    more = {} if kind == "plain" else {"assistant_model": twin(subject.unswitched)}
    inputs = subject.inputs(subject.text(1))
    return generated(subject.of(kind), inputs, 20, **more, **options(kind))


def logits_to_keep(subject: Subject, kind: str) -> Outcome:
    """Forwards of several tokens behind a filled cache, of which only the last logits are asked for."""
    if "logits_to_keep" not in inspect.signature(subject.model.forward).parameters:
        raise NotOffered("forward() has no logits_to_keep")
    return forwards(subject, kind, ((110, 1), (5, 1), (7, 2), (9, 3), (1, 1)))


def forwards(
    subject: Subject, kind: str, parts: tuple[tuple[int, int], ...] = PARTS, model: Any = None
) -> Outcome:
    """Forwards of several tokens behind a filled cache, with all logits."""
    model = subject.of(kind) if model is None else model
    ids = subject.text(length=sum(count for count, _ in parts))
    cache = new_cache(model, kind) if kind != "plain" else None
    found, start = [], 0
    for count, kept in parts:
        inputs = subject.inputs(ids[:, 0 if cache is None else start : start + count])
        more: dict[str, Any] = {"logits_to_keep": kept} if kept else {}
        more |= {"use_cache": False} if cache is None else {"past_key_values": cache}
        with torch.no_grad():
            out = model(**inputs, **more)
        found.append(out.logits[:, -(kept or count) :].float())
        start += count
    return {"logits": torch.cat(found, 1), "pages": pages_held(cache)}


def after(subject: Subject, kind: str) -> Outcome:
    """The model that attended over pages before, with DynamicCache again: nothing of the switch may be left to see."""
    if kind in STOCK:
        return forwards(subject, kind)
    return forwards(subject, "dynamic", model=subject.model)


def keep(subject: Subject, kind: str) -> Outcome:
    """A model whose attention stays as it is: pages are written out for it."""
    stock = kind in STOCK
    more = options(kind) if stock else options(kind, attention="keep")
    model = subject.of(kind) if stock else subject.kept
    return generated(model, subject.inputs(subject.text()), **more)


def chunked(subject: Subject, kind: str) -> Outcome:
    """A prompt that goes in chunks."""
    more = {} if kind == "plain" else {"prefill_chunk_size": 40}
    return generated(subject.of(kind), subject.inputs(subject.text()), **more, **options(kind))


def two_turns(subject: Subject, kind: str) -> Outcome:
    """One cache for a text and for a longer one that begins with it."""
    model, more = subject.of(kind), subject.text(length=30, seed=1)
    cache: dict[str, Any] = {"use_cache": False}
    if kind != "plain":
        cache = {"past_key_values": new_cache(model, kind)}
    one = generated(model, subject.inputs(subject.text(length=90)), 10, **cache)
    two = generated(model, subject.inputs(torch.cat([one["tokens"], more], 1)), 10, **cache)
    return {"tokens": two["tokens"], "logits": torch.cat([one["logits"], two["logits"]], 1)}


OPERATIONS: dict[str, Callable[[Subject, str], Outcome]] = {
    run.__name__: run
    for run in (
        *(keep, greedy, padded, beams, lookup, assisted, forwards, logits_to_keep, chunked),
        *(two_turns, after),
    )
}
