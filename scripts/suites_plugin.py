"""A pytest plugin: transformers' tests with paged caches wherever they, or generate(), make a DynamicCache.

`scripts/transformers_suites.py` loads it with `-p suites_plugin`; $KV_HF_SUITE holds the settings as JSON:
    cache: "dynamic" substitutes nothing (and does not import kv_hf), else one of kv_hf.cache_names()
    options: cache_config of the paged caches
    seq_length, new_tokens: longer prompts and answers for the model tests (0: as transformers has them)
    report: JSONL file that gets one line per test: outcome, message, caches made, pages sealed
"""

import inspect
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.utils import GenerationMixin

SETTINGS: dict[str, Any] = json.loads(os.environ["KV_HF_SUITE"])
REPORT = Path(SETTINGS["report"])
counts: Counter[str] = Counter()  # of the test that is running
outcomes: dict[str, dict[str, Any]] = {}
running: list[str] = [""]
# caches of tests that name no config: as many layers as they use
NO_CONFIG = LlamaConfig(num_hidden_layers=2)


def substitute() -> None:
    """Let DynamicCache(config) make paged caches, and generate() choose them where it would make a DynamicCache."""
    import kv_hf
    from kv_hf.formats import cache_options
    from kv_hf.pages.pool import PagePool

    class SuiteCache(kv_hf.PagedCache):
        """A PagedCache that is made with DynamicCache's arguments."""

        def __init__(self, ddp_cache_data: Any = None, config: Any = None, **_: Any) -> None:
            named = cache_options(SETTINGS["cache"])
            super().__init__(config or NO_CONFIG, **{**named, **SETTINGS["options"]})
            counts["made"] += 1

    stock = False  # True while transformers shall make its own

    def new(
        cls: type, ddp_cache_data: Any = None, config: Any = None, *args: Any, **more: Any
    ) -> Any:
        plain = cls is not DynamicCache or ddp_cache_data is not None or args or more or stock
        if plain or (config is None and "test_cache_utils" not in running[0]):
            return object.__new__(cls)
        try:
            kv_hf.PagedCache(config or NO_CONFIG)
        except kv_hf.errors.UnsupportedModelError:
            counts["refused"] += 1
            return object.__new__(cls)
        return object.__new__(SuiteCache)

    setattr(DynamicCache, "__new__", staticmethod(new))  # noqa: B010
    ours = GenerationMixin._prepare_cache_for_generation

    def prepare(self: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
        nonlocal stock
        asked = generation_config.cache_implementation
        given = model_kwargs.get("past_key_values")
        if (
            asked not in (None, "dynamic")
            or given is not None
            or generation_config.use_cache is False
        ):
            return ours(self, generation_config, model_kwargs, *args)
        options = generation_config.cache_config
        try:
            generation_config.cache_implementation = SETTINGS["cache"]
            generation_config.cache_config = SETTINGS["options"]
            ours(self, generation_config, model_kwargs, *args)
            counts["generate"] += 1
            return None
        except kv_hf.errors.UnsupportedModelError:
            counts["refused"] += 1
        finally:
            generation_config.cache_implementation = asked
            generation_config.cache_config = options
        stock = True
        try:
            return ours(self, generation_config, model_kwargs, *args)
        finally:
            stock = False

    setattr(GenerationMixin, "_prepare_cache_for_generation", prepare)  # noqa: B010
    allocate = PagePool.allocate

    def counted(self: Any, number: int) -> Any:
        counts["pages"] += number
        return allocate(self, number)

    setattr(PagePool, "allocate", counted)  # noqa: B010


def single_layer() -> type:
    """Return a paged layer that is made without arguments, as tests of single cache layers make DynamicLayers."""
    import kv_hf
    from kv_hf.cache.layer import PagedLayer
    from kv_hf.cache.layer_formats import LayerFormats
    from kv_hf.pages.arena import PageArena
    from kv_hf.pages.group import PageGroup

    config = kv_hf.CacheConfig(**{"keys": "exact", "values": "exact", **SETTINGS["options"]})

    class SuiteLayer(PagedLayer):
        def __init__(self, *args: Any, **more: Any) -> None:
            arena = PageArena()
            group = PageGroup(
                config.page_size,
                config.sink_tokens,
                config.recent_tokens,
                None,
                pool=arena.pool(None),
            )
            super().__init__(0, group, arena, LayerFormats.of(config, 0, 1))
            counts["made"] += 1

    return SuiteLayer


def longer(module: Any) -> None:
    """Give the model testers of a test module longer prompts, and its tests longer answers."""
    for name, found in list(vars(module).items()):
        if not inspect.isclass(found):
            continue
        if SETTINGS["new_tokens"] and isinstance(getattr(found, "max_new_tokens", None), int):
            setattr(found, "max_new_tokens", SETTINGS["new_tokens"])  # noqa: B010
        if SETTINGS["seq_length"] and name.endswith("Tester"):
            make = inspect.unwrap(found.__init__)
            values = list(make.__defaults__ or ())
            arguments = list(inspect.signature(make).parameters.values())
            defaulted = [a.name for a in arguments if a.default is not inspect.Parameter.empty]
            if "seq_length" in defaulted:
                values[defaulted.index("seq_length")] = SETTINGS["seq_length"]
                make.__defaults__ = tuple(values)


def pytest_configure() -> None:
    if SETTINGS["cache"] != "dynamic":
        substitute()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shared = vars(sys.modules.get("tests.causal_lm_tester", object)).get(
        "_TEXT_MODEL_TESTER_DEFAULTS"
    )
    if shared and SETTINGS["seq_length"]:
        shared["seq_length"] = SETTINGS["seq_length"]
    for module in {getattr(item, "module", None) for item in items} - {None}:
        longer(module)
        layers = vars(module).get("ALL_DYNAMIC_LAYERS")
        if SETTINGS["cache"] != "dynamic" and layers:
            paged = single_layer()
            vars(module)["ALL_DYNAMIC_LAYERS"] = type(layers)(
                paged if layer is DynamicLayer else layer for layer in layers
            )
            vars(module)["DynamicLayer"] = paged


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give both runs the same random numbers: the models of these tests are random."""
    running[0] = item.nodeid
    counts.clear()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    common = sys.modules.get("tests.test_modeling_common")
    if common is not None and hasattr(common, "global_rng"):
        common.global_rng.seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst outcome of a test's phases and subtests."""
    found = outcomes.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed"})
    worse = ["passed", "skipped", "failed"]
    if worse.index(report.outcome) > worse.index(found["outcome"]):
        found["outcome"] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        found["message"] = text.strip()[:300]
    found.update(counts)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = str(report.longrepr).strip().splitlines()
        outcomes[report.nodeid] = {
            "test": report.nodeid,
            "outcome": "failed",
            "message": "not collected: " + lines[-1],
        }


def pytest_sessionfinish() -> None:
    REPORT.write_text("".join(json.dumps(found) + "\n" for found in outcomes.values()))
