"""Trials of whole generations: tiny random models whose tokens have to be those of transformers' own cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ..cache.paged_cache import PagedCache
from ..formats import ATTENTION_NAME
from ..hf.step_graph import StepGraph
from .trials import Planned

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,  # no experts: their choice would turn on the last digit
}
PROMPTS = (37, 21)  # tokens of the rows, the shorter one padded on the left
NEW_TOKENS = 12
SEED = 35  # a prompt behind which no second-best token comes close (0.06 of the logits' 8, found by trying)
OPTIONS: dict[str, Any] = {"page_size": 16}  # the prompt fills pages, and so do the new tokens


@dataclass(frozen=True)
class _Models:
    """The models of the trials, made when the first of them asks.

    They compute in fp32, where the tokens of two right caches are the same: rounding moves these logits by some 1e-5,
    and the best token of these weights lies 0.06 and more above the second (tests/doctor/test_doctor.py).
    """

    device: torch.device

    def make(self, latent: bool) -> Any:
        """Return a random model, the same weights each time, without touching torch's own random numbers."""
        if latent:
            config: Any = transformers.DeepseekV3Config(**COMMON, **LATENT)
            kind: Any = transformers.DeepseekV3ForCausalLM
        else:
            config = transformers.LlamaConfig(**COMMON, num_key_value_heads=2)
            kind = transformers.LlamaForCausalLM
        with torch.random.fork_rng(devices=[]):
            model = kind._from_config(config, dtype=torch.float32).eval()
        numbers = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # wider than the default, so that attention is not uniform
                    parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.3)
        model.generation_config.pad_token_id = 0
        return model.to(self.device)

    def prompt(self) -> dict[str, torch.Tensor]:
        """Return input_ids and attention_mask [prompts, longest prompt], int64, padded on the left."""
        numbers = torch.Generator().manual_seed(SEED)
        ids = torch.randint(3, 97, (len(PROMPTS), max(PROMPTS)), generator=numbers)
        mask = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
        ids = ids.masked_fill(~mask, 0)
        return {
            "input_ids": ids.to(self.device),
            "attention_mask": mask.long().to(self.device),
        }

    def tokens(self, model: Any, **options: Any) -> list[list[int]]:
        """Return the new tokens of each row."""
        made = model.generate(
            **self.prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, **options
        )
        rows: list[list[int]] = made[:, max(PROMPTS) :].tolist()
        return rows


@dataclass(frozen=True)
class _Generation:
    """Generating through pages gives the tokens of DynamicCache (exact), or those of the reference kernel (encoded)."""

    models: _Models
    implementation: str
    latent: bool

    def __call__(self) -> tuple[str, float | None, float | None]:
        model = self.models.make(self.latent)
        exact = self.implementation == "paged_exact"
        if exact:
            expected = self.models.tokens(model)
        got = self._paged(model, "auto")
        if not exact:
            expected = self._paged(model, "reference")
        if [len(row) for row in got] != [len(row) for row in expected]:
            lengths = [len(row) for row in got]
            return f"rows of {lengths} new tokens, expected {NEW_TOKENS} each", None, None
        other = "DynamicCache" if exact else "kernel='reference'"
        for row, (own, theirs) in enumerate(zip(got, expected, strict=True)):
            if own != theirs:
                at = next(i for i in range(len(own)) if own[i] != theirs[i])
                return f"new token {at} of row {row} is not that of {other}", None, None
        return "", None, None

    def _paged(self, model: Any, kernel: str) -> list[list[int]]:
        options = {**OPTIONS, "kernel": kernel}
        return self.models.tokens(
            model, cache_implementation=self.implementation, cache_config=options
        )


@dataclass(frozen=True)
class _Captured:
    """Decode steps replayed as a CUDA graph give the tokens of the same steps run by Python."""

    models: _Models
    implementation: str

    def __call__(self) -> tuple[str, float | None, float | None]:
        model = self.models.make(latent=False)
        model.set_attn_implementation(ATTENTION_NAME)
        python = self._cache(model)
        expected = self._tokens(model, model, python)
        cache = self._cache(model)
        graph = StepGraph(model, cache)
        got = self._tokens(model, graph, cache)
        if graph.given_up is not None:
            return f"Python runs all decode steps: {graph.given_up}", None, None
        if not graph.is_replayed:
            return "no decode step was captured", None, None
        if not torch.equal(got, expected):
            return "the replayed steps gave other tokens than Python's", None, None
        return "", None, None

    def _cache(self, model: Any) -> Any:
        implementation, length = self.implementation, max(PROMPTS) + NEW_TOKENS
        options = {**OPTIONS, "max_length": length}
        return PagedCache.from_implementation(model.config, implementation, options)

    def _tokens(self, model: Any, step: Any, cache: Any) -> torch.Tensor:
        """Return the most likely tokens [1, NEW_TOKENS] behind the longest prompt."""
        token = self.models.prompt()["input_ids"][:1]
        found = []
        with torch.no_grad():
            for column in range(NEW_TOKENS):
                call = model if column == 0 else step
                token = call(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
                found.append(token)
        return torch.cat(found, 1)


def plan_generations(device: torch.device) -> Iterator[Planned]:
    """Yield trials of two models: one with keys and values, one with latents."""
    models = _Models(device)
    for latent in (False, True):
        for implementation in ("paged_exact", "paged_int4"):
            name = f"tiny model, {implementation}" + (", latents" if latent else "")
            trial = _Generation(models, implementation, latent)
            yield Planned(name, "generate", "auto", trial)
    if device.type == "cuda":
        for implementation in ("paged_exact", "paged_int4"):
            name = f"tiny model, {implementation}, CUDA graph"
            yield Planned(name, "generate", "auto", _Captured(models, implementation))
