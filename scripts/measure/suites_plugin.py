"""A plugin of pytest: paged caches in the place of DynamicCache, longer prompts, equal seeds, and a report of what every test used.

$KV_HF_SUITE holds the settings as JSON: cache ("dynamic" substitutes nothing, and kv_hf is not imported), page_size and
sink_tokens of the paged caches, seq_length and new_tokens of the model tests (0: as transformers has them), and report, a JSON
file of outcome, message, caches made and pages sealed by test.
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
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin

SETTINGS: dict[str, Any] = json.loads(os.environ.get("KV_HF_SUITE", '{"cache": "dynamic"}'))
OPTIONS = {name: SETTINGS[name] for name in ("page_size", "sink_tokens") if name in SETTINGS}
WORSE = ("passed", "skipped", "failed")
counts = Counter[str]()  # of the test that is running
outcomes: dict[str, dict[str, Any]] = {}


def substitute() -> None:
    """Let DynamicCache(config) make paged caches, and generate() choose them where it would make a DynamicCache."""
    import kv_hf
    from kv_hf.cache.model_shape import CACHE
    from kv_hf.errors import UnsupportedModelError
    from kv_hf.formats import cache_options
    from kv_hf.pages.pool import PagePool

    class SuiteCache(kv_hf.PagedCache):
        """A PagedCache that is made with DynamicCache's arguments."""

        def __init__(self, ddp_cache_data: Any = None, config: Any = None, **_: Any) -> None:
            super().__init__(config, **cache_options(SETTINGS["cache"]), **OPTIONS)
            counts["made"] += 1

    stock = False  # True while transformers shall make its own

    def new(cls: type, data: Any = None, config: Any = None, *args: Any, **more: Any) -> Any:
        given = data is not None or config is None or args or more
        if cls is not DynamicCache or given or stock:
            return object.__new__(cls)
        try:
            kv_hf.PagedCache(config)
        except UnsupportedModelError:
            return object.__new__(cls)
        return object.__new__(SuiteCache)

    prepared = GenerationMixin._prepare_cache_for_generation

    def prepare(self: Any, config: Any, model_kwargs: Any, *args: Any, **more: Any) -> Any:
        nonlocal stock
        before = config.cache_implementation, config.cache_config
        given = model_kwargs.get(CACHE) is not None
        if before[0] not in (None, "dynamic") or given or config.use_cache is False:
            return prepared(self, config, model_kwargs, *args, **more)
        try:
            config.cache_implementation, config.cache_config = SETTINGS["cache"], OPTIONS
            found = prepared(self, config, model_kwargs, *args, **more)
            counts["made"] += 1
            return found
        except UnsupportedModelError:
            config.cache_implementation, config.cache_config = before
            stock = True
            return prepared(self, config, model_kwargs, *args, **more)
        finally:
            stock = False
            config.cache_implementation, config.cache_config = before

    allocate = PagePool.allocate

    def counted(self: Any, number: int) -> Any:
        counts["pages"] += number
        return allocate(self, number)

    for owner, name, function in (
        (DynamicCache, "__new__", staticmethod(new)),
        (GenerationMixin, "_prepare_cache_for_generation", prepare),
        (PagePool, "allocate", counted),
    ):
        setattr(owner, name, function)


def longer(module: Any) -> None:
    """Give the model testers of a test module longer prompts, and its tests longer answers."""
    length = SETTINGS.get("seq_length")
    for name, found in vars(module).items():
        if not inspect.isclass(found):
            continue
        if SETTINGS.get("new_tokens") and isinstance(getattr(found, "max_new_tokens", None), int):
            setattr(found, "max_new_tokens", SETTINGS["new_tokens"])  # noqa: B010
        if length and name.endswith("Tester"):
            make = inspect.unwrap(found.__init__)
            arguments = inspect.signature(make).parameters.values()
            own = {one.name: one.default for one in arguments if one.default is not one.empty}
            if "seq_length" in own:
                make.__defaults__ = (*(own | {"seq_length": length}).values(),)


def pytest_configure() -> None:
    if SETTINGS["cache"] != "dynamic":
        substitute()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tester = vars(sys.modules.get("tests.causal_lm_tester", object))
    if SETTINGS.get("seq_length") and "_TEXT_MODEL_TESTER_DEFAULTS" in tester:
        tester["_TEXT_MODEL_TESTER_DEFAULTS"]["seq_length"] = SETTINGS["seq_length"]
    for module in {getattr(item, "module", None) for item in items} - {None}:
        longer(module)


def pytest_runtest_setup() -> None:
    """Give both runs the same random numbers: the models of these tests are random."""
    counts.clear()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    common = sys.modules.get("tests.test_modeling_common")
    if common is not None and hasattr(common, "global_rng"):
        common.global_rng.seed(0)


def note(test: str, outcome: str, message: str) -> None:
    """Keep the worst outcome of a test's phases and subtests."""
    found = outcomes.setdefault(test.partition("::")[2] or test, {"outcome": "passed"})
    if WORSE.index(outcome) > WORSE.index(found["outcome"]):
        found |= {"outcome": outcome, "message": message.strip()[:300]}
    found.update(counts)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    note(report.nodeid, report.outcome, str(crash.message if crash else report.longrepr))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(report.nodeid, "failed", "not collected: " + str(report.longrepr).strip()[-200:])


def pytest_sessionfinish() -> None:
    Path(SETTINGS["report"]).write_text(json.dumps(outcomes))
