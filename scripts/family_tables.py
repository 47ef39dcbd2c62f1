"""The table of docs/model_families.md, from the newest row of each family; scripts/readme_table.py writes it."""

from collections import Counter
from typing import Any

from captions import caption
from docs_tables import table
from measure.families import BLUNT
from packaging.version import Version

Rows = list[dict[str, Any]]
ROLES = {"causal": "causal", "seq2seq": "encoder-decoder", "conditional": "conditional generation"}
VERDICTS = {
    "equal": "equal",
    "refused": "refused",
    "impossible": "not with DynamicCache either",
    "broken": "broken in transformers",
    "not built": "not built here",
    "DIFFERS": "differs",
    "ERROR": "error",
}
PAGED = "kv_hf"


def families_table(rows: Rows) -> str:
    """Return, for each version of transformers, the verdicts by kind of model, and why a family is not equal."""
    rows = [row for row in rows if row["kind"] == "model_families"]
    versions = sorted({row["versions"]["transformers"] for row in rows}, key=Version, reverse=True)
    blocks = [_version_block(version, rows) for version in versions]
    return "\n\n".join(blocks) if blocks else "No run has been recorded yet."


def newest(rows: Rows, version: str) -> Rows:
    """Return the last row of each family of a version of transformers."""
    found = {
        (row["role"], row["family"]): row
        for row in rows
        if row["versions"]["transformers"] == version
    }
    return sorted(found.values(), key=lambda row: (list(ROLES).index(row["role"]), row["family"]))


def _version_block(version: str, rows: Rows) -> str:
    found = newest(rows, version)
    words = [word for word in VERDICTS if any(row["verdict"] == word for row in found)]
    lines = [["kind", "families", *(VERDICTS[word] for word in words)]]
    for role, title in ROLES.items():
        counts = Counter(row["verdict"] for row in found if row["role"] == role)
        if counts:
            lines.append([title, str(counts.total()), *(str(counts[word]) for word in words)])
    said = "Families by verdict, a tiny model of each built from a config"
    head = caption(found, said, computed="float32")
    parts = [f"### transformers {version}", head, table(lines), *_equal_lists(found)]
    others = [
        [row["family"], ROLES[row["role"]], VERDICTS[row["verdict"]], _why(row)]
        for row in others_of(found)
    ]
    if others:
        parts.append(
            caption(others_of(found), "The families that are not equal", computed="float32")
        )
        parts.append(table([["family", "kind", "verdict", "why"], *others]).replace("---:", "---"))
    return "\n\n".join(parts)


def _equal_lists(rows: Rows) -> list[str]:
    """Return who is equal, by what reads the pages."""
    equal = [row for row in rows if row["verdict"] == "equal"]
    groups = {
        "Equal, and attention reads the pages": [
            row for row in equal if row["pages"] and row["attention"] == PAGED
        ],
        "Equal, each layer written out for the model's own attention": [
            row for row in equal if row["pages"] and row["attention"] != PAGED
        ],
        "Equal, and no page was sealed: the model makes or keeps a cache of its own, or none": [
            row for row in equal if not row["pages"]
        ],
        f"Equal, but a weak test: other tokens in the context move the last logits by less than {BLUNT:g} of the largest": [
            row for row in equal if (row.get("sensitivity") or 0) < BLUNT
        ],
    }
    return [
        f"{title}: {', '.join(dict.fromkeys(row['family'] for row in group))}."
        for title, group in groups.items()
        if group
    ]


def others_of(rows: Rows) -> Rows:
    """Return the families that are not equal."""
    return [row for row in rows if row["verdict"] != "equal"]


def _why(row: dict[str, Any]) -> str:
    """Return the operations that decided a family's verdict, and the message of the first."""
    decided = {name: one for name, one in row["others"].items() if one["verdict"] == row["verdict"]}
    first: dict[str, Any] = next(iter(decided.values()), {})
    message = first.get("message") or row["message"]
    if not message and "stock_to_uncached" in first:
        message = (
            f"DynamicCache lies {first['stock_to_uncached']:.2g} of the largest logit from the model without a cache, "
            f"pages {first['ours_to_uncached']:.2g}"
        )
    names = "every operation" if decided and not row["equal"] else ", ".join(decided)
    text = f"{names}: {message}" if names else message
    return text.replace("|", "\\|").replace("<", "&lt;")
