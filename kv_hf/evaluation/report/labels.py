"""Names beside points so that no two of them overlap, nor cover a point.

Tries places around each point from near to far, takes the cheapest, and repeats until nothing changes. All in pixels.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patheffects import withStroke

from .canvas import COLOURS

Box = tuple[float, float, float, float]  # left, bottom, right, top

# what it costs to cover something: for touching it, and more with the area, in squares of NEAR
TEXT, MARKER, BAR, LINE, OUTSIDE = 100.0, 60.0, 40.0, 12.0, 1000.0
TOUCH = 0.25  # of a square
NEAR = 7.0  # from the centre of a marker to its name, in points
RINGS = (1.0, 1.7, 2.8, 4.2, 6.0, 8.0, 11.0)  # in NEAR
SIDES = 16
PASSES = 6


@dataclass(frozen=True)
class Named:
    """A point with its name.

    Attributes:
        x, y: in data coordinates.
        bar: lower and upper end of its error bar in data coordinates.
    """

    name: str
    x: float
    y: float
    bar: tuple[float, float]
    colour: str


def place(
    figure: Any, axes: Any, points: Sequence[Named], line: Sequence[tuple[float, float]]
) -> None:
    """Write the names of `points` into `axes`; `line` is a curve (in data coordinates) that they had better not cover."""
    figure.canvas.draw()
    figure.set_layout_engine("none")  # text that is added from here on moves nothing
    renderer = figure.canvas.get_renderer()
    point = figure.dpi / 72  # pixels of a point

    def pixels(x: float, y: float) -> tuple[float, float]:
        at = axes.transData.transform((x, y))
        return float(at[0]), float(at[1])

    frame = axes.get_window_extent(renderer)
    inside = (frame.x0 + 2, frame.y0 + 2, frame.x1, frame.y1 - 2)
    centres = [pixels(each.x, each.y) for each in points]
    half = 4.5 * point
    fixed: list[tuple[Box, float]] = [
        ((x - half, y - half, x + half, y + half), MARKER) for x, y in centres
    ]
    for each in points:
        (x, low), (_, high) = pixels(each.x, each.bar[0]), pixels(each.x, each.bar[1])
        fixed.append(((x - 2 * point, low, x + 2 * point, high), BAR))
    corners = [pixels(*corner) for corner in line]
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        fixed.append(((min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1), LINE))
    texts = [
        axes.annotate(
            shortened(each.name),
            (each.x, each.y),
            xytext=(0, 0),
            textcoords="offset pixels",
            fontsize=8,
            color=each.colour,
            ha="center",
            va="center",
            annotation_clip=False,
            zorder=6,
            path_effects=[withStroke(linewidth=2, foreground=COLOURS["surface"])],
        )
        for each in points
    ]
    sizes = []
    for text in texts:
        extent = text.get_window_extent(renderer)
        sizes.append((extent.width + 2 * point, extent.height + 1 * point))
    boxes = _solve(centres, sizes, fixed, inside, NEAR * point)
    for text, box, centre, each in zip(texts, boxes, centres, points, strict=True):
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        text.set_position((middle[0] - centre[0], middle[1] - centre[1]))
        # pixels change with the resolution of a file, points do not
        text.set_position(tuple(value / point for value in text.get_position()))
        text.anncoords = "offset points"
        foot = (min(max(centre[0], box[0]), box[2]), min(max(centre[1], box[1]), box[3]))
        if math.dist(foot, centre) > 1.6 * NEAR * point:
            axes.annotate(
                "",
                (each.x, each.y),
                xytext=((foot[0] - centre[0]) / point, (foot[1] - centre[1]) / point),
                textcoords="offset points",
                arrowprops={
                    "arrowstyle": "-",
                    "color": COLOURS["muted"],
                    "linewidth": 0.6,
                    "shrinkA": 0,
                    "shrinkB": 4,
                },
                annotation_clip=False,
                zorder=2,
            )


def shortened(name: str, most: int = 40) -> str:
    """Return a name of at most `most` letters: long ones lose their middle, for names often differ at the end."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}\u2026{name[-half:]}"


def _solve(
    centres: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    fixed: Sequence[tuple[Box, float]],
    inside: Box,
    near: float,
) -> list[Box]:
    """Return a box per centre. The same input gives the same boxes."""
    boxes: list[Box | None] = [None] * len(centres)
    places = [_places(centre, size, near) for centre, size in zip(centres, sizes, strict=True)]
    for _ in range(PASSES):
        before = list(boxes)
        for index, own in enumerate(places):
            others = [box for other, box in enumerate(boxes) if box is not None and other != index]
            boxes[index] = min(
                own, key=lambda place: place[1] + _covers(place[0], fixed, others, inside, near)
            )[0]
        if boxes == before:
            break
    return [box for box in boxes if box is not None]


def _places(
    centre: tuple[float, float], size: tuple[float, float], near: float
) -> list[tuple[Box, float]]:
    """Return boxes around a point with what their distance costs, the right side first."""
    found = []
    for ring in RINGS:
        for side in range(SIDES):
            angle = 2 * math.pi * side / SIDES
            way = (math.cos(angle), math.sin(angle))
            # so far that the box's edge, not its middle, is `near` away
            x = centre[0] + way[0] * (ring * near + size[0] / 2)
            y = centre[1] + way[1] * (ring * near + size[1] / 2)
            box = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            found.append((box, 12 * (ring - 1) + 0.5 * abs(way[1])))
    return found


def _covers(
    box: Box, fixed: Sequence[tuple[Box, float]], others: Sequence[Box], inside: Box, near: float
) -> float:
    unit = near * near
    cost = 0.0
    for other, weight in [*fixed, *((other, TEXT) for other in others)]:
        shared = _shared(box, other)
        if shared:
            cost += weight * (TOUCH + shared / unit)
    area = (box[2] - box[0]) * (box[3] - box[1])
    return cost + OUTSIDE * (area - _shared(box, inside)) / unit


def _shared(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
