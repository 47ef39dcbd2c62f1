"""The common parts of all plots: colours, signs, and the way of a figure to PNG, SVG, or SVG inside of a page.

The only module of the report that needs matplotlib at import.
"""

import io
import re
import textwrap
from typing import Any

from ...extras import extra

with extra("eval", "the report"):
    import matplotlib
    from markupsafe import Markup, escape
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# a colour per role; inside of a page each becomes var(--role), so that it follows light and dark
COLOURS = {
    "surface": "#ffffff",
    "ink": "#1f2329",
    "muted": "#59636e",
    "grid": "#e4e8ec",
    "front": "#8a949e",
    # of Okabe and Ito's palette, told apart with every colour vision
    "ours": "#0072b2",
    "peer": "#d55e00",
    "recipe": "#009e73",
    "exact": "#4d5661",
    "keys": "#0072b3",
    "values": "#e69f00",
}
# start of a cache's name in a family -> sign, its size in points, and what the legend calls it
LOOKS = {
    ("ours", ""): ("o", 6.5, "kv_hf, one format"),
    ("recipe", ""): ("D", 6, "kv_hf, recipe"),
    ("peer", "quanto"): ("s", 6, "quanto"),
    ("peer", "hqq"): ("^", 7, "hqq"),
    ("peer", "kivi"): ("v", 7, "KIVI"),
    ("peer", "turboquant"): ("X", 7, "TurboQuant"),
    ("peer", "quantized_fp8"): ("P", 7.5, "fp8 of transformers"),
    ("peer", ""): ("p", 7.5, "other"),
    ("exact", ""): ("*", 14, "exact"),
}
SETTINGS: Any = {
    "font.size": 9,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.edgecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "hatch.color": COLOURS["surface"],
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a "$" in a name is a dollar
    "svg.fonttype": "path",  # the same picture where the font is missing
    "svg.hashsalt": "kv_hf",  # the same bytes each time
}
DPI = 160


def look(family: str, cache: str) -> tuple[str, float, str]:
    """Return the sign of a cache, its size in points, and what the legend calls it."""
    own = [start for known, start in LOOKS if known == family and cache.startswith(start)]
    return LOOKS[family, max(own, key=len)]


def tick(value: float) -> str:
    """Return the text of a tick: 0.001, 1e-5."""
    text = f"{value:g}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def settings() -> Any:
    """Return a context in which figures look alike."""
    return matplotlib.rc_context(SETTINGS)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display, and can measure text
    return figure


def plain(axes: Any) -> None:
    """Take away what is no data: two spines, minor ticks; leave a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.minorticks_off()
    axes.grid(True, color=COLOURS["grid"], linewidth=0.7)
    axes.set_axisbelow(True)


def headed(axes: Any, title: str, below: str) -> None:
    """Put a title and a line that says how it was measured at the upper left of the axes."""
    axes.set_title(
        textwrap.shorten(title, 72), loc="left", fontsize=10.5, fontweight="bold", pad=36
    )
    axes.annotate(
        textwrap.shorten(below, 100),
        (0, 1),
        xytext=(0, 25),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=COLOURS["muted"],
    )


def render(figure: Figure, form: str) -> bytes:
    """Return the figure as a file of format `form`, "png" or "svg"; the same rows give the same bytes."""
    out = io.BytesIO()
    nothing = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, dpi=DPI, metadata=nothing, facecolor=COLOURS["surface"])
    return out.getvalue()


def inline(svg: bytes, name: str, says: str) -> Markup:
    """Return an SVG file as an element of a page, with the page's colours.

    Args:
        name: prefix of its ids, of which a page may have each only once.
        says: what a reader who does not see the picture is told.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for role, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{role})")
    opening = re.match(r"<svg[^>]*>", text)
    assert opening is not None
    box = re.search(r'viewBox="[^"]*"', opening.group())
    assert box is not None
    start = f'<svg {box.group()} role="img" aria-label="{escape(says)}">'
    # of SVG in HTML, namespaces are known
    return Markup(start + text[opening.end() :].replace("xlink:href", "href").strip())
