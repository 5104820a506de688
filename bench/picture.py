"""The table as a picture: the length of each line's bar is the factor over Kafka, on a logarithmic scale.

The picture is plain SVG with its own colors for light and dark pages. A tick marks the goal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.measure import Line

_WIDTH, _LABELS, _FIGURES = 900, 370, 70
_ROW, _BAR, _TOP, _BOTTOM = 26, 14, 58, 34
#: The smallest and the largest factor in the picture.
_LEAST, _MOST = 0.25, 32.0
_STYLE = """
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 } .quiet { fill: #59636e } .end { text-anchor: end }
  .middle { text-anchor: middle } .grid { stroke: #d1d9e0 } .even { stroke: #59636e; stroke-width: 1.5 }
  .good { fill: #1a7f64 } .short { fill: #bf6a02 } .goal { stroke: #1f2328; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .quiet { fill: #9198a1 } .grid { stroke: #3d444d } .even { stroke: #9198a1 }
    .good { fill: #3fb88f } .short { fill: #e3903c } .goal { stroke: #f0f6fc }
  }
"""


def svg(lines: Sequence[Line]) -> str:
    """Return the picture of the lines with a ratio and a goal. Lines without them are only in the table."""
    shown = [line for line in lines if line.ratio and line.goal is not None]
    height = _TOP + _ROW * len(shown) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="sparklog beside Apache Kafka"><style>{_STYLE}</style>',
        '<text class="title" x="10" y="22">sparklog beside Apache Kafka: times better, same machine, in turns</text>',
    ]
    for power in range(round(math.log2(_LEAST)), round(math.log2(_MOST)) + 1):
        parts += _grid(2.0**power, height)
    for number, line in enumerate(shown):
        parts += _bar(line, _TOP + _ROW * number)
    legend = "green: goal reached · orange: not yet · tick: the goal"
    parts.append(f'<text class="quiet" x="10" y="{height - 10}">{legend}</text></svg>')
    return "\n".join(parts) + "\n"


def better(ratio: float, *, lower: bool) -> float:
    """Return the factor by which sparklog is better. ``lower`` means that a smaller figure is better."""
    return 1 / ratio if lower else ratio


def _grid(at: float, height: int) -> list[str]:
    x = _x(at)
    kind = "even" if at == 1 else "grid"
    return [
        f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - _BOTTOM}"/>',
        f'<text class="quiet middle" x="{x:.1f}" y="{_TOP - 14}">{at:g}x</text>',
    ]


def _bar(line: Line, y: int) -> list[str]:
    assert line.ratio is not None and line.goal is not None, "only such lines are drawn"
    value = better(line.ratio, lower=line.lower)
    left, right = sorted((_x(1), _x(value)))
    kind = "good" if line.met else "short"
    bar = y + (_ROW - _BAR) // 2
    middle = y + _ROW // 2 + 4
    parts = [
        f'<text class="end" x="{_LABELS - 8}" y="{middle}">{escape(line.title)}</text>',
        f'<rect class="{kind}" x="{left:.1f}" y="{bar}" width="{max(1.0, right - left):.1f}" height="{_BAR}" rx="2"/>',
        f'<text class="end" x="{_WIDTH - 10}" y="{middle}">{value:.1f}x</text>',
    ]
    x = _x(better(line.goal, lower=line.lower))
    parts.append(f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{bar - 3}" y2="{bar + _BAR + 3}"/>')
    return parts


def _x(value: float) -> float:
    """Return the x coordinate of a factor."""
    share = math.log(min(max(value, _LEAST), _MOST) / _LEAST) / math.log(_MOST / _LEAST)
    return _LABELS + share * (_WIDTH - _LABELS - _FIGURES)
