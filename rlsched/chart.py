"""A chart of learning curves as SVG: written by hand, so that it needs no library."""

from collections.abc import Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 640, 360
LEFT, TOP, RIGHT, BOTTOM = 52, 40, 170, 44
"""Margins in pixels; at the right stand the names."""


class Line(Struct, frozen=True):
    """One curve: (x, y) with y in 0 … 1, and how it is drawn."""

    name: str
    """Lines of one name share one entry at the right."""
    color: str
    points: Sequence[tuple[float, float]]


def chart(title: str, x: str, lines: Sequence[Line]) -> str:
    """The picture of ``lines`` (each of two points at least) over an axis called ``x``."""
    most = max(px for line in lines for px, _ in line.points) or 1
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(px: float, py: float) -> str:
        return f"{LEFT + px / most * (right - LEFT):.1f},{bottom - py * (bottom - TOP):.1f}"

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' font-family="sans-serif" font-size="12" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(6):
        y = bottom - tick / 5 * (bottom - TOP)
        drawn.append(f'<path d="M{LEFT},{y:.1f}H{right}" stroke="#ddd"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick / 5:.1f}</text>')
    for tick in range(5):
        px = LEFT + tick / 4 * (right - LEFT)
        drawn.append(f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="middle">{most * tick / 4:g}</text>')
    drawn.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    for line in lines:
        path = " ".join(at(*point) for point in line.points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="1.8"/>')
    ends: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        ends.setdefault((line.name, line.color), []).append(line.points[-1][1])
    lowest = float("inf")
    for (name, color), last in sorted(ends.items(), key=lambda entry: sum(entry[1]) / len(entry[1])):
        # Beside the mean end of its curves, but never over the name below.
        lowest = min(bottom - sum(last) / len(last) * (bottom - TOP) + 4, lowest - 15)
        drawn.append(f'<text x="{right + 8}" y="{lowest:.1f}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*drawn, "</svg>", ""])
