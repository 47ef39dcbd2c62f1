"""lm-eval's model class `kv_hf`: its HFLM with every score and every generated token read through a chosen cache.

What HFLM decides (tokenization, chat templates, windows, stopping, its cache of results) stays HFLM's.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from ...cache.paged_cache import PagedCache
from ...extras import extra
from ...formats import ATTENTION_NAME
from ...hf.models import use_paged_attention
from ...notices import warn_once
from ...version import __version__
from ..cache_kinds import why_not
from ..model_name import check_model_name
from ..rows import versions
from .caches import harness_cache
from .scoring import CacheScorer
from .task_plan import plan_prefixes

with extra("eval", "lm-eval's model class"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

# the key under which lm-eval's database of results (--use_cache) says which cache they were read through
STAMP = "kv_hf cache"
OURS = ("cache_implementation", "cache_config", "past_key_values")


class RefuseNan(LogitsProcessor):
    """Raise ValueError where a generated token would be chosen from nan."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` [rows, vocab] as they are."""
        if torch.isnan(scores).any():
            raise ValueError(
                f"{self.name} gives logits that are nan at token {input_ids.shape[1]} of a generation; no score is "
                "returned"
            )
        return scores


@register_model("kv_hf")
class KVCacheLM(HFLM):
    """A causal language model whose scores and generations read the stored cache.

    Args:
        pretrained, **kwargs: as for lm-eval's `hf`.
        cache_implementation: the cache, by a name of `kv_hf.evaluation.cache_kinds`; must be given.
        cache_config: its options; a mapping, JSON, or "keys=int8;recent_tokens=32".
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
        for name, value, least in (
            ("reread_tokens", reread_tokens, 0),
            ("rolling_prefill", rolling_prefill, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        self.cache_kind = harness_cache(cache_implementation, cache_config)
        self.reread_tokens = reread_tokens
        self.rolling_prefill = rolling_prefill
        # another revision may be the only one in the local hub cache, and a GGUF file needs no config beside it
        if isinstance(pretrained, str) and not {"revision", "gguf_file"} & set(kwargs):
            check_model_name(pretrained)
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"pretrained must be a decoder-only model, got the {self.backend} model {type(self.model).__name__}"
            )
        reason = why_not(self.cache_kind.name, self.device) if not self._is_paged() else None
        if reason:
            raise ValueError(
                f"cache_implementation={self.cache_kind.name!r} cannot run here: {reason}"
            )
        if self.cache_kind.attention == ATTENTION_NAME:
            model = self.model
            use_paged_attention(model.get_base_model() if hasattr(model, "peft_config") else model)
        self.scorer = CacheScorer(
            self.model,
            self.cache_kind,
            self.tokenizer.pad_token_id,
            self.softmax_dtype,
            functools.partial(
                torch.autocast,
                device_type=self.device.type,
                dtype=self.mixed_precision_dtype,
                enabled=self.mixed_precision_dtype is not None,
            ),
        )

    def _is_paged(self) -> bool:
        return self.cache_kind.attention == ATTENTION_NAME

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy continuation) of each (key, context, continuation).

        A key of None marks a window of loglikelihood_rolling.
        """
        found: list[tuple[float, bool] | None] = [None] * len(requests)
        texts = [
            (context, continuation, 1 if key is not None else self.rolling_prefill)
            for key, context, continuation in requests
        ]
        prefixes = plan_prefixes(texts, self.max_length, self.reread_tokens)
        size = self.batch_size if self.batch_size != "auto" else override_bs
        if size is None:
            ordered = sorted(requests, key=lambda request: -len(request[1] + request[2]))
            size = self._detect_batch_size(ordered, 0) if ordered else 1
        silent = disable_tqdm or self.rank != 0
        with tqdm(
            total=len(requests), disable=silent, desc=f"Scoring through {self.cache_kind.name}"
        ) as bar:
            rows = int(size) if self.scorer.shares_rows else 1
            for begin in range(0, len(prefixes), rows):
                for number, total, greedy in self.scorer.score(prefixes[begin : begin + rows]):
                    found[number] = answer = (total, greedy)
                    key = requests[number][0]
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                    bar.update()
        return [answer for answer in found if answer is not None]

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
        cache = self.cache_kind.make(self.model.config, max_length)
        out = super()._model_generate(
            context,
            max_length=max_length,
            stop=stop,
            past_key_values=cache,
            logits_processor=LogitsProcessorList([RefuseNan(self.cache_kind.name)]),
            **generation_kwargs,
        )
        mask = generation_kwargs.get("attention_mask")
        held = cache.get_seq_length()
        real = (context != self.tokenizer.pad_token_id) if mask is None else mask.bool()
        padding = (~real).sum(-1).tolist()
        self.scorer.held.add(cache, [int(held) - left for left in padding])
        return out

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's database of results (--use_cache), and refuse one that was read through another cache.

        lm-eval finds results by their requests alone: those of another cache would be handed out as if they were of
        this one.
        """
        results = cache_hook.dbdict
        if results is not None:
            own = json.dumps(self._how(), sort_keys=True, default=str)
            stamp = results.get(STAMP)
            if (stamp is None and len(results)) or stamp not in (None, own):
                raise ValueError(
                    f"use_cache holds results that were read through {stamp or 'another model class'}, not through {own}; "
                    "give each cache a path of its own"
                )
            results[STAMP] = own
        super().set_cache_hook(cache_hook)

    def _how(self) -> dict[str, Any]:
        """Return everything about the cache that a score depends on."""
        return {
            "cache": self.cache_kind.name,
            "reread_tokens": self.reread_tokens,
            "rolling_prefill": self.rolling_prefill,
            "protocol": f"prefill exact up to the last {self.reread_tokens} tokens of the context "
            f"(rolling: {self.rolling_prefill} tokens of a window), the rest read through the cache with decode "
            "semantics",
        }

    def get_model_info(self) -> dict[str, Any]:
        """Return HFLM's facts about the model and, under "kv_cache", how it was cached and what that took."""
        held = self.scorer.held
        empty = self.cache_kind.make(self.model.config, 1)
        paged = isinstance(empty, PagedCache)
        if paged and held.tokens and not held.encoded:
            warn_once(
                f"unread {self.cache_kind.name}",
                f"No text of these tasks was long enough to fill a page of {self.cache_kind.name} ({held.longest} tokens at "
                "most): all scores are those of the exact cache. More examples in the prompt (--num_fewshot) or longer "
                "tasks measure something",
            )
        facts = {
            **self._how(),
            "options": _plain(empty.options) if paged else {},
            "bytes_per_token": held.bytes_per_token,
            "bytes_dtype": str(self.model.dtype).removeprefix("torch."),
            "bits_per_element": held.bits_per_element,
            "encoded_share": held.encoded / held.tokens if paged and held.tokens else None,
            "longest": held.longest,
            "versions": {"kv_hf": __version__, **versions()},
        }
        return {**super().get_model_info(), "kv_cache": facts}


def _plain(options: Any) -> dict[str, Any]:
    """Return the options of a cache that differ from the defaults, as JSON takes them."""
    plain = type(options)()
    given = {name: value for name, value in vars(options).items() if value != getattr(plain, name)}
    return json.loads(json.dumps(given, default=str))
