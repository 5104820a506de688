"""The cost of partitions as a picture: a line for each cost against the number of partitions, in powers of ten.

A cost that is proportional to the partitions follows the dotted lines; a flat line costs nothing per partition.

The picture is plain SVG with its own colors for light and dark pages.
"""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

from bench.scale_table import Results, number

_WIDTH, _HEIGHT = 900, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 330, 56, 56
_STYLE = """
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 } .quiet { fill: #59636e } .end { text-anchor: end }
  .middle { text-anchor: middle } .grid { stroke: #d1d9e0 } .slope { stroke: #59636e; stroke-dasharray: 3 5 }
  path { fill: none; stroke-width: 2 }
  .c0 { stroke: #0969da } .c1 { stroke: #1a7f64 } .c2 { stroke: #bf6a02 } .c3 { stroke: #8250df }
  .c4 { stroke: #cf222e } .c5 { stroke: #57606a } circle { stroke-width: 2; fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .quiet { fill: #9198a1 } .grid { stroke: #3d444d } .slope { stroke: #9198a1 }
    .c0 { stroke: #4493f8 } .c1 { stroke: #3fb88f } .c2 { stroke: #e3903c } .c3 { stroke: #ab7df8 }
    .c4 { stroke: #f85149 } .c5 { stroke: #9198a1 } circle { fill: #0d1117 }
  }
"""


class _Curve(NamedTuple):
    name: str
    label: str


_CURVES = (
    _Curve("created_s", "created and in sync, s"),
    _Curve("one_each_s", "one record to each, s"),
    _Curve("restart_s", "start after SIGKILL to full ISRs, s"),
    _Curve("stop_s", "controlled stop, s"),
    _Curve("idle_percent", "idle processor of a broker, % of a core"),
    _Curve("spread_ratio", "a batch over all, against 6 partitions, x"),
)


def svg(results: Results) -> str:
    """Return the picture of all figures at each number of partitions."""
    counts = sorted(results)
    values = [results[count][curve.name] for curve in _CURVES for count in counts if results[count].get(curve.name)]
    if not values:
        return ""
    frame = _Frame(_powers(min(counts), max(counts)), _powers(min(values), max(values)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="What partitions cost"><style>{_STYLE}</style>',
        '<text class="title" x="10" y="22">What partitions cost three brokers, replication factor 3</text>',
        *frame.grid(),
    ]
    ends = _apart([frame.y(_last(results, curve)) for curve in _CURVES])
    for index, curve in enumerate(_CURVES):
        points = [(count, results[count][curve.name]) for count in counts if results[count].get(curve.name)]
        if points:
            parts += frame.curve(index, curve.label, points, label_y=ends[index])
    parts.append(f'<text class="quiet" x="10" y="{_HEIGHT - 10}">dotted: grows as fast as the partitions</text></svg>')
    return "\n".join(parts) + "\n"


class _Frame:
    """The positions of values in the picture."""

    def __init__(self, xs: tuple[int, int], ys: tuple[int, int]) -> None:
        self._xs, self._ys = xs, ys

    def x(self, value: float) -> float:
        low, high = self._xs
        return _LEFT + (math.log10(value) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._ys
        return _HEIGHT - _BOTTOM - (math.log10(value) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
        parts = []
        for power in range(self._xs[0], self._xs[1] + 1):
            x = self.x(10.0**power)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
            parts.append(f'<text class="quiet middle" x="{x:.1f}" y="{bottom + 18}">{10**power:,}</text>')
        for power in range(self._ys[0], self._ys[1] + 1):
            y = self.y(10.0**power)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="quiet end" x="{left - 8}" y="{y + 4:.1f}">{10.0**power:g}</text>')
        rise = min(self._xs[1] - self._xs[0], self._ys[1] - self._ys[0])
        parts += [
            f'<line class="slope" x1="{self.x(10.0 ** self._xs[0]):.1f}" y1="{self.y(10.0**start):.1f}" '
            f'x2="{self.x(10.0 ** (self._xs[0] + rise)):.1f}" y2="{self.y(10.0 ** (start + rise)):.1f}"/>'
            for start in range(self._ys[0], self._ys[1] - rise + 1)
        ]
        parts.append(f'<text class="quiet middle" x="{(left + right) / 2}" y="{bottom + 36}">partitions</text>')
        return parts

    def curve(self, index: int, label: str, points: list[tuple[int, float]], *, label_y: float) -> list[str]:
        line = " ".join(
            f"{'L' if place else 'M'}{self.x(at):.1f} {self.y(value):.1f}" for place, (at, value) in enumerate(points)
        )
        dots = [
            f'<circle class="c{index}" cx="{self.x(at):.1f}" cy="{self.y(value):.1f}" r="3.5"/>' for at, value in points
        ]
        last = points[-1]
        text = f'<text x="{_WIDTH - _RIGHT + 14}" y="{label_y + 4:.1f}">{number(last[1])}: {escape(label)}</text>'
        lead = (
            f'<line class="c{index}" x1="{self.x(last[0]) + 4:.1f}" y1="{self.y(last[1]):.1f}" '
            f'x2="{_WIDTH - _RIGHT + 10}" y2="{label_y:.1f}"/>'
        )
        return [f'<path class="c{index}" d="{line}"/>', *dots, lead, text]


def _last(results: Results, curve: _Curve) -> float:
    """Return the figure at the largest number of partitions; 1.0 if there is none."""
    return next((results[count][curve.name] for count in sorted(results)[::-1] if results[count].get(curve.name)), 1.0)


def _apart(places: list[float], *, by: float = 17.0) -> list[float]:
    """Return the positions, moved apart so that their labels do not overlap."""
    moved = [0.0] * len(places)
    below = -math.inf
    for index in sorted(range(len(places)), key=places.__getitem__):
        moved[index] = below = max(places[index], below + by)
    return moved


def _powers(low: float, high: float) -> tuple[int, int]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return first, max(last, first + 1)
