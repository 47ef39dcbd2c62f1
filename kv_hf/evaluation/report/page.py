"""The page: a summary, a chapter per model with its pictures and tables, and how the figures were made."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .accuracy_tables import OURS, accuracy_table, peer_table, peers, sensitivity_table
from .cells import Cell, Table, short, words
from .headers import conditions
from .html import render_page
from .levers import Levers, levers_table
from .other_tables import memory_table, needle_maps, needle_note, task_table
from .points import FLOOR, front_marks, kl_marks, left_out, perplexity_marks
from .select import Group, family

if TYPE_CHECKING:
    from markupsafe import Markup

FAMILIES = {
    "ours": "kv_hf, one format for all",
    "recipe": "kv_hf, a recipe (a format per layer and side)",
    "peer": "quantized caches of transformers and of others",
    "exact": "exact caches of transformers",
}
HEADINGS = {
    "accuracy": "Distance from the exact cache",
    "sensitivity": "What each layer costs",
    "task": "Tasks",
    "needle": "Needles in long texts",
    "memory": "Memory and speed",
}
Pictures = Mapping[int, Sequence["Markup"]]  # id of a group -> its plots
# kind (table, figure, note, heat, facts, key or details) and what is in it; templates/page.html draws each kind
Block = tuple[str, Any]
Card = tuple[str, list[Block]]  # heading, content


def page(
    groups: Sequence[Group],
    pictures: Pictures,
    unknown: Sequence[str],
    levers: Sequence[tuple[Levers, "Markup"]] = (),
) -> str:
    """Return the whole HTML page.

    Args:
        unknown: kinds of rows that are not shown.
        levers: models that were measured with several numbers of kv heads, each with its plot.
    """
    models = dict.fromkeys(group.model for group in groups)
    return render_page(
        title="Accuracy against memory of key/value caches",
        newest=max(group.newest for group in groups),
        first=[*_summary(groups), *(_levers(*each) for each in levers)],
        chapters=[{"model": m, "cards": _chapter(m, groups, pictures)} for m in models],
        notes=_notes(groups, unknown),
    )


def _summary(groups: Sequence[Group]) -> list[Card]:
    """Return a line per accuracy group: which of ours are on the front, and how many peers are beaten."""
    lines = []
    for group in groups:
        shown = kl_marks(group.rows)
        if group.kind != "accuracy" or not shown:
            continue
        front = [mark.name for mark in front_marks(shown) if family(mark.name) in OURS]
        behind = [m.name for m in shown if family(m.name) in OURS and m.name not in front]
        compared = peers(group)
        passed = sum(each.passed for each in compared)
        met = Cell(
            strong=f"{passed} of {len(compared)} peers",
            kind="pass" if passed == len(compared) else "fail",
        )
        lines.append(
            [
                Cell(group.model, head=True),
                words(group.protocol.get("text")),
                met if compared else words(None),
                *(
                    Cell("" if caches else "none", "wrap", codes=caches)
                    for caches in (front, behind)
                ),
            ]
        )
    if not lines:
        return []
    heads = ["model", "text", "aim met against", "ours on the Pareto front", "ours behind it"]
    return [("Summary", [("table", Table("Front and peers, per model", heads, lines))])]


def _levers(levers: Levers, plot: "Markup") -> Card:
    said = (
        "Perplexity of the same tokens through each cache, by models that were converted to fewer kv heads. Bytes are those "
        "that a cache of a bf16 model holds. On the front are the pairs of model and cache that no other beats in both."
    )
    blocks: list[Block] = [
        ("note", said),
        ("figure", plot),
        ("table", levers_table(levers)),
        ("facts", conditions(levers.original)),
    ]
    return f"kv heads and bits: {levers.original.model}", blocks


def _chapter(model: str, groups: Sequence[Group], pictures: Pictures) -> list[Card]:
    cards = []
    for kind, heading in HEADINGS.items():
        own = [group for group in groups if group.model == model and group.kind == kind]
        for group in own:
            more = ""
            if len(own) > 1:
                more = f": {_told_apart(group, own)}"
            elif kind == "needle":
                more = f": {group.protocol['task']}"
            cards.append((heading + more, _content(group, pictures.get(id(group), ()))))
    return cards


def _told_apart(group: Group, others: Sequence[Group]) -> str:
    """Return in words what this group has that the others do not all have."""
    names = [
        name for name in group.protocol if len({str(o.protocol.get(name)) for o in others}) > 1
    ]
    return ", ".join(f"{name.replace('_', ' ')} {group.protocol[name]}" for name in names)


def _content(group: Group, plots: Sequence["Markup"]) -> list[Block]:
    figures: list[Block] = [("figure", plot) for plot in plots]
    facts: Block = ("facts", conditions(group))
    if group.kind == "accuracy":
        compared = peers(group)
        peer: list[Block] = [("table", peer_table(group, compared))] if compared else []
        whole: list[Block] = [("key", _key(group)), ("table", accuracy_table(group))]
        return [facts, *figures[:1], *_missing(group), *peer, *figures[1:], *whole]
    how: Block = ("details", ("How it was measured", facts))
    if group.kind == "sensitivity":
        table: Block = ("table", sensitivity_table(group))
        return [*figures, ("details", ("The same as a table", table)), how]
    if group.kind == "needle":
        return [("note", needle_note(group)), ("heat", needle_maps(group)), how]
    return [("table", task_table(group) if group.kind == "task" else memory_table(group)), how]


def _missing(group: Group) -> list[Block]:
    """Say which caches a plot does not show, and why."""
    said = []
    for what, field, shown in (
        ("first plot", "stored_bits", kl_marks(group.rows)),
        ("second plot", "perplexity_delta or bytes_per_token", perplexity_marks(group.rows)),
    ):
        names = left_out(group.rows, shown)
        if names:
            said.append(f"Not in the {what} (no {field} was measured): {', '.join(names)}.")
    return [("note", " ".join(said))] if said else []


def _key(group: Group) -> list[tuple[str, str]]:
    """Return (family, its name) of the families that a group has."""
    present = {family(row["cache"]) for row in group.rows}
    return [(name, said) for name, said in FAMILIES.items() if name in present]


def _notes(groups: Sequence[Group], unknown: Sequence[str]) -> list[str]:
    kinds = {group.kind for group in groups}
    notes = []
    if "accuracy" in kinds:
        notes += [
            "KL is KL(exact || cache) of the next token's distribution, teacher forced with decode semantics: each scored "
            "token attends to what a decode step would read. Its interval is a 95 % bootstrap over blocks of "
            "neighbouring tokens.",
            "The interval of the change of perplexity is paired: both caches score the same tokens, and the difference is "
            "resampled.",
            f"A KL below {short(FLOOR)} is noise of float arithmetic. It is drawn on the dotted line, and counts as 0 for the "
            "front and for peers.",
            "Stored bits count everything that is held at the end of a window (codes, scales, exact tail, unused slots) "
            "per number stored. On the front are the caches that no other beats in both KL and stored bits.",
            "Peers are compared at bytes per token: our best cache among those that hold no more than the peer. The worst "
            "ends are the upper end of our interval over the lower end of the peer's.",
        ]
    if "sensitivity" in kinds:
        notes.append(
            "A layer's cost is measured with one layer and side in the format and all others exact. Bars below the axis "
            "are drawn as a line at its foot."
        )
    if "task" in kinds:
        notes.append(
            "Behind ± is the standard error of a task's metric; differences are not paired."
        )
    if kinds & {"task", "needle", "memory", "accuracy"}:
        notes.append(
            "Of each cell the newest row is shown; rows of different protocols share no table."
        )
    if unknown:
        notes.append(f"Rows of these kinds are not shown: {', '.join(unknown)}.")
    return notes
