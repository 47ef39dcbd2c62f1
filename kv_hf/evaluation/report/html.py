"""The page as HTML: Jinja2 fills in templates/page.html, and escapes every string that is not Markup."""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...extras import extra

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def _template() -> "Template":
    with extra("eval", "the report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    found = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files(__package__) / "templates"
    for name in ("css", "js"):  # both inside of the page: nothing is loaded from anywhere
        found.globals[name] = Markup((folder / f"report.{name}").read_text("utf-8"))
    return found.get_template("page.html")


def render_page(**content: Any) -> str:
    """Return the page. Raises ImportError naming the extra where Jinja2 is not installed."""
    return _template().render(content) + "\n"
