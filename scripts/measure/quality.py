"""What caches cost in quality, as workloads of the runner: accuracy, needles, reading in part, latents.

Every scored token reads the stored cache as a decode step does. A process keeps one model, with the exact distributions of
one text: let caches vary fastest.
"""

import functools
import gc
import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache_names import parse_cache_name
from kv_hf.config import CacheConfig
from kv_hf.config_reading import check_reading, read_budget
from kv_hf.evaluation.accuracy import PROTOCOL, block_means, score, summary
from kv_hf.evaluation.models import LoadedModel, TextSettings, digest_of, revision_of
from kv_hf.evaluation.needles import LINCOLN, needle_grid
from kv_hf.formats import cache_names
from kv_hf.geometry import Geometry
from kv_hf.read_budget import READ_FROM
from kv_hf.texts import HELD_OUT, load_text, text_names
from measure.models.latent_fixture import LABEL, latent_cache, latent_model, reads
from measure.models.packaged import packaged_model, resolve_model
from measure.peers import known_peers
from measure.reading import CHOOSERS, COUNTED, counted_pages, simulated
from measure.runner import Fields, workload

PEERS = ["quantized_fp8", "quanto_int4", "hqq_int4"]  # of transformers
MODEL: dict[str, list[Any]] = {"model": ["smollm2-135m"], "dtype": ["float32"]}
WINDOW: dict[str, list[Any]] = {"window": [1600], "prompt": [512]}
DISTANCES = "stored_bits kl_mean kl_low kl_high kl_p99 top1 perplexity_delta"
SIMULATED = "every query a choice of its own, exact keys and values"
_held: dict[tuple[Any, ...], LoadedModel] = {}


def held(
    make: Callable[..., LoadedModel], name: str, dtype: str, device: torch.device, **how: Any
) -> LoadedModel:
    """Return a model that `make` makes; the one before is let go first."""
    key = (make, name, dtype, device, *how.items())
    if key not in _held:
        _held.clear()
        gc.collect()
        _held[key] = make(name, getattr(torch, dtype), device, **how)
    return _held[key]


@functools.cache
def revision(model: str) -> str:
    """Return what tells one state of a model's files from another."""
    return revision_of(resolve_model(model))


@functools.cache
def contents(path: str | None) -> str:
    """Return a digest of a file; empty for what is none."""
    if path is None or not Path(path).is_file():
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@known_peers()
def state_of(config: Mapping[str, Any]) -> list[str]:
    """Return what decides a configuration's figures beside it: the files of its model and text.

    Raises: ValueError for a model, a text or a cache that is not there, before anything is measured.
    """
    for name in [config["cache"]] if "cache" in config else config.get("caches", []):
        latent_cache(name)
    if "contender" in config:
        part_read(*(config[name] for name in ("contender", "read", "read_from")))
    for text in text_names(config["text"]) if "text" in config else ():
        load_text(text)
    return [revision(config["model"]), contents(config.get("text"))]


quality = functools.partial(workload, state=state_of, timed=False)


@quality(
    "accuracy",
    grid=[
        MODEL
        | {"text": ["held_out"], "windows": [2], **WINDOW}
        | {"cache": [*cache_names(), *PEERS]}
    ],
    file="accuracy_vs_memory",
    columns=DISTANCES,
)
@known_peers()
def accuracy(device: torch.device, model: str, dtype: str, cache: str, **text: Any) -> list[Fields]:
    """Distances from the exact cache, and bytes: a row per cache and text, or set of texts."""
    loaded = held(packaged_model, model, dtype, device)
    found = loaded.accuracy(cache, TextSettings(**text))
    return [{"model_revision": loaded.revision, **found}]


@quality(
    "mla",
    grid=[
        MODEL
        | {"mixing": ["random"], "kv_lora_rank": [256]}
        | {"text": ["lincoln_1862"], "windows": [7], **WINDOW, "cache": list(cache_names())}
    ],
    kind="accuracy",
    file="mla_accuracy",
    columns=f"reads {DISTANCES}",
)
def mla(
    device: torch.device, model: str, dtype: str, mixing: str, kv_lora_rank: int, cache: str, **text: Any
) -> list[Fields]:  # fmt: skip
    """Distances of caches of latents: real GQA weights in MLA form (measure/models/latent_fixture.py)."""
    loaded = held(latent_model, model, dtype, device, mixing=mixing, rank=kv_lora_rank)
    kind, rope = latent_cache(cache), loaded.model.config.qk_rope_head_dim
    facts = {"model_revision": loaded.revision, "fixture": LABEL, "qk_rope_head_dim": rope}
    facts["reads"] = reads(loaded.model, kind)
    return [{**facts, **loaded.accuracy(kind, TextSettings(**text))}]


@quality(
    "needle",
    grid=[
        MODEL
        | {"haystack": [LINCOLN], "seed": [0], "task": ["single"]}
        | {"length": [1024, 2048], "depth": [None], "first_sample": [0], "samples": [4]}
        | {"caches": [["dynamic", "paged_int8", "paged_int4", "paged_int2"]]}
    ],
    file="long_context",
    columns="cache found rate_low rate_high nll top1 bytes_per_token",
)
@known_peers()
def needle(
    device: torch.device, model: str, dtype: str, caches: list[str], length: int, depth: float | None, **how: Any
) -> list[Fields]:  # fmt: skip
    """What is found again of facts hidden in long texts. All caches are asked the same prompts, each prefilled once."""
    loaded = held(packaged_model, model, dtype, device)
    rows = needle_grid(loaded.model, loaded.tokenizer, caches, [length], [depth], **how)
    return [{"model_revision": loaded.revision, **row} for row in rows]


def part_read(contender: str, read: float | None, read_from: int) -> tuple[str, Fields]:
    """Return the cache of a contender and the options that let it read a part.

    A simulated chooser has the exact pages whose budget it has.

    Args:
        read: tokens that a step reads at most, a part of the attention mass (below 1), or None for everything.
    """
    base, given = "paged_exact", dict[str, Any]()
    if contender not in CHOOSERS:
        base, given = parse_cache_name(contender)
    elif size := CHOOSERS[contender].page_size:
        given = {"page_size": size}
    if read is not None:
        given |= {"read_top_p" if read < 1 else "read_tokens": read, "read_from": read_from}
    check_reading(CacheConfig.from_options(base, given))
    return base, given


LONG = MODEL | {"text": list(HELD_OUT), "window": [8192], "prompt": [7936]}
LONG |= {"read_from": [READ_FROM]}
BUDGETS = [1024, 2048, 4096]


@quality(
    "reading",
    grid=[
        LONG | {"contender": list(CHOOSERS), "read": BUDGETS},
        LONG | {"contender": ["paged_exact", "paged_int4", "paged_k5v3"], "read": [None, *BUDGETS]},
    ],
    columns="kl_mean kl_low kl_high top1 tokens_read_mean",
)
def reading(
    device: torch.device, model: str, dtype: str, text: str, window: int, prompt: int, **part: Any
) -> list[Fields]:
    """Distances where a decode step reads a part of a long text, by caches and by choosers that are simulated."""
    loaded = held(packaged_model, model, dtype, device)
    reference = loaded.reference(TextSettings(text, 1, window, prompt))
    reference.log_probs(0)  # now, while the model attends as it is
    base, given = part_read(**part)
    options = CacheConfig.from_options(base, given)
    chooser, budget = CHOOSERS.get(part["contender"]), read_budget(options)
    places = Geometry(options.page_size, options.sink_tokens, options.recent_tokens)
    own, counts = loaded.model.config, list[int]()
    reads_so: Any = nullcontext()
    if chooser is not None:
        reads_so = simulated(loaded.model, chooser, budget, places)
    elif options.read_top_p:
        reads_so, given = counted_pages(counts), {**given, "kernel": COUNTED}

    def make() -> Any:
        if chooser is not None:
            return DynamicCache(config=own)
        return PagedCache.from_implementation(own, base, given)

    with reads_so:
        (scored,) = score(reference, make, part["contender"])
    pages = places.sealed(window)
    row = {
        "model_revision": loaded.revision,
        "text_digest": digest_of(reference.texts),
        "simulated": chooser is not None,
        "read_tokens": options.read_tokens,
        "read_top_p": options.read_top_p,
        "page_size": places.page_size,
        "pages": pages,
        "pages_read": pages if budget is None else budget.most(pages),
        "protocol": SIMULATED if chooser else PROTOCOL,
        **summary([scored]),
        "kl_blocks": block_means(scored.kl),
    }
    if counts:
        exact = [places.exact(at) for at in range(prompt + 1, window + 1)]
        tokens = torch.tensor(counts, dtype=torch.float64) * places.page_size
        tokens += sum(exact) / len(exact)
        row["tokens_read_mean"] = float(tokens.mean())
        row |= {f"tokens_read_p{q}": float(tokens.quantile(q / 100)) for q in (10, 50, 90)}
    return [row]
