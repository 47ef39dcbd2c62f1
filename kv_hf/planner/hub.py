"""Get a model's config.json from the Hugging Face hub."""

from pathlib import Path

from transformers.utils import cached_file

from ..errors import PlanError
from ..hub import CONFIG, looks_like_path, why_not_model
from ..printable import in_a_line
from .presets import near_presets


def fetch_config(model: str) -> Path:
    """Return the path of a hub model's config.json, fetched. Raises PlanError where there is none."""
    hint = near_presets(model)
    if looks_like_path(model):
        raise PlanError(f"there is no file or folder {model!r}{hint}")
    reason, path = why_not_model(model), None
    if reason is None:
        try:
            path = cached_file(model, CONFIG)
        except (OSError, ValueError) as error:
            reason = in_a_line(error).rstrip(".")
    if reason is not None:
        raise PlanError(
            f"{model!r} is no folder, file or preset, and its config could not be had from the hub ({reason}){hint}"
        )
    if path is None:
        raise PlanError(f"the hub's {model!r} has no {CONFIG}{hint}")
    return Path(path)
