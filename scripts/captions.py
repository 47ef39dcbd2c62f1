"""The line above a measured table: weights, computed dtype, machine, threads and date, from the table's own rows.

One function writes it, so that no table says more or less than another. tests/project/test_captions.py holds every block of README.md
and docs/ to it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kv_hf.evaluation.shapes import RANDOM_MODELS
from kv_hf.evaluation.weights import PACKAGED, RANDOM, UNKNOWN, Weights

Row = Mapping[str, Any]
# rows of before the fields: folders that they name -> the packaged model that these were converted from
MADE_OF = {
    "SmolLM2-135M-Instruct": "smollm2-135m",
    "Qwen2.5-Coder-1.5B-Instruct": "qwen2.5-coder-1.5b",
    "SmolLM2-135M-1-svd": "smollm2-135m",
    "SmolLM2-135M-1-svd-up": "smollm2-135m",
    **{f"stories15M{end}": "stories15m" for end in ("", "-1-svd", "-2-svd", "-3-svd")},
    **{f"stories15M-{heads}-svd-up": "stories15m" for heads in (1, 2, 3)},
}
# kinds whose models are all built from configs
RANDOM_KINDS = ("model_families", "transformers_suites")
NOT_RECORDED = "not recorded"
# what a caption has, in this order; the test looks for it
CAPTION = re.compile(
    r"weights: .+; computed in .+; .+, (?:\d.* threads?|threads not recorded|GPU)\)?; (?:newest row )?\d{4}-\d\d-\d\d:$"
)


def caption(rows: Iterable[Row], title: str, computed: str | None = None) -> str:
    """Return one line: `title`, then weights, dtype, machines with threads, and the date of the newest row.

    Several machines are all named, each with its number of rows.

    Args:
        rows: those of the table, or of the part below this line; at least one.
        title: what the table is of, with texts and tokens.
        computed: what replaces the dtype, where rows have none.
    """
    found = list(rows)
    dates = sorted({row["date"] for row in found})
    newest = dates[-1] if len(dates) == 1 else f"newest row {dates[-1]}"
    dtypes = dict.fromkeys(row.get("dtype") or f"a dtype {NOT_RECORDED}" for row in found)
    parts = [
        f"{title}; weights: {weights_in_words(found)}",
        f"computed in {computed or ' and '.join(dtypes)}",
        machines_in_words(found),
        newest,
    ]
    return "; ".join(parts) + ":"


def weights_in_words(rows: Sequence[Row]) -> str:
    """Return the precisions of the rows' weights, each with the files that have it."""
    files: dict[str, list[str]] = {}
    for row in rows:
        one = weights_of_row(row)
        listed = files.setdefault(one.weights_precision or NOT_RECORDED, [])
        if one.model_file is not None and one.model_file not in listed:
            listed.append(one.model_file)
    return ", ".join(
        f"{precision} ({'; '.join(named)})" if named else precision.removesuffix(" weights")
        for precision, named in files.items()
    )


def weights_of_row(row: Row) -> Weights:
    """Return where the weights of a row's model come from; older rows do not say it, and go by the model's name."""
    if "weights_precision" in row:
        return Weights(row.get("model_file"), row["weights_precision"])
    if "shape" in row or row.get("kind") == "host_step":
        return Weights(None, "none, random keys and values of these sizes")
    if row.get("kind") in RANDOM_KINDS or row.get("weights") == "random":
        return RANDOM
    name = row.get("model") or row.get("teacher")
    if name in RANDOM_MODELS:
        return RANDOM
    return PACKAGED.get(MADE_OF.get(str(name), str(name)), UNKNOWN)


def machines_in_words(rows: Sequence[Row]) -> str:
    """Return the rows' machines with their threads; several with the number of rows of each, the most rows first."""
    counted = Counter(short_machine(row) for row in rows)
    threads = {name: _threads([r for r in rows if short_machine(r) == name]) for name in counted}
    if len(counted) == 1:
        name = next(iter(counted))
        return f"{name}, {threads[name]}"
    each = [
        f"{name} ({count} row{'s' if count > 1 else ''}, {threads[name]})"
        for name, count in counted.most_common()
    ]
    return f"rows of {len(each)} machines: {' and '.join(each)}"


def short_machine(row: Row) -> str:
    """Return a row's processor without trade marks; of a row that a GPU gave, the GPU."""
    words = str(row["machine"]).replace("(R)", "").replace(" Processor", "")
    if row.get("device", "cpu") != "cpu":
        return words.split(",")[-1].strip()
    return words


def _threads(rows: Sequence[Row]) -> str:
    if all(row.get("device", "cpu") != "cpu" for row in rows):
        return "GPU"
    given = sorted({row["threads"] for row in rows if row.get("threads") is not None})
    if not given:
        return f"threads {NOT_RECORDED}"
    counts = " or ".join(map(str, given))
    return f"{counts} thread{'s' if given != [1] else ''}"
