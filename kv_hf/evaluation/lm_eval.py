"""lm-eval's model class `kv_hf`: its HFLM with every score and every generated token read through a chosen cache.

What HFLM decides (tokenization, chat templates, windows, stopping, its cache of results) stays HFLM's. A request is scored so:

    context                         continuation
    c c c c c c c c c c c c c c c | x x x x
    |-------- prefill --------| |---fed----|        the last token of all is predicted only
      exact, an empty cache     ^ read through the cache; its logits score the first x
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kv_hf_cli import command_parser

from ..cache.model_shape import CACHE
from ..cache.paged_cache import PagedCache
from ..cache_names import all_cache_names, parse_cache_name, write_cache_name
from ..checks import extra, usable_device
from ..config import merged
from ..errors import CacheOptionError
from ..geometry import Geometry
from ..notices import warn_once
from ..printable import tell_error
from ..version import __version__
from .accuracy import check_finite, forward, next_chunk
from .caches import CacheKind, check_runs, held_bytes, named_kind
from .models import check_model_name
from .rows import versions

with extra("eval", "lm-eval's model class"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

# the key under which lm-eval's database of results (--use_cache) says which cache they were read through
STAMP = "kv_hf cache"
# first tokens of a window of loglikelihood_rolling that one exact forward reads. A paged cache of 64 tokens per page holds them
# exactly in any case; transformers' fp8 cache takes its scale from them
ROLLING = 64
PROTOCOL = (
    f"prefill exact up to the last token of the context (rolling: {ROLLING} tokens of a window), the rest read through the "
    "cache with decode semantics"
)


def chosen_cache(name: Any, config: str | Mapping[str, Any] | None = None) -> CacheKind:
    """Return the cache of `cache_implementation` and `cache_config` as they come from lm-eval's command line.

    Args:
        name: what `cache_kind` takes, such as "paged_int4", "hqq_int4" or "paged_int4:keys=int8".
        config: options of it: a mapping, or "keys=int8;recent_tokens=32", since lm-eval splits --model_args at commas.
    Raises: ValueError (or CacheOptionError, which is one) for an unknown cache and for options that it does not take.
    """
    if not isinstance(name, str) or not name:
        known = ", ".join(all_cache_names())
        raise ValueError(
            f"cache_implementation must name the cache to measure, one of {known}; got {name!r}"
        )
    base, options = parse_cache_name(name)
    if isinstance(config, str):
        config = parse_cache_name(f"{base}:{config.replace(';', ',')}")[1]
    elif not isinstance(config, Mapping | None):
        raise CacheOptionError(
            f"cache_config must be a mapping or NAME=VALUE;NAME=VALUE, got {config!r}"
        )
    options = merged(options, config or {})
    return named_kind(write_cache_name(base, options), base, options)


@register_model("kv_hf")
class KVCacheLM(HFLM):
    """A causal language model whose scores and generations read the stored cache.

    Args:
        pretrained, **kwargs: as for lm-eval's `hf`.
        cache_implementation, cache_config: the cache; see `chosen_cache`.
    Raises: ValueError for a bad option, before the model is loaded.
    """

    def __init__(
        self,
        pretrained: Any = None,
        cache_implementation: str | None = None,
        cache_config: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if pretrained is None or pretrained == "":
            raise ValueError(
                "pretrained must be a folder or hub id of a model, got none: pass --model_args "
                "pretrained=DIR,cache_implementation=paged_int8"
            )
        self.kind = chosen_cache(cache_implementation, cache_config)
        # another revision may be the only one in the local hub cache, and a GGUF file needs no config beside it
        if isinstance(pretrained, str) and not {"revision", "gguf_file"} & set(kwargs):
            check_model_name(pretrained)
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"pretrained must be a decoder-only model, got the {self.backend} model {type(self.model).__name__}"
            )
        check_runs(self.kind.name, self.model)
        self.held: list[tuple[float, list[int]]] = []  # of each cache: bytes, tokens of its rows

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy continuation) of each (key, context, continuation).

        A key of None marks a window of loglikelihood_rolling. A batch holds texts with prefills of one length: their chunks
        end at the same tokens, no row needs padding in front, and what stands behind a shorter row changes nothing.
        """
        texts: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # prefill, tokens -> requests
        for number, (key, context, continuation) in enumerate(requests):
            # cut on the left, as HFLM does
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens is longer than the {self.max_length} that the model reads: "
                    "give a larger max_length, or shorter texts"
                )
            text = [*context, *continuation][-(self.max_length + 1) :]
            scored = len(text) - len(continuation)
            # the context's last token is read through the cache, so that the first scored one reads the store as well:
            # as generate() does it, choices of one token would measure nothing
            prefilled = max(1 if key is not None else ROLLING, scored - 1)
            fed = tuple(text[:-1])  # of choices of one token it is the same
            texts.setdefault((min(len(fed), prefilled), fed), []).append(number)
        order = sorted(texts, key=lambda one: (-one[0], -len(one[1]), one[1]))
        size = self.batch_size if self.batch_size != "auto" else override_bs
        if size is None:
            longest = sorted(requests, key=lambda request: -len(request[1] + request[2]))
            size = self._detect_batch_size(longest, 0) if requests else 1
        base = self.kind.name.partition(":")[0]
        # others encode padding with the tokens, and share scales or groups among rows
        step = int(size) if base.startswith("paged_") or base in ("dynamic", "static") else 1
        found: list[Any] = [None] * len(requests)
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc=self.kind.name
        ) as bar:
            for prefilled, group in groupby(order, key=lambda one: one[0]):
                rows = list(group)
                for batch in (rows[i : i + step] for i in range(0, len(rows), step)):
                    asked = [
                        (row, number) for row, one in enumerate(batch) for number in texts[one]
                    ]
                    wanted = [(row, requests[number][2]) for row, number in asked]
                    answers = self._score([ids for _, ids in batch], prefilled, wanted)
                    for (_, number), answer in zip(asked, answers, strict=True):
                        found[number] = answer
                        if (key := requests[number][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", key, answer)
                        bar.update()
        return found

    @torch.no_grad()
    def _score(
        self,
        rows: Sequence[tuple[int, ...]],
        prefilled: int,
        wanted: Sequence[tuple[int, Sequence[int]]],
    ) -> list[tuple[float, bool]]:
        """Read rows of tokens, of which the first `prefilled` are exact; return the sum and the greed of each (row, targets).

        Targets are predicted by the last tokens of their row.
        """
        width = max(map(len, rows))
        cache = self.kind.make(self.model.config, width)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        targets = torch.full((len(wanted), width), -1, device=self.device)
        for line, (row, tokens) in enumerate(wanted):
            behind = len(rows[row])
            targets[line, behind - len(tokens) : behind] = torch.tensor(tokens, device=self.device)
        of_row = torch.tensor([row for row, _ in wanted], device=self.device)
        totals = torch.zeros(len(wanted), dtype=torch.float64, device=self.device)
        greedy = torch.ones(len(wanted), dtype=torch.bool, device=self.device)
        position = 0
        while position < width:
            end = min(width, position + next_chunk(cache, position)) if position else prefilled
            mixed = self.mixed_precision_dtype
            lines, columns = (targets[:, position:end] >= 0).nonzero(as_tuple=True)
            keep = end - position - min(columns.tolist(), default=end - position - 1)
            with torch.autocast(self.device.type, mixed, enabled=mixed is not None):
                logits = forward(self.model, ids[:, position:end], cache, keep)
            dropped = end - position - logits.shape[1]
            logits = check_finite(logits[of_row[lines], columns - dropped], self.kind.name)
            chosen = targets[lines, position + columns]
            likely = logits.log_softmax(-1, dtype=self.softmax_dtype).gather(-1, chosen[:, None])
            totals.index_add_(0, lines, likely[:, 0].double())
            greedy[lines[logits.argmax(-1) != chosen]] = False
            position = end
        lengths = [len(row) for row in rows]  # what stands behind shorter rows is left out
        self.held.append((held_bytes(cache) * sum(lengths) / (width * len(rows)), lengths))
        return list(zip(totals.tolist(), greedy.tolist(), strict=True))

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Generate as HFLM does, with an empty cache of the chosen kind."""
        cache = self.kind.make(self.model.config, max_length)
        generation_kwargs[CACHE] = cache
        out = super()._model_generate(context, max_length, stop, **generation_kwargs)
        width = int(cache.get_seq_length())
        mask = generation_kwargs.get("attention_mask", torch.ones_like(context))
        lengths = (width - (mask == 0).sum(-1)).tolist()
        # pages hold no padding; what it takes elsewhere is left out
        share = 1.0 if isinstance(cache, PagedCache) else sum(lengths) / (width * len(lengths))
        self.held.append((share * held_bytes(cache), lengths))
        return out

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's database of results (--use_cache), and refuse one that was read through another cache.

        lm-eval finds results by their requests alone: those of another cache would be handed out as if they were of
        this one.
        """
        results = cache_hook.dbdict
        if results is not None:
            own, stamp = self.kind.name, results.get(STAMP)
            if (stamp is None and len(results)) or stamp not in (None, own):
                raise ValueError(
                    f"use_cache holds results that were read through {stamp or 'another model class'}, not through {own}; "
                    "give each cache a path of its own"
                )
            results[STAMP] = own
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Return HFLM's facts about the model and, under "kv_cache", how it was cached and what that took."""
        lengths = [length for _, rows in self.held for length in rows]
        longest, tokens = max(lengths, default=0), sum(lengths)
        empty = self.kind.make(self.model.config, 1)
        encoded = None
        if isinstance(empty, PagedCache) and tokens:
            own = empty.options
            places = Geometry(own.page_size, own.sink_tokens, own.recent_tokens)
            encoded = sum(length - places.exact(length) for length in lengths) / tokens
        if encoded == 0:
            warn_once(
                f"unread {self.kind.name}",
                f"No text of these tasks was long enough to fill a page of {self.kind.name} ({longest} tokens at "
                "most): all scores are those of the exact cache. More examples in the prompt (--num_fewshot) or longer "
                "tasks measure something",
            )
        held = sum(size for size, _ in self.held)
        facts = {
            "cache": self.kind.name,
            "encoded_share": encoded,
            "longest": longest,
            "bytes_per_token": held / tokens if tokens else None,
            "bytes_dtype": str(self.model.dtype).removeprefix("torch."),
            "versions": {"kv_hf": __version__, **versions()},
            "protocol": PROTOCOL,
        }
        return {**super().get_model_info(), "kv_cache": facts}


def run_lm_eval(words: Sequence[str], prog: str) -> int:
    """Run lm-eval's command line, which knows the model class `kv_hf`.

    Args:
        words: arguments of `lm_eval`.
        prog: what errors begin with.
    Returns: 0, or 2 for an error that says its reason: bad arguments, a task, data or a package that is not there.
    """
    from lm_eval.__main__ import cli_evaluate

    given = command_parser("lm-eval", prog).parse_known_args(words)[0]
    try:
        usable_device(given.device)  # lm-eval would take the CPU in its place
        sys.argv = ["lm_eval", *words]
        cli_evaluate()
    except (ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    return 0
