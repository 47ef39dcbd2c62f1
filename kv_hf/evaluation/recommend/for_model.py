"""`kv_hf.recommend`: from a model and a budget to a recipe, or to the uniform cache that no recipe beats."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...config import check_option_names
from ...errors import CacheOptionError, UnsupportedModelError
from ...hf.latent import is_latent_attention
from ...recipe import MEASURED_OPTIONS
from ...texts import CALIBRATION, HELD_OUT
from .attention import paged_attention
from .calibration import Calibration, check_prompt
from .candidates import Asked
from .cost import Budget, Serving
from .recommendation import Recommendation
from .search import Search
from .study import Study
from .windows import Source, check_held_out, cut_windows


def recommend(
    model: Any,
    budget: float | str,
    *,
    tokenizer: Any = None,
    text: Source = CALIBRATION,
    held_out: Source = HELD_OUT,
    windows: int = 1,
    held_out_windows: int = 2,
    window: int = 1024,
    prompt: int = 896,
    formats: Asked = None,
    together: Asked = None,
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
    selection exactly. Text that nothing was chosen on decides: the recipe is compared there, window by window, with the
    best uniform caches of at most its budget: all cache names and all pairs of formats. Where the interval of the gain is
    not above zero, the uniform cache is returned, and the verdict says so.

    Args:
        model: a causal language model in eval mode, in float32 if losses of 8 bits matter (half precision has more
            noise than they are).
        budget: a number of bits per stored number, scales included; "bits=4.5", the same; "bytes_per_token=9000" and
            "bytes=2e9", everything counted, for `batch` rows of `context` tokens; or the name of a uniform cache,
            "paged_int4", for as much as that takes.
        tokenizer: None takes the one that lies beside the model's weights.
        text: what to choose on: a bundled text, a file, several of them, or token ids: one sequence per window.
        held_out: what to judge on, likewise. Other text than `text`.
        windows, held_out_windows: windows cut from each text.
        window, prompt: tokens of a window, and those of them that are not scored.
        formats: those to measure layer by layer, for both sides or {side: formats}. None takes every registered format of
            less than 6 bits that no other beats in bytes and in the loss of all layers together.
        together: those that lose so little that all layers are measured at once (see `measure_sensitivities`). None takes
            those of 6 bits and more, likewise.
        variants: other options of the whole cache to try, e.g. [{"recent_tokens": 32}]: they get as many bytes as the
            given ones at `context` tokens, exact tokens included. Layers are not measured again for them: the
            losses are scaled by what all layers together gain. The uniform caches may have them too. None tries 32
            recent tokens, with and without larger groups at 2 bits; () tries nothing.
        context, batch, dtype: what bytes are counted for.
        cells: JSONL file of measured cells. A killed run continues there, and another budget costs no measurement of
            layers.
        out: where the recipe goes.
        progress: called with (layers run, layers to run), anew for each part of the measurement.
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
            held_out=held_out,
            windows=windows,
            held_out_windows=held_out_windows,
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
    text: Source = CALIBRATION,
    held_out: Source = HELD_OUT,
    windows: int = 1,
    held_out_windows: int = 2,
    window: int = 1024,
    prompt: int = 896,
    formats: Asked = None,
    together: Asked = None,
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
    check_options(options, *(variants or ()))
    counts = {"windows": windows, "held_out_windows": held_out_windows}
    for name, count in {**counts, "context": context, "batch": batch}.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
    chosen_on = cut_windows(model, tokenizer, "text", text, window, windows)
    calibration = Calibration(model, chosen_on.ids, prompt, options)
    judged_on = cut_windows(model, tokenizer, "held_out", held_out, window, held_out_windows)
    check_held_out(chosen_on, judged_on)
    check_prompt("held_out", prompt, judged_on.ids)
    study = Study(
        calibration,
        formats=formats,
        together=together,
        serving=Serving(context, batch, dtype),
        cells=None if cells is None else Path(cells),
        facts={
            "model": model_name(model),
            "text": ", ".join(chosen_on.names) if chosen_on.named else "token ids",
            "windows": len(chosen_on.ids),
            "window": max(map(len, chosen_on.ids), default=0),
            "prompt": prompt,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        progress=progress,
    )
    return Search(study, judged_on, variants)


def model_name(model: Any) -> str:
    """Return what a model is called in rows and recipes."""
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return Path(name).name if Path(name).is_dir() else name


def check_options(*given: Mapping[str, Any]) -> None:
    """Raise CacheOptionError for options that a recipe does not hold."""
    for options in given:
        check_option_names(options)
        for name in options:
            if name not in MEASURED_OPTIONS:
                raise CacheOptionError(
                    f"a recipe holds {', '.join(MEASURED_OPTIONS)} beside its formats, got {name}={options[name]!r}"
                )
