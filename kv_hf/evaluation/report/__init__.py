"""One report of all rows: an HTML page that needs nothing else, and its plots as PNG and SVG."""

from .frontier import PeerRatio, Point, dominated_by, pareto_front, peer_ratio
from .write import write_report

__all__ = ["PeerRatio", "Point", "dominated_by", "pareto_front", "peer_ratio", "write_report"]
