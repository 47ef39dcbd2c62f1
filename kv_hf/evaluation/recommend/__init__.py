"""Formats per layer and side that lose least under a byte budget: measured once, solved, and judged on other text."""

from .check import check_recipe
from .for_model import recommend
from .recommendation import Recommendation

__all__ = ["Recommendation", "check_recipe", "recommend"]
