"""Run files of transformers' own tests on DynamicCache and again on paged caches, and compare what passes.

$TRANSFORMERS_CHECKOUT names a source checkout of the installed transformers, whose tests are no part of the package; nothing in
it is changed. measure/suites_plugin.py puts paged caches in the place of DynamicCache.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import model_type_to_module_name

from measure.family_models import ROLES, families
from measure.runner import Device, Fields, WrongResultError, workload

Tests = dict[str, Fields]
CHECKOUT = "TRANSFORMERS_CHECKOUT"
SCRIPTS = Path(__file__).parents[1]
GENERAL = ("tests/utils/test_cache_utils.py", "tests/generation/test_utils.py")
# what a cache has a part in; compiled, exported and static caches are no DynamicCache
SELECTION = (
    "(generat or cache or past_key or beam or assisted or contrastive or lookup or padding or speculative or crop) "
    "and not compil and not static and not export and not flash"
)
PAGED = {"cache": "paged_exact", "page_size": 16, "sink_tokens": 0}
COLUMNS = ("passed", "only_ours_failed", "only_stock_failed", "both_failed", "skipped")


def suites() -> list[str]:
    """Return the general suites and those of every family; with a checkout, those that it has."""
    modules = {model_type_to_module_name(name) for role in ROLES for name in families(role)}
    own = [f"tests/models/{name}/test_modeling_{name}.py" for name in sorted(modules)]
    checkout = os.environ.get(CHECKOUT)
    names = (*GENERAL, *own)
    return [name for name in names if checkout is None or Path(checkout, name).is_file()]


@workload(
    "transformers_suites",
    grid=[
        {"suite": suites(), "seq_length": [0], "new_tokens": [0]},
        # transformers' own 7 and 3 fill hardly any page
        {"suite": suites(), "seq_length": [40], "new_tokens": [12]},
    ],
    columns="passed only_stock_failed both_failed skipped passed_with_pages pages_sealed",
    limit=3600,
    timed=False,
)
def transformers_suites(
    device: Device, suite: str, seq_length: int, new_tokens: int
) -> Iterator[Fields]:
    """Run transformers' own tests with paged caches, and with DynamicCache.

    Args:
        seq_length, new_tokens: of the tests' models; 0: as transformers has them.
    Raises: WrongResultError naming the tests that fail with pages alone.
    """
    asked = {**PAGED, "seq_length": seq_length, "new_tokens": new_tokens}
    stock, ours = tested(suite, {**asked, "cache": "dynamic"}), tested(suite, asked)
    row = compared(stock, ours)
    wrong = [
        f"{name}: {ours[name]['message']}" for name in row["names"].get("only_ours_failed", [])
    ]
    if wrong:
        raise WrongResultError(f"{len(wrong)} tests fail with pages alone: {'; '.join(wrong)}")
    yield {**PAGED, "weights": "random", **row}


def tested(suite: str, settings: Fields) -> Tests:
    """Run a file of tests with one cache; return what the plugin reports, by test name."""
    if CHECKOUT not in os.environ:
        raise ValueError(f"set ${CHECKOUT} to a source checkout of the installed transformers")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        environment = {
            "HF_HUB_OFFLINE": "1",  # models of the hub are used where they are there already
            **os.environ,
            "KV_HF_SUITE": json.dumps({**settings, "report": str(report)}),
            "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}",
        }
        command = [sys.executable, "-m", "pytest", "-p", "measure.suites_plugin", "-q", suite]
        command += ["-p", "no:cacheprovider", "-k", SELECTION, "--continue-on-collection-errors"]
        how: Any = {"cwd": os.environ[CHECKOUT], "capture_output": True, "text": True}
        ended = subprocess.run(command, env=environment, **how)
        if not report.is_file():
            raise ValueError(f"pytest left no report:\n{ended.stdout}\n{ended.stderr}")
        tests = json.loads(report.read_text())
    # tests are numbered over the names of caches: with ours there are more, and numbers get another digit
    return {re.sub(r"_0+(\d+_)", r"_\1", name): test for name, test in tests.items()}


def compared(stock: Tests, ours: Tests) -> Fields:
    """Return how many tests came to what, the names of those that failed, and what the passed ones used pages for.

    Tests of one run alone are made for each name of a cache, of which kv_hf adds some; they are not compared.
    """
    columns: dict[str, list[str]] = {column: [] for column in COLUMNS}
    pages = []
    for name in stock.keys() & ours.keys():
        found = column_of(stock[name]["outcome"], ours[name]["outcome"])
        columns[found].append(name)
        if ours[name]["outcome"] == "passed" and "made" in ours[name]:
            pages.append(ours[name].get("pages", 0))
    return {
        **{column: len(tests) for column, tests in columns.items()},
        "passed_with_pages": len(pages),
        "pages_sealed": sum(pages),
        "names": {column: sorted(columns[column]) for column in COLUMNS[1:4] if columns[column]},
    }


def column_of(stock: str, ours: str) -> str:
    """Return the column of a test by its outcomes with DynamicCache and with pages."""
    if "failed" not in (stock, ours):
        return "skipped" if "skipped" in (stock, ours) else "passed"
    if stock == ours:
        return "both_failed"
    return "only_ours_failed" if ours == "failed" else "only_stock_failed"
