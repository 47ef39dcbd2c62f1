"""The self-test: random pages sealed and read by the kernel of each format, and a tiny model that generates, as far as seconds last."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils import _pytree as pytree

from ..backends.base import AttentionCall, PagedKV
from ..backends.dispatch import load, paged_attention
from ..backends.reference.attention import errors_of
from ..errors import CacheOptionError, KVCacheError, first_line
from ..notices import silenced
from ..quant.codec import encode, order_of
from ..spec import PageSpec, PageWrite
from .kernels import Subject, report_formats, spec_of

OK, NOTE, BROKEN = "ok", "note", "broken"
SECONDS = 5.0
LATENT = (512, 64)  # rank and RoPE channels of latents, where no model says otherwise: DeepSeek's
SINKS, GROUP, QUERIES = 4, 4, 2  # the second query sees a token more than the first
# pages and exact tokens of each row: pages and a tail, sinks and a tail only, a page and the sinks
PAGES, EXACT = (3, 0, 1), (11, 7, 4)
SEED = 42  # a prompt behind which no second-best token comes close
PROMPT, NEW_TOKENS, PAGE = 37, 12, 16  # the prompt fills pages, and so do the new tokens
Case = tuple[tuple[Tensor, ...], Tensor, PagedKV, Tensor]  # see make_case


@dataclass(frozen=True)
class Trial:
    """One trial; left out, until it is tried.

    Attributes:
        format: a format of pages ("paged_int4"), of latents ("latents in int4"), or the model and cache that generate.
        what: what is tried: "seal", "attend" or "generate".
        kernel: the implementation that does it.
        status: "ok", "broken", or "note" where it was left out.
        detail: why, where it is not ok.
    """

    format: str
    what: str
    kernel: str
    status: str = NOTE
    detail: str = ""


@dataclass(frozen=True)
class SelfTest:
    """The results of the self-test: one trial for each format and kernel, and the generations; the seconds that they took."""

    trials: tuple[Trial, ...]
    seconds: float

    @property
    def failed(self) -> list[Trial]:
        """The trials that went wrong."""
        return [trial for trial in self.trials if trial.status == BROKEN]


def self_test(subject: Subject, seconds: float = SECONDS) -> SelfTest:
    """Generate with a tiny model, then seal and attend in every format with the kernel that "auto" takes for it.

    A trial that has not begun when the time is over is left out, and says so; the first use of a Triton kernel compiles
    it, which takes its time.

    Args:
        subject: device, dtype and sizes of the pages; without `latent` the formats of latents have DeepSeek's sizes.
        seconds: after which no further trial begins.
    Raises: CacheOptionError unless `seconds` is positive.
    """
    if not seconds > 0:
        raise CacheOptionError(f"seconds must be more than 0, got {seconds:g}")
    start = time.monotonic()
    done: list[Trial] = []
    with silenced(), torch.inference_mode():
        for trial, run in plan_trials(subject):
            if time.monotonic() - start < seconds:
                done.append(tried(trial, run))
            else:
                done.append(replace(trial, detail=f"the {seconds:g} seconds were over"))
    return SelfTest(tuple(done), time.monotonic() - start)


def tried(trial: Trial, run: Callable[[], None]) -> Trial:
    """Return a trial with its result; whatever `run` raises is wrong."""
    try:
        run()
    except KVCacheError as error:
        return replace(trial, status=BROKEN, detail=first_line(error))
    except Exception as error:  # a broken kernel may raise anything
        why = f"failed with {type(error).__name__}: {first_line(error)}"
        return replace(trial, status=BROKEN, detail=why)
    return replace(trial, status=OK)


def plan_trials(subject: Subject) -> Iterator[tuple[Trial, Callable[[], None]]]:
    """Yield the trials of all formats that can be stored, the generation first, and what raises where one goes wrong."""
    device = subject.device
    generation = Trial("tiny model, paged_exact", "generate", "auto")
    yield generation, partial(_generate, device)
    for latent in (None, subject.latent or LATENT):
        pages = replace(subject, latent=latent)
        for report in report_formats(pages):
            kernel = report.kernel
            if kernel is None:
                continue
            spec = spec_of(report.format, pages)
            name = f"latents in {report.format}" if spec.is_latent else f"paged_{report.format}"
            if load(kernel).write is not load("reference").write:
                yield Trial(name, "seal", kernel), partial(_seal, spec, kernel, device)
            yield Trial(name, "attend", kernel), partial(_attend, spec, kernel, device)


@lru_cache(maxsize=1)
def make_case(spec: PageSpec) -> Case:
    """Return random tokens, pages in random places and queries for pages like `spec`; the same ones each time.

    Returns: all of it on the CPU:
        tokens: of each side, those of all pages: [1, num_kv_heads, pages * page_size, head_dim].
        jobs: [pages, 4], as `seal_pages` takes them.
        kv: the pages that the reference encoded, with windows.
        query: [rows, heads, QUERIES, query_dim], the model's dtype.
    """
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    size, heads, dtype = spec.keys.page_size, spec.keys.num_kv_heads, spec.keys.dtype
    counts, exact = torch.tensor(PAGES, device="cpu").int(), torch.tensor(EXACT, device="cpu").int()
    rows, pages, slots = len(PAGES), sum(PAGES) + 1, max(EXACT) + 2
    unused = (torch.arange(slots, device="cpu") >= exact[:, None])[:, None, :, None]
    tokens, windows, fields = [], [], []
    for side in spec.sides:
        channels = random(side.head_dim).abs().clamp(0.5, 2)
        held = (random(pages, heads, size, side.head_dim) * channels).to(dtype)
        fields.append(encode(held, side, order_of(held[:1], side))[0])
        tokens.append(held.transpose(0, 1).flatten(1, 2)[None])
        window = random(rows, heads, slots, side.head_dim).to(dtype)
        windows.append(window.masked_fill(unused, math.nan))
    # all in the order of the first one
    pages_to_seal = [(0, page * size, page, -1) for page in reversed(range(pages))]
    jobs = torch.tensor(pages_to_seal, device="cpu")
    order = random(pages).argsort()
    # behind a row's last page the table holds pages of others, and one that nobody holds
    places = torch.arange(max(PAGES), device="cpu") + (counts.cumsum(0) - counts)[:, None]
    lengths = counts * size + exact
    seen = int(lengths.max())
    table = order[places % pages].int()
    given: Any = (*fields, spec, table, counts, *windows, exact, seen - lengths, seen, SINKS)
    kv = PagedKV(*given)  # in the order of its fields
    query = random(rows, heads * GROUP, QUERIES, spec.query_dim).to(dtype)
    return tuple(tokens), jobs.int(), kv, query


def _on(device: torch.device, tensors: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.to(device), tensors)


def _bytes(tensors: Any) -> Tensor:
    flat = [one.cpu().contiguous().flatten() for one in pytree.tree_leaves(tensors)]
    return torch.cat([one.view(torch.uint8) for one in flat])


def _seal(spec: PageSpec, kernel: str, device: torch.device) -> None:
    """Sealed pages are the same bytes, whoever seals them (see quant/codec.py)."""
    tokens, jobs, kv, _ = make_case(spec)
    rights = kv.key_pages, kv.value_pages
    made = pytree.tree_map(lambda one: torch.zeros_like(one, device=device), rights)
    damaged = torch.zeros((), dtype=torch.uint8, device=device)
    write = PageWrite(_on(device, tokens), made, spec, damaged, {}, jobs.to(device))
    load(kernel).write(write)
    if bool(damaged):
        raise KVCacheError(
            f"it calls finite {' or '.join(side.side for side in spec.sides)} not finite"
        )
    differing = _bytes(made) != _bytes(rights)
    if differing.any():
        count = int(differing.sum())
        raise KVCacheError(f"{count} of {len(differing)} bytes differ from the reference's")


def _attend(spec: PageSpec, kernel: str, device: torch.device) -> None:
    """Attention errs by no more than rounding explains."""
    *_, kv, query = make_case(spec)
    call = AttentionCall(query, kv, spec.query_dim**-0.5)
    kv = replace(kv, **{one.name: _on(device, getattr(kv, one.name)) for one in fields(PagedKV)})
    out = paged_attention(replace(call, query=query.to(device), kv=kv), kernel)
    shape = [*query.shape[:3], spec.out_dim]
    if list(out.shape) != shape:
        raise KVCacheError(f"its result has the shape {list(out.shape)}, not {shape}")
    errors, allowed = errors_of(out.cpu(), call)
    if not bool((errors <= allowed).all()):  # nan too
        raise KVCacheError(
            f"differs from the reference by {float(errors.max()):.2g}, more than rounding explains"
        )


def _generate(device: torch.device) -> None:
    """Generating through pages needs every seam of transformers, writes token by token, and gives DynamicCache's tokens.

    In fp32 the tokens of two right caches are the same: rounding moves these logits by some 1e-5, and the best token
    of these weights lies 0.05 and more above the second (tests/doctor/test_doctor.py).
    """
    model, ids = tiny_model(device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    paged = {"cache_implementation": "paged_exact", "cache_config": {"page_size": PAGE}}
    differ = model.generate(ids, **options) != model.generate(ids, **options, **paged)
    for row, column in differ.nonzero().tolist():
        raise KVCacheError(f"new token {column - PROMPT} of row {row} is not that of DynamicCache")


def tiny_model(device: torch.device) -> tuple[Any, Tensor]:
    """Return a random model in fp32 and its prompt [2, PROMPT], without touching torch's own random numbers."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
        ids = torch.randint(3, 97, (2, PROMPT), device="cpu")
    return model.eval().to(device), ids.to(device)
