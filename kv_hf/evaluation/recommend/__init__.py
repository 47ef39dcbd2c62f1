"""Formats per layer and side that lose least under a byte budget: measured once, then solved."""

from .for_model import recommend
from .search import Recommendation

__all__ = ["Recommendation", "recommend"]
