"""The page: a summary, a chapter per model with its pictures and tables, and how the figures were made."""

from collections.abc import Mapping, Sequence

from .accuracy_tables import OURS, accuracy_table, peer_table, peers, sensitivity_table
from .assets import SCRIPT, STYLE
from .cells import short, table, words
from .headers import conditions
from .levers import Levers, levers_table
from .markup import Markup, join, tag
from .other_tables import memory_table, needle_maps, task_table
from .points import FLOOR, front_marks, kl_marks, left_out, perplexity_marks
from .select import Group, family

FAMILIES = {
    "ours": "kv_hf, one format for all",
    "recipe": "kv_hf, a recipe (a format per layer and side)",
    "peer": "transformers' quantized caches",
    "exact": "exact caches of transformers",
}
HEADINGS = {
    "accuracy": "Distance from the exact cache",
    "sensitivity": "What each layer costs",
    "task": "Tasks",
    "needle": "Needles in long texts",
    "memory": "Memory and speed",
}
Pictures = Mapping[int, Sequence[Markup]]  # id of a group -> its plots


def page(
    groups: Sequence[Group],
    pictures: Pictures,
    unknown: Sequence[str],
    levers: Sequence[tuple[Levers, Markup]] = (),
) -> str:
    """Return the whole HTML page.

    Args:
        unknown: kinds of rows that are not shown.
        levers: models that were measured with several numbers of kv heads, each with its plot.
    """
    models = list(dict.fromkeys(group.model for group in groups))
    links = [tag("li", tag("a", model, href=f"#{_anchor(at)}")) for at, model in enumerate(models)]
    title = "Accuracy against memory of key/value caches"
    body = join(
        tag(
            "header",
            tag("h1", title),
            tag("button", "Dark colours", type="button", id="theme", hidden=True),
            tag("p", f"Newest measurement: {max(group.newest for group in groups)}", class_="note")
            if any(group.newest for group in groups)
            else None,
            tag("nav", tag("ul", *links), aria_label="Models"),
        ),
        tag(
            "main",
            _summary(groups),
            *(_levers(*each) for each in levers),
            *(_chapter(at, model, groups, pictures) for at, model in enumerate(models)),
        ),
        tag("footer", *_notes(groups, unknown)),
        tag("script", Markup(SCRIPT)),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", body), lang="en") + "\n"


def _anchor(at: int) -> str:
    return f"model-{at + 1}"


def _summary(groups: Sequence[Group]) -> Markup | None:
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
        result = f"{passed} of {len(compared)} peers" if compared else None
        met = {"class_": "pass" if passed == len(compared) else "fail"} if compared else {}
        lines.append(
            [
                tag("th", group.model, scope="row"),
                words(group.protocol.get("text")),
                words(tag("strong", result) if result else None, **met),
                words(_listed(front) if front else "none", class_="wrap"),
                words(_listed(behind) if behind else "none", class_="wrap"),
            ]
        )
    if not lines:
        return None
    heads = ["model", "text", "aim met against", "ours on the Pareto front", "ours behind it"]
    return _card("Summary", table("Front and peers, per model", heads, lines))


def _levers(levers: Levers, plot: Markup) -> Markup:
    said = (
        "Perplexity of the same tokens through each cache, by models that were converted to fewer kv heads. Bytes are those "
        "that a cache of a bf16 model holds. On the front are the pairs of model and cache that no other beats in both."
    )
    heading = f"kv heads and bits: {levers.original.model}"
    figure = tag("figure", plot, tabindex="0")
    return _card(
        heading,
        tag("p", said, class_="note"),
        figure,
        levers_table(levers),
        conditions(levers.original),
    )


def _listed(caches: Sequence[str]) -> Markup:
    """Return names of caches with commas between them."""
    return join(*(join(", " if at else "", tag("code", name)) for at, name in enumerate(caches)))


def _chapter(at: int, model: str, groups: Sequence[Group], pictures: Pictures) -> Markup:
    cards = []
    for kind in HEADINGS:
        own = [group for group in groups if group.model == model and group.kind == kind]
        for group in own:
            heading = HEADINGS[kind]
            if len(own) > 1:
                heading += f": {_told_apart(group, own)}"
            elif kind == "needle":
                heading += f": {group.protocol['task']}"
            cards.append(_card(heading, *_content(group, pictures.get(id(group), ()))))
    return join(tag("h2", model, id=_anchor(at)), *cards)


def _told_apart(group: Group, others: Sequence[Group]) -> str:
    """Return in words what this group has that the others do not all have."""
    names = [
        name for name in group.protocol if len({str(o.protocol.get(name)) for o in others}) > 1
    ]
    return ", ".join(f"{name.replace('_', ' ')} {group.protocol[name]}" for name in names)


def _card(heading: str, *content: Markup | None) -> Markup:
    return tag("section", tag("h3", heading), *content, class_="card")


def _content(group: Group, plots: Sequence[Markup]) -> list[Markup | None]:
    figures = [tag("figure", plot, tabindex="0") for plot in plots]
    known = conditions(group)
    if group.kind != "accuracy":
        known = tag("details", tag("summary", "How it was measured"), known)
    if group.kind == "accuracy":
        compared = peers(group)
        return [
            known,
            *figures[:1],
            _missing(group),
            peer_table(group, compared) if compared else None,
            *figures[1:],
            _key(group),
            accuracy_table(group),
        ]
    if group.kind == "sensitivity":
        details = tag("details", tag("summary", "The same as a table"), sensitivity_table(group))
        return [*figures, details, known]
    tables = {"task": task_table, "needle": needle_maps, "memory": memory_table}
    return [tables[group.kind](group), known]


def _missing(group: Group) -> Markup | None:
    """Say which caches a plot does not show, and why."""
    said = []
    for what, field, shown in (
        ("first plot", "stored_bits", kl_marks(group.rows)),
        ("second plot", "perplexity_delta or bytes_per_token", perplexity_marks(group.rows)),
    ):
        names = left_out(group.rows, shown)
        if names:
            said.append(f"Not in the {what} (no {field} was measured): {', '.join(names)}.")
    return tag("p", " ".join(said), class_="note") if said else None


def _key(group: Group) -> Markup:
    present = {family(row["cache"]) for row in group.rows}
    return tag(
        "p",
        *(
            tag("span", tag("span", class_=f"sign {name}"), said)
            for name, said in FAMILIES.items()
            if name in present
        ),
        class_="note key",
    )


def _notes(groups: Sequence[Group], unknown: Sequence[str]) -> list[Markup]:
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
    return [tag("h2", "How the figures were made"), *(tag("p", note) for note in notes)]
