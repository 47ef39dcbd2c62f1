"""Run lm-eval tasks through one cache and return rows: the cell of a grid."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .caches import harness_cache
from .nltk_data import use_packaged_nltk


def run_tasks(
    model: Any,
    tokenizer: Any,
    cache_name: str,
    tasks: str | Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    max_length: int | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    seed: int | None = None,
    cache_config: Mapping[str, Any] | None = None,
    reread_tokens: int = 1,
    rolling_prefill: int = 64,
) -> list[dict[str, Any]]:
    """Score `tasks` with every token read through the cache `cache_name`.

    Args:
        model: a causal language model in eval mode; it is switched to the paged attention where that reads the cache.
        tokenizer: its tokenizer.
        cache_name: what `kv_hf.evaluation.cache_kinds.cache_kind` takes.
        tasks: names that lm-eval knows, or finds under `include_path`; also groups and tags.
        limit: the first documents of each task, None for all.
        batch_size: contexts in a batch.
        max_length: tokens of a text, None for what the model takes.
        metadata: for tasks that make their own texts, such as {"max_seq_lengths": [2048]} for RULER.
        seed: of the choice of examples and of sampling; None for lm-eval's own.
        cache_config, reread_tokens, rolling_prefill: as for the model class `kv_hf`.
        num_fewshot, apply_chat_template, system_instruction, gen_kwargs: as for lm_eval.simple_evaluate.
    Returns: a row per task and metric: kind="task", task, metric, value, stderr (None where lm-eval has none), samples,
        context (tokens of the longest text), bytes_per_token (measured, in `bytes_dtype`), encoded_share (part of the
        tokens that lay in sealed pages in the end; None without pages), task_version, num_fewshot, limit, protocol. Of a group only its mean, where it defines one.
    Raises: ValueError for a bad argument, an unknown task and data that cannot be loaded, before anything runs, and for
        logits that are nan; ImportError where lm-eval is not installed.
    """
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise ValueError(f"tasks must name at least one task, got {tasks!r}")
    for argument, value in (("limit", limit), ("batch_size", batch_size)):
        none = value is None and argument == "limit"
        if not none and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{argument} must be a positive integer, got {value!r}")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path must be a folder of task files, got {str(include_path)!r}")
    harness_cache(cache_name, cache_config)
    use_packaged_nltk()
    from .register import register

    register()
    facts = {"tokenizer": getattr(tokenizer, "name_or_path", ""), **(metadata or {})}
    manager, loaded = _load(names, include_path, facts)

    import lm_eval

    from .model import KVCacheLM

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    rows: list[dict[str, Any]] = []
    for objects in loaded:
        lm = KVCacheLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype="float32",
            cache_implementation=cache_name,
            cache_config=cache_config,
            reread_tokens=reread_tokens,
            rolling_prefill=rolling_prefill,
        )
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=objects,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            system_instruction=system_instruction,
            gen_kwargs=dict(gen_kwargs) if gen_kwargs else None,
            log_samples=False,
            bootstrap_iters=1000,
            **({} if seed is None else dict.fromkeys(seeds, seed)),
        )
        if results is not None:  # of a run over several processes the first has them
            rows += _rows(results, limit)
    return rows


def _load(
    names: Sequence[str], include_path: str | Path | None, metadata: Mapping[str, Any]
) -> tuple[Any, list[list[Any]]]:
    """Return lm-eval's manager, and the task objects (or the group) of each name with their data loaded."""
    manager = _manager(names, include_path, metadata)
    for name in names:
        if name not in manager.all_tasks:
            where = "" if include_path is None else f", nor in include_path {str(include_path)!r}"
            raise ValueError(f"tasks: lm-eval knows no task {name!r}{where}")
    found = []
    for name in names:
        try:
            one = manager.load([name])
        except Exception as error:  # whatever a data set that is missing raises
            lines = str(error).strip().splitlines() or [""]
            raise ValueError(
                f"tasks: the data of {name!r} cannot be loaded ({type(error).__name__}: {lines[0]})"
            ) from error
        groups = one.get("groups") or {}
        found.append([groups[name]] if name in groups else list(one["tasks"].values()))
    return manager, found


# reading all of lm-eval's task files takes seconds: (what it depends on, the manager) of the last time
_managers: dict[str, Any] = {}


def _manager(
    names: Sequence[str], include_path: str | Path | None, metadata: Mapping[str, Any]
) -> Any:
    """Return a manager of the tasks under `include_path`, where these are all that is asked for, or of all tasks."""
    from lm_eval import tasks

    facts = dict(metadata)
    if include_path is not None:
        own = tasks.TaskManager(
            include_path=str(include_path), include_defaults=False, metadata=facts
        )
        if set(names) <= set(own.all_tasks):
            return own
    folder = None if include_path is None else str(Path(include_path).resolve())
    changed = None if folder is None else Path(folder).stat().st_mtime_ns
    key = json.dumps([folder, changed, facts], sort_keys=True, default=str)
    if key not in _managers:
        _managers.clear()
        _managers[key] = tasks.TaskManager(include_path=folder, metadata=facts)
    return _managers[key]


def _rows(results: Mapping[str, Any], limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield a row per metric of the group, or of each task where there is no group with a mean."""
    how = results["config"]["kv_cache"]
    counts = results.get("n-samples", {})
    subtasks = results.get("group_subtasks", {})
    groups = results.get("groups") or {}
    inner = {name for parent in groups for name in subtasks.get(parent, ())}
    top = [name for name in groups if name not in inner]
    for name in top or results["results"]:
        figures = results["results"][name]
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            if metric.isdigit() and value == -1:  # RULER's sign for a length without samples
                continue
            stderr = figures.get(f"{metric}_stderr,{filtered}")
            effective = counts.get(name, {}).get("effective", figures.get("sample_len"))
            yield {
                "kind": "task",
                "task": name,
                "metric": metric if filtered == "none" else key,
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, (int, float)) else None,
                "samples": effective,
                "context": how["longest"],
                "bytes_per_token": how["bytes_per_token"],
                "bytes_dtype": how["bytes_dtype"],
                "encoded_share": how["encoded_share"],
                "task_version": results.get("versions", {}).get(name),
                "num_fewshot": results.get("n-shot", {}).get(name),
                "limit": limit,
                "protocol": how["protocol"],
            }
