"""lm-eval's model class `kv_hf`: its HFLM with every score and every generated token read through a chosen cache.

What HFLM decides (tokenization, chat templates, windows, stopping, its cache of results) stays HFLM's. A request is scored so:

    context                         continuation
    c c c c c c c c c c c c c c c | x x x x
    |-------- prefill --------| |---fed----|        the last token of all is predicted only
      exact, an empty cache     ^ read through the cache; its logits score the first x
"""

import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from ..cache.paged_cache import PagedCache
from ..cache_names import all_cache_names, parse_cache_name
from ..errors import CacheOptionError
from ..extras import extra
from ..geometry import Geometry
from ..hf.models import use_paged_attention
from ..notices import warn_once
from ..printable import in_a_line, tell_error
from ..version import __version__
from .accuracy import check_finite, next_chunk
from .caches import CacheKind, held_bytes, named_kind, why_not
from .models import check_model_name
from .rows import versions

with extra("eval", "lm-eval's model class"):
    import lm_eval.tasks
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

# the key under which lm-eval's database of results (--use_cache) says which cache they were read through
STAMP = "kv_hf cache"
OURS = ("cache_implementation", "cache_config", "past_key_values")
HELD_FIELDS = ("bytes_per_token", "bytes_dtype", "encoded_share", "protocol")


class Finite(LogitsProcessor):
    """Raise ValueError where a generated token would be chosen from nan; tokens that are ruled out have -inf."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` [rows, vocab] as they are."""
        allowed = scores.masked_fill(scores == -math.inf, 0.0)
        check_finite(allowed, self.name, f"at token {input_ids.shape[1]} of a generation")
        return scores


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
    options |= config or {}
    words = ",".join(
        f"{option}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for option, value in options.items()
    )
    return named_kind(f"{base}:{words}" if words else base, base, options)


@register_model("kv_hf")
class KVCacheLM(HFLM):
    """A causal language model whose scores and generations read the stored cache.

    Args:
        pretrained, **kwargs: as for lm-eval's `hf`.
        cache_implementation, cache_config: the cache; see `chosen_cache`.
        reread_tokens: last tokens of a context that are read through the cache before its continuation is scored, so
            that the first scored token reads the store as well. 0 is what generate() does: the first token then comes
            from the exact prefill, and choices of one token measure nothing.
        rolling_prefill: first tokens of a window of loglikelihood_rolling that one exact forward reads. A paged cache of
            64 tokens per page holds these exactly in any case; transformers' fp8 cache takes its scale from them.
    Raises: ValueError for a bad option, before the model is loaded.
    """

    def __init__(
        self,
        pretrained: Any = None,
        cache_implementation: str | None = None,
        cache_config: str | Mapping[str, Any] | None = None,
        reread_tokens: int = 1,
        rolling_prefill: int = 64,
        **kwargs: Any,
    ) -> None:
        if pretrained is None or pretrained == "":
            raise ValueError(
                "pretrained must be a folder or hub id of a model, got none: pass --model_args "
                "pretrained=DIR,cache_implementation=paged_int8"
            )
        self.how = {"reread_tokens": reread_tokens, "rolling_prefill": rolling_prefill}
        for least, (option, value) in enumerate(self.how.items()):
            if type(value) is not int or value < least:
                raise ValueError(f"{option} must be an integer of at least {least}, got {value!r}")
        self.kind = chosen_cache(cache_implementation, cache_config)
        # another revision may be the only one in the local hub cache, and a GGUF file needs no config beside it
        if isinstance(pretrained, str) and not {"revision", "gguf_file"} & set(kwargs):
            check_model_name(pretrained)
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"pretrained must be a decoder-only model, got the {self.backend} model {type(self.model).__name__}"
            )
        if reason := why_not(self.kind.name, self.device):
            raise ValueError(f"cache_implementation={self.kind.name!r} cannot run here: {reason}")
        model = self.model
        use_paged_attention(model.get_base_model() if hasattr(model, "peft_config") else model)
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
            text = [*context, *continuation][-(self.max_length + 1) :]
            scored = len(text) - len(continuation)
            least = 1 if key is not None else self.how["rolling_prefill"]
            prefilled = max(1, least, scored - self.how["reread_tokens"])
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
        silent = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=silent, desc=f"Through {self.kind.name}") as bar:
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
        width, named = max(map(len, rows)), inspect.signature(self.model.forward).parameters
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
            with torch.autocast(self.device.type, mixed, enabled=mixed is not None):
                lines, columns = (targets[:, position:end] >= 0).nonzero(as_tuple=True)
                keep = end - position - min(columns.tolist(), default=end - position - 1)
                last = {"logits_to_keep": keep} if "logits_to_keep" in named else {}
                fed = ids[:, position:end]
                logits = self.model(fed, past_key_values=cache, use_cache=True, **last).logits
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
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Generate as HFLM does, with an empty cache of the chosen kind."""
        for name in OURS:
            if name in generation_kwargs:
                raise ValueError(
                    f"{name}={generation_kwargs[name]!r} stands in the generation arguments; the cache is chosen by "
                    "cache_implementation and cache_config of the model's arguments"
                )
        cache = self.kind.make(self.model.config, max_length)
        generation_kwargs["logits_processor"] = LogitsProcessorList([Finite(self.kind.name)])
        generation_kwargs["past_key_values"] = cache
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
            own = json.dumps({"cache": self.kind.name, **self.how})
            stamp = results.get(STAMP)
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
        reread, rolling = self.how.values()
        facts = {"cache": self.kind.name, **self.how, "encoded_share": encoded, "longest": longest}
        facts["bytes_per_token"] = sum(size for size, _ in self.held) / tokens if tokens else None
        facts["bytes_dtype"] = str(self.model.dtype).removeprefix("torch.")
        facts["versions"] = {"kv_hf": __version__, **versions()}
        facts["protocol"] = (
            f"prefill exact up to the last {reread} tokens of the context (rolling: {rolling} tokens of a window), the rest "
            "read through the cache with decode semantics"
        )
        return {**super().get_model_info(), "kv_cache": facts}


def run_tasks(
    model: Any,
    tokenizer: Any,
    cache_name: str,
    tasks: str | Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    include_path: str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    seed: int | None = None,
    lm_kwargs: Mapping[str, Any] | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Score lm-eval's tasks with every token read through one cache.

    Args:
        model: a causal language model in eval mode; it is switched to the paged attention where that reads the cache.
        tasks: names that lm-eval knows, or finds under `include_path`; also groups and tags.
        limit: the first documents of each task, None for all.
        metadata: for tasks that make their own texts, such as {"max_seq_lengths": [2048]} for RULER.
        seed: of the choice of examples and of sampling; None for lm-eval's own.
        lm_kwargs: further arguments of KVCacheLM: cache_config, max_length, reread_tokens.
        how: further arguments of lm_eval.simple_evaluate: num_fewshot, apply_chat_template, gen_kwargs.
    Returns: a row per task (or group with a mean) and metric: kind="task", task, metric, value, stderr (None where lm-eval
        has none), samples, limit, task_version, num_fewshot, context (tokens of the longest text), bytes_per_token (in
        `bytes_dtype`), encoded_share (part of the tokens that lay in sealed pages in the end; None without pages), protocol.
    Raises: ValueError for a bad argument, an unknown task and data that cannot be loaded, before anything runs, and for
        logits that are not finite.
    """
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    folder = None if include_path is None else str(include_path)
    if not names:
        raise ValueError(f"tasks must name at least one task, got {tasks!r}")
    for argument, value in (("limit", 1 if limit is None else limit), ("batch_size", batch_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{argument} must be a positive integer, got {value!r}")
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"include_path must be a folder of task files, got {folder!r}")
    facts = {"tokenizer": getattr(tokenizer, "name_or_path", ""), **(metadata or {})}
    manager = lm_eval.tasks.TaskManager(include_path=folder, metadata=facts)
    own = {"tokenizer": tokenizer, "batch_size": batch_size, "softmax_dtype": "float32"}
    lm = KVCacheLM(model, cache_name, **own, **(lm_kwargs or {}))
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    how = {"log_samples": False, "bootstrap_iters": 1000, **how}
    how |= {} if seed is None else dict.fromkeys(seeds, seed)
    how |= {"task_manager": manager, "limit": limit, "batch_size": batch_size}
    loaded = []
    for name in names:
        try:
            one = manager.load([name])
        except Exception as error:  # whatever a task or a data set that is missing raises
            why = in_a_line(error)
            raise ValueError(f"tasks: {name!r} cannot be loaded: {why}") from error
        groups = one.get("groups") or {}
        loaded.append([groups[name]] if name in groups else list(one["tasks"].values()))
    rows: list[dict[str, Any]] = []
    for objects in loaded:
        lm.held.clear()
        results = lm_eval.simple_evaluate(model=lm, tasks=objects, **how)
        # of a run over several processes the first has them
        rows += [] if results is None else rows_of(results, limit)
    return rows


def rows_of(results: Mapping[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """Return a row per metric of each group that has a mean, or of each task where there is none."""
    held = results["config"]["kv_cache"]
    common = {"kind": "task", "limit": limit, "context": held["longest"]}
    common |= {field: held[field] for field in HELD_FIELDS}
    rows = []
    for name in results.get("groups") or results["results"]:
        figures = results["results"][name]
        counts = results.get("n-samples", {}).get(name, {})
        of_task = {"task": name, "samples": counts.get("effective", figures.get("sample_len"))}
        of_task["task_version"] = results.get("versions", {}).get(name)
        of_task["num_fewshot"] = results.get("n-shot", {}).get(name)
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            # -1 is RULER's sign for a length without samples
            missing = isinstance(value, str) or (metric.isdigit() and value == -1)
            if not comma or metric.endswith("_stderr") or missing:
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            row = {"metric": metric if filtered == "none" else key, "value": float(value)}
            row["stderr"] = float(error) if isinstance(error, (int, float)) else None
            rows.append({**common, **of_task, **row})
    return rows


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf lm-eval") -> int:
    """Run lm-eval's command line, which knows the model class `kv_hf`.

    Args:
        argv: arguments of `lm_eval`, those of this process when None.
    Returns: 0, or 2 for an error that says its reason: bad arguments, a task, data or a package that is not there.
    """
    from lm_eval.__main__ import cli_evaluate

    given = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.argv = ["lm_eval", *given]
        cli_evaluate()
    except (ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    return 0
