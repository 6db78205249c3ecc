"""The picture of ``shards.py``: how far weights are apart, by steps; both axes by powers of ten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 710, 326
LEFT, RIGHT, TOP, BOTTOM = 70, 480, 40, 240  # of what is drawn on
FLOOR = 292  # where a distance of zero is: below every power of ten
COLOURS = ("#8fa3e8", "#e0a030", "#c06090", "#909090")
OURS = "#5cb8a7"

STYLE = """<style>
.pl-t{fill:var(--md-default-fg-color,#777);font:13px system-ui,"Liberation Sans",sans-serif}
.pl-s{fill:var(--md-default-fg-color--light,#888);font:12px system-ui,"Liberation Sans",sans-serif}
.pl-f{stroke:var(--md-default-fg-color--lighter,#999);stroke-width:1;fill:none}
.c{text-anchor:middle}.e{text-anchor:end}
</style>"""


@dataclass(frozen=True)
class Curve:
    """Distances after some numbers of steps."""

    title: str
    steps: list[int]
    distances: list[float]

    @property
    def is_zero(self) -> bool:
        return not any(self.distances)


@dataclass(frozen=True)
class Scale:
    """Where steps and distances are in the picture."""

    last: int  # step
    low: int  # powers of ten
    high: int

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log10(step) / max(math.log10(self.last), 1)

    def y(self, distance: float) -> float:
        if distance <= 0:
            return FLOOR
        share = (math.log10(distance) - self.low) / (self.high - self.low)
        return BOTTOM - (BOTTOM - TOP) * share


def draw(curves: Sequence[Curve]) -> str:
    """The picture, as SVG that follows the light and dark colours of a page around it."""
    apart = [curve for curve in curves if not curve.is_zero]
    powers = [math.floor(math.log10(d)) for curve in apart for d in curve.distances if d > 0]
    powers = powers or [-8]
    scale = Scale(max(curves[0].steps), min(powers), max(powers) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<title>Drift</title>",
        STYLE,
        *_axes(scale),
        *(_curve(curve, colour, scale) for curve, colour in zip(apart, COLOURS, strict=False)),
        *_legend(apart),
        *_zeros([curve for curve in curves if curve.is_zero]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes(scale: Scale) -> list[str]:
    lines = [_text("s", LEFT - 50, TOP - 18, "distance of the weights from those on one rank")]
    for power in range(scale.low, scale.high + 1):
        y = scale.y(10.0**power)
        lines.append(f'<path class="pl-f" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        lines.append(_text("s e", LEFT - 8, y + 4, f"1e{power}"))
    step = 1
    while step <= scale.last:
        lines.append(_text("s c", scale.x(step), BOTTOM + 20, str(step)))
        step *= 10
    lines.append(_text("s", RIGHT + 12, BOTTOM + 20, "steps"))
    return lines


def _curve(curve: Curve, colour: str, scale: Scale) -> str:
    points = zip(curve.steps, curve.distances, strict=True)
    path = " ".join(f"{scale.x(step):.1f},{scale.y(distance):.1f}" for step, distance in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"'
    return f'<polyline points="{path}" {style}/>'


def _legend(curves: Sequence[Curve]) -> list[str]:
    lines = []
    for place, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        y = TOP + 20 + 24 * place
        lines.append(f'<rect x="{RIGHT + 20}" y="{y - 8}" width="18" height="6" fill="{colour}"/>')
        lines.append(_text("t", RIGHT + 46, y, curve.title))
    return lines


def _zeros(curves: Sequence[Curve]) -> list[str]:
    if not curves:
        return []
    line = f'<path d="M{LEFT} {FLOOR}H{RIGHT}" stroke="{OURS}" stroke-width="3" fill="none"/>'
    words = f"{' and '.join(curve.title for curve in curves)}: the same bits"
    return [line, _text("s e", LEFT - 8, FLOOR + 4, "0"), _text("t", LEFT, FLOOR + 24, words)]


def _text(kind: str, x: float, y: float, words: str) -> str:
    shape, *place = kind.split()
    names = " ".join([f"pl-{shape}", *place])
    return f'<text class="{names}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
