"""Run transformers' own tests on DynamicCache and again on paged caches, and compare what passes.

    python scripts/transformers_suites.py --checkout ~/transformers --record
    python scripts/transformers_suites.py --checkout ~/transformers --seq-length 0 --new-tokens 0
    python scripts/transformers_suites.py --checkout ~/transformers tests/models/llama/test_modeling_llama.py -k beam

--checkout is a source checkout of the transformers version that is installed (its tests are not part of the package);
nothing in it is changed. Wherever generate() would make a DynamicCache, and wherever a test or a model makes one itself,
the second run gets a paged cache. The exit code is 1 when a test passes with DynamicCache and fails with pages.

pytest loads this file as a plugin, too (`-p transformers_suites`), which imports kv_hf for the second run alone. $KV_HF_SUITE
then holds the settings as JSON: cache ("dynamic" substitutes nothing), options of the paged caches, seq_length and
new_tokens of the model tests (0: as transformers has them), and report, a JSONL file that gets one line per test: outcome,
message, caches made, pages sealed.
"""

import argparse
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from measure.family_models import ROLES, families
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.utils import GenerationMixin
from transformers.models.auto.configuration_auto import model_type_to_module_name

Rows = dict[str, dict[str, Any]]
HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "transformers_suites.jsonl"
GENERAL = ("tests/utils/test_cache_utils.py", "tests/generation/test_utils.py")
# what a cache has a part in; compiled, exported and static caches are no DynamicCache
SELECTION = (
    "(generat or cache or past_key or beam or assisted or contrastive or lookup or padding or speculative or crop) "
    "and not compil and not static and not export and not flash"
)
COLUMNS = ("passed", "only_ours_failed", "only_stock_failed", "both_failed", "skipped")
NEW = ("new_passed", "new_failed", "new_skipped", "lost")

# the command


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("suites", nargs="*", help="files in the checkout (those of caches and of all families)")
    add("--checkout", type=Path, required=True, help="source tree of transformers")
    add("-k", default=SELECTION, help="pytest's selection of tests")
    add("--cache", default="paged_exact", help="what takes DynamicCache's place")
    add("--page-size", type=int, default=16)
    add("--sink-tokens", type=int, default=0)
    # transformers' own 7 and 3 fill hardly any page
    add("--seq-length", type=int, default=40, help="tokens of a prompt (0: as is)")
    add("--new-tokens", type=int, default=12, help="tokens to generate (0: as is)")
    add("--timeout", type=float, default=3600, help="seconds per run")
    add("--record", action="store_true", help="append rows to the file --out")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def default_suites(checkout: Path) -> list[str]:
    """Return the general suites, and those of every family of scripts/model_families.py that the checkout has."""
    modules = {model_type_to_module_name(name) for role in ROLES for name in families(role)}
    own = [f"tests/models/{name}/test_modeling_{name}.py" for name in sorted(modules)]
    return [name for name in (*GENERAL, *own) if (checkout / name).is_file()]


def run(args: argparse.Namespace, cache: str) -> Rows:
    """Run the suites with one cache; return what the plugin reports, by test name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        options = {"page_size": args.page_size, "sink_tokens": args.sink_tokens}
        settings = {"cache": cache, "options": options, "report": str(report)}
        settings |= {"seq_length": args.seq_length, "new_tokens": args.new_tokens}
        paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            "HF_HUB_OFFLINE": "1",  # models of the hub are used where they are there already
            **os.environ,
            "KV_HF_SUITE": json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            Path(__file__).stem,
            "-p",
            "no:cacheprovider",
        ]
        command += ["-q", "-k", args.k, "--continue-on-collection-errors", *args.suites]
        how = {"timeout": args.timeout, "capture_output": True, "text": True}
        ended = subprocess.run(command, cwd=args.checkout, env=environment, **how)
        if not report.is_file():
            raise SystemExit(f"pytest with {cache} left no report:\n{ended.stdout}\n{ended.stderr}")
        rows = [json.loads(line) for line in report.read_text().splitlines()]
    # tests are numbered over the names of caches: with ours there are more, and numbers get another digit
    return {re.sub(r"_0+(\d+_)", r"_\1", row["test"]): row for row in rows}


def verdict(stock: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    """Return the column of the comparison that a test belongs to."""
    if stock is None or ours is None:  # parameterized over the names of caches: ours are new ones
        return f"new_{ours['outcome']}" if ours else "lost"
    outcomes = stock["outcome"], ours["outcome"]
    if outcomes == ("failed", "failed"):
        return "both_failed"
    if "failed" in outcomes:
        return "only_ours_failed" if outcomes[1] == "failed" else "only_stock_failed"
    return "skipped" if "skipped" in outcomes else "passed"


def compare(stock: Rows, ours: Rows) -> Rows:
    """Return, for each file, the tests by verdict and how many of the passed ones used a paged cache."""
    files: Rows = {}
    for test in dict.fromkeys((*stock, *ours)):
        file, _, name = test.partition("::")
        found = files.setdefault(file, {"tests": {}, "paged": 0, "pages": 0})
        found["tests"].setdefault(verdict(stock.get(test), ours.get(test)), []).append(name or file)
        mine = ours.get(test, {})
        if mine.get("outcome") == "passed" and (mine.get("made", 0) or mine.get("generate", 0)):
            found["paged"] += 1
            found["pages"] += mine.get("pages", 0)
    return files


def rows_of(args: argparse.Namespace, files: Rows) -> list[dict[str, Any]]:
    """Return what is recorded of each file."""
    from kv_hf.evaluation.rows import make_row

    shared = {"kind": "transformers_suites", "weights": "random", "cache": args.cache}
    shared |= {
        name: vars(args)[name] for name in ("page_size", "sink_tokens", "seq_length", "new_tokens")
    }
    rows = []
    for file, found in files.items():
        counts = {name: len(found["tests"].get(name, [])) for name in (*COLUMNS, *NEW)}
        used = {"passed_with_pages": found["paged"], "pages_sealed": found["pages"]}
        names = {name: found["tests"][name] for name in COLUMNS[1:4] if name in found["tests"]}
        rows.append(make_row(**shared, suite=file, **counts, **used, names=names))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the suites; 0 when nothing fails that passes with DynamicCache."""
    from kv_hf.evaluation.rows import append_rows
    from kv_hf.text_table import table_lines

    args = arguments(argv)
    if not (args.checkout / "tests").is_dir():
        print(f"--checkout: {args.checkout} has no folder tests")
        return 2
    args.suites = args.suites or default_suites(args.checkout)
    stock, ours = run(args, "dynamic"), run(args, args.cache)
    files = compare(stock, ours)
    rows = rows_of(args, files)
    shown = ("suite", *COLUMNS, "passed_with_pages", "pages_sealed")
    columns = [(name.replace("_", " "), [str(row[name]) for row in rows]) for name in shown]
    print(
        f"transformers' tests: DynamicCache against {args.cache}", *table_lines(columns), sep="\n"
    )
    for file, found in files.items():
        for kind in (*COLUMNS[1:3], "new_failed", "lost"):
            for test in found["tests"].get(kind, []):
                message = ours.get(f"{file}::{test}", {}).get("message", "").partition("\n")[0]
                print(f"{kind}: {file}::{test}: {message}")
    if args.record:
        append_rows(args.out, rows)
    return int(any(row["only_ours_failed"] for row in rows))


# the plugin

SETTINGS: dict[str, Any] = json.loads(os.environ.get("KV_HF_SUITE", "{}"))
counts: Counter[str] = Counter()  # of the test that is running
outcomes: Rows = {}
running: list[str] = [""]
# caches of tests that name no config: as many layers as they use
NO_CONFIG = LlamaConfig(num_hidden_layers=2)


def substitute() -> None:
    """Let DynamicCache(config) make paged caches, and generate() choose them where it would make a DynamicCache."""
    import kv_hf
    from kv_hf.errors import UnsupportedModelError
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
        except UnsupportedModelError:
            counts["refused"] += 1
            return object.__new__(cls)
        return object.__new__(SuiteCache)

    ours = GenerationMixin._prepare_cache_for_generation

    def prepare(self: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
        nonlocal stock
        before = generation_config.cache_implementation, generation_config.cache_config
        given = model_kwargs.get("past_key_values") is not None
        if before[0] not in (None, "dynamic") or given or generation_config.use_cache is False:
            return ours(self, generation_config, model_kwargs, *args)
        try:
            generation_config.cache_implementation = SETTINGS["cache"]
            generation_config.cache_config = SETTINGS["options"]
            ours(self, generation_config, model_kwargs, *args)
            counts["generate"] += 1
            return None
        except UnsupportedModelError:
            counts["refused"] += 1
        finally:
            generation_config.cache_implementation, generation_config.cache_config = before
        stock = True
        try:
            return ours(self, generation_config, model_kwargs, *args)
        finally:
            stock = False

    allocate = PagePool.allocate

    def counted(self: Any, number: int) -> Any:
        counts["pages"] += number
        return allocate(self, number)

    patches = (
        (DynamicCache, "__new__", staticmethod(new)),
        (GenerationMixin, "_prepare_cache_for_generation", prepare),
        (PagePool, "allocate", counted),
    )
    for owner, name, function in patches:
        setattr(owner, name, function)


def single_layer() -> type:
    """Return a paged layer that is made without arguments, as tests of single cache layers make DynamicLayers."""
    import kv_hf
    from kv_hf.cache.layer import PagedLayer

    class SuiteLayer(PagedLayer):
        def __init__(self, *args: Any, **more: Any) -> None:
            cache = kv_hf.PagedCache(NO_CONFIG, keys="exact", values="exact", **SETTINGS["options"])
            vars(self).update(vars(cache.layers[0]))
            counts["made"] += 1

    return SuiteLayer


def longer(module: Any) -> None:
    """Give the model testers of a test module longer prompts, and its tests longer answers."""
    for name, found in vars(module).items():
        if not inspect.isclass(found):
            continue
        if SETTINGS["new_tokens"] and isinstance(getattr(found, "max_new_tokens", None), int):
            setattr(found, "max_new_tokens", SETTINGS["new_tokens"])  # noqa: B010
        if SETTINGS["seq_length"] and name.endswith("Tester"):
            make = inspect.unwrap(found.__init__)
            arguments = inspect.signature(make).parameters.values()
            defaults = {one.name: one.default for one in arguments if one.default is not one.empty}
            if "seq_length" in defaults:
                make.__defaults__ = tuple(
                    {**defaults, "seq_length": SETTINGS["seq_length"]}.values()
                )


def pytest_configure() -> None:
    if SETTINGS["cache"] != "dynamic":
        substitute()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tester = vars(sys.modules.get("tests.causal_lm_tester", object))
    shared = tester.get("_TEXT_MODEL_TESTER_DEFAULTS")
    if shared and SETTINGS["seq_length"]:
        shared["seq_length"] = SETTINGS["seq_length"]
    for module in {getattr(item, "module", None) for item in items} - {None}:
        longer(module)
        layers = vars(module).get("ALL_DYNAMIC_LAYERS")
        if SETTINGS["cache"] != "dynamic" and layers:
            paged = single_layer()
            own = type(layers)(paged if layer is DynamicLayer else layer for layer in layers)
            vars(module).update(ALL_DYNAMIC_LAYERS=own, DynamicLayer=paged)


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
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        found |= {"outcome": report.outcome, "message": text.strip()[:300]}
    found.update(counts)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        message = "not collected: " + str(report.longrepr).strip().splitlines()[-1]
        name = {"test": report.nodeid, "outcome": "failed"}
        outcomes[report.nodeid] = {**name, "message": message}


def pytest_sessionfinish() -> None:
    Path(SETTINGS["report"]).write_text(
        "".join(json.dumps(found) + "\n" for found in outcomes.values())
    )


if __name__ == "__main__":
    sys.exit(main())
