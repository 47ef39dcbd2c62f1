"""`kv_hf.recommend`: from a model and a budget to a recipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ...cache.model_shape import attention_config
from ...config import check_option_names
from ...errors import CacheOptionError, UnsupportedModelError
from ...formats import ATTENTION_NAME
from ...hf.latent import is_latent_attention
from ...hf.models import use_paged_attention
from ...recipe import MEASURED_OPTIONS
from ..texts import longest_context, text_windows
from .calibration import Calibration
from .cost import Budget, Serving
from .search import Recommendation, Search
from .study import FORMATS, TOGETHER, Study

TEXT = "lincoln_1863"


def recommend(
    model: Any,
    budget: float | str,
    *,
    tokenizer: Any = None,
    text: str | Path | Sequence[Any] = TEXT,
    windows: int = 2,
    window: int = 1024,
    prompt: int = 768,
    formats: Sequence[str] = FORMATS,
    together: Sequence[str] = TOGETHER,
    variants: Sequence[Mapping[str, Any]] | None = None,
    context: int = 4096,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    cells: str | Path | None = None,
    out: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Recommendation:
    """Choose the format of every layer and side so that little is lost within a budget.

        found = kv_hf.recommend(model, "bits=4.5", out="recipe.json")
        model.generate(**inputs, cache_implementation="paged_int4", cache_config={"recipe": "recipe.json"})

    Measures the KL divergence of the next-token distributions with one layer and side stored at a time, adds up (the
    sum is a good guess while losses are small, and both it and the measured KL are reported), and finds the best
    selection exactly. The recipe and the best uniform format that fits are then measured on the same text, and the
    better one is returned.

    Args:
        model: a causal language model in eval mode, in float32 if losses of 8 bits matter (half precision has more
            noise than they are).
        budget: a number of bits per stored number, scales included; "bits=4.5", the same; "bytes_per_token=9000" and
            "bytes=2e9", everything counted, for `batch` rows of `context` tokens; or the name of a uniform cache,
            "paged_int4", for as much as that takes.
        tokenizer: None takes the one that lies beside the model's weights.
        text: a bundled text, a file, or token ids: a list with one sequence per text.
        windows, window: texts cut from `text`, and their tokens.
        prompt: tokens of each that are not scored.
        formats: those to measure layer by layer.
        together: those that lose so little that all layers are measured at once (see `measure_sensitivities`).
        variants: other options of the whole cache to try, e.g. [{"recent_tokens": 32}]: they get as many bytes as the
            given ones at `context` tokens, exact tokens included. Layers are not measured again for them: the
            losses are scaled by what all layers together gain. None tries 32 recent tokens, with and without larger
            groups at 2 bits; () tries nothing.
        context, batch, dtype: what bytes are counted for.
        cells: JSONL file of measured cells. A killed run continues there, and another budget costs no measurement.
        out: where the recipe goes.
        progress: called with (layers run, layers to run).
        options: page_size, sink_tokens, recent_tokens, key_group_size, value_group_size of all caches.
    Raises: ValueError that names the argument, before anything is measured; CacheOptionError for bad `options`;
        UnsupportedModelError for a model with multi-head latent attention; OSError where a file cannot be written.
    """
    asked = Budget.parse(budget)
    if out is not None:
        if Path(out).is_dir():
            raise ValueError(f"out must be a file, got the folder {str(out)!r}")
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    with paged_attention(model):
        search = make_search(
            model,
            tokenizer=tokenizer,
            text=text,
            windows=windows,
            window=window,
            prompt=prompt,
            formats=formats,
            together=together,
            variants=variants,
            context=context,
            batch=batch,
            dtype=dtype,
            cells=cells,
            progress=progress,
            **options,
        )
        found = search.recommend(asked)
    if out is not None:
        found.save(out)
    return found


def make_search(
    model: Any,
    *,
    tokenizer: Any = None,
    text: str | Path | Sequence[Any] = TEXT,
    windows: int = 2,
    window: int = 1024,
    prompt: int = 768,
    formats: Sequence[str] = FORMATS,
    together: Sequence[str] = TOGETHER,
    variants: Sequence[Mapping[str, Any]] | None = None,
    context: int = 4096,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    cells: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Search:
    """Return the search behind `recommend`, for several budgets; the arguments are those of `recommend`.

    Use it inside `paged_attention(model)`: it measures at the first recommendation.
    """
    if any(is_latent_attention(module) for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has multi-head latent attention: a recipe chooses formats of keys and of values, and "
            "such a layer stores one latent for both. cache_config={'layers': {'0-1': 'int8'}} gives some layers another format"
        )
    for given in (options, *(variants or ())):
        check_option_names(given)
        for name in given:
            if name not in MEASURED_OPTIONS:
                raise CacheOptionError(
                    f"a recipe holds {', '.join(MEASURED_OPTIONS)} beside its formats, got {name}={given[name]!r}"
                )
    for name, count in (("windows", windows), ("context", context), ("batch", batch)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
    ids = _token_ids(model, tokenizer, text, windows, window)
    name = getattr(model, "name_or_path", "") or type(model).__name__
    facts = {
        "model": Path(name).name if Path(name).is_dir() else name,
        "text": str(text) if isinstance(text, (str, Path)) else "token ids",
        "windows": len(ids),
        "window": max(map(len, ids), default=0),
        "prompt": prompt,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    study = Study(
        Calibration(model, ids, prompt, options),
        formats=formats,
        together=together,
        serving=Serving(context, batch, dtype),
        cells=None if cells is None else Path(cells),
        facts=facts,
        progress=progress,
    )
    return Search(study, variants)


def _token_ids(
    model: Any, tokenizer: Any, text: str | Path | Sequence[Any], windows: int, window: int
) -> list[torch.Tensor]:
    """Return the texts to measure on, as token ids on the model's device."""
    if not isinstance(text, (str, Path)):
        return [torch.as_tensor(ids, dtype=torch.long, device=model.device) for ids in text]
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"tokenizer must be given: none lies at the model's {model.name_or_path!r} ({str(error)[:120]})"
            ) from None
    most = longest_context(model.config)
    if window > most:
        raise ValueError(f"window must be at most the model's {most} positions, got {window}")
    cut = text_windows(tokenizer, text, window, windows)
    return [torch.tensor(ids, device=model.device) for ids in cut]


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Have `model` attend over pages, where it can, and as before afterwards."""
    before = attention_config(model.config)._attn_implementation
    use_paged_attention(model)
    try:
        yield
    finally:
        now = attention_config(model.config)._attn_implementation
        if now == ATTENTION_NAME and before != now:
            model.set_attn_implementation(before or "sdpa")
