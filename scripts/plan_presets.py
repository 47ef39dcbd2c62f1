#!/usr/bin/env python3
"""Fill in what the planner's presets carry beside their configs: the inventory that a probe of each config gives.

python scripts/plan_presets.py            # write kv_hf/planner/presets/*.json
python scripts/plan_presets.py --check    # exit code 1 where one differs from what it would write
python scripts/plan_presets.py NAME ...   # these alone
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import kv_hf
from kv_hf.errors import KVCacheError
from kv_hf.planner.source import inventory_of_preset

FOLDER = Path(kv_hf.__file__).parent / "planner" / "presets"


def text_of(preset: dict[str, Any]) -> str:
    """Return a preset as JSON: one line for each name of its config and each run of equal layers."""
    parts = []
    for key, value in preset.items():
        if key == "inventory":
            value = {**value, "layers": _Lines(value["layers"])}
        parts.append(f"  {json.dumps(key)}: {_lines(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


class _Lines(list[Any]):
    """A list with a line for each item."""


def _lines(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    rows = []
    for key, item in value.items():
        text = json.dumps(item, ensure_ascii=False)
        if isinstance(item, _Lines):
            inner = ",\n".join(f"      {json.dumps(entry)}" for entry in item)
            text = f"[\n{inner}\n    ]"
        rows.append(f"    {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n  }"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("names", nargs="*", help="presets; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    paths = [FOLDER / f"{name}.json" for name in options.names] or sorted(FOLDER.glob("*.json"))
    failed = 0
    for path in paths:
        before = path.read_text(encoding="utf-8")
        preset = json.loads(before)
        start = time.perf_counter()
        try:
            found = inventory_of_preset(preset, again=True)
        except KVCacheError as error:
            failed += 1
            print(f"{path.stem}: {error}")
            continue
        text = text_of({**preset, "inventory": found.as_dict()})
        state = "the same" if text == before else "differs" if options.check else "written"
        failed += state == "differs"
        if state == "written":
            path.write_text(text, encoding="utf-8")
        size = "?" if found.parameters is None else f"{found.parameters / 1e9:.2f}B"
        seconds = time.perf_counter() - start
        print(f"{path.stem}: {state}, {found.how}, {size} weights, {seconds:.1f} s", *found.notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
