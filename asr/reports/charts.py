"""Charts as SVG text that are legible on a phone: few ticks, large letters, colors of the page's style sheet.

Colors are the classes `c0` to `c7`, so that charts follow the page's dark mode. All text from users is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

NUM_COLORS = 8
_WIDTH, _HEIGHT = 440.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 80.0, 24.0, 12.0, 46.0


class Point(NamedTuple):
    """A point of a line; `low` to `high` is its confidence interval, if any."""

    x: float
    y: float
    label: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A series of points, joined by a line if `is_joined`."""

    name: str
    points: Sequence[Point]
    is_joined: bool = True


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`.

    Args:
        title: title, with the unit.
        low, high: the ends.
        is_log: whether the axis is logarithmic; `low` must then be above 0.
        format_tick: formats the number at a tick.
    """

    title: str
    low: float
    high: float
    is_log: bool = False
    format_tick: Callable[[float], str] = "{:g}".format

    def place(self, value: float) -> float:
        """The position of a value from 0 to 1; values outside the axis are put at its ends."""
        low, high, value = (
            (math.log(end) for end in (self.low, self.high, max(value, self.low)))
            if self.is_log
            else (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self) -> list[float]:
        """About five round numbers on the axis."""
        if self.is_log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1,)):
                found = [step * 10.0**e for e in exponents for step in steps if self.low <= step * 10.0**e <= self.high]
                if len(found) <= 7:
                    break
            return found
        span = self.high - self.low
        rough = span / 5
        unit = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis_around(
    title: str, values: Iterable[float], is_log: bool = False, format_tick: Callable[[float], str] = "{:g}".format
) -> Axis:
    """An axis that covers all values, with some space at the ends."""
    found = [value for value in values if math.isfinite(value)]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if is_log:
        low = max(low, 1e-6)
        return Axis(title, low / 1.25, max(high, low) * 1.25, True, format_tick)
    room = 0.08 * (high - low) or max(abs(high), 1.0) * 0.1
    return Axis(title, max(0.0, low - room) if low >= 0 else low - room, high + room, False, format_tick)


def line_chart(title: str, x_axis: Axis, y_axis: Axis, lines: Sequence[Line]) -> str:
    """Draws lines with points, intervals as bars through the points, and a legend if there are several lines."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + width * x_axis.place(x), _TOP + height * (1.0 - y_axis.place(y))

    parts = [*_frame(x_axis, y_axis, at)]
    for number, line in enumerate(lines):
        color = f"c{number % NUM_COLORS}"
        places = [at(point.x, point.y) for point in line.points]
        if line.is_joined and len(places) > 1:
            parts.append(f'<polyline class="line {color}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        if len(places) > 60:
            continue
        for point, (x, y) in zip(line.points, places, strict=True):
            if point.low is not None and point.high is not None:
                top, bottom = at(point.x, point.high)[1], at(point.x, point.low)[1]
                parts.append(
                    f'<line class="whisker {color}" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
                )
            hint = f"<title>{escape(point.label)}</title>" if point.label else ""
            parts.append(f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="4">{hint}</circle>')
    return svg(title, _WIDTH, _HEIGHT, parts) + (legend([line.name for line in lines]) if len(lines) > 1 else "")


def _frame(x_axis: Axis, y_axis: Axis, at: Callable[[float, float], tuple[float, float]]) -> Iterable[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in y_axis.ticks():
        _, y = at(x_axis.low, tick)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4.5:.1f}" text-anchor="end">{escape(y_axis.format_tick(tick))}</text>'
    for tick in x_axis.ticks():
        x, _ = at(tick, y_axis.low)
        yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(x_axis.format_tick(tick))}</text>'
    yield f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_axis.title)}</text>'
    middle = (_TOP + bottom) / 2
    yield (f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y_axis.title)}</text>')


def calibration_chart(lines: Sequence[Line]) -> str:
    """Draws shares of correct words against confidences; on the diagonal, both are equal."""
    percent = Axis("confidence", 0.0, 1.0, format_tick="{:.0%}".format)
    right = Axis("right words", 0.0, 1.0, format_tick="{:.0%}".format)
    chart = line_chart("share of right words against confidence", percent, right, lines)
    bottom = _HEIGHT - _BOTTOM
    diagonal = f'<line class="ideal" x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{_TOP}"/>'
    return chart.replace("</title>", "</title>" + diagonal, 1)


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Draws a stacked bar for each name, and a legend of the parts below.

    Args:
        title: text for screen readers.
        bars: name -> part -> length.
        unit: unit of the lengths.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    longest = max((sum(bar.values()) for bar in bars.values()), default=0.0) or 1.0
    row, drawn = 46.0, list[str]()
    for number, (name, bar) in enumerate(bars.items()):
        y, x = row * number, 0.0
        shown = f"{name}: {sum(bar.values()):.3g} {unit}"
        drawn.append(f'<text x="0" y="{y + 15:.1f}">{escape(shown)}</text>')
        for part, length in bar.items():
            wide = _WIDTH * length / longest
            hint = escape(f"{part}: {length:.3g} {unit}, {length / (sum(bar.values()) or 1.0):.0%}")
            color = f"c{parts.index(part) % NUM_COLORS}"
            drawn.append(
                f'<rect class="bar {color}" x="{x:.1f}" y="{y + 21:.1f}" width="{wide:.1f}" height="17">'
                f"<title>{hint}</title></rect>"
            )
            x += wide
    return svg(title, _WIDTH, max(row, row * len(bars)), drawn) + legend(parts)


def svg(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """An SVG drawing that fills the available width."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img"><title>{escape(title)}</title>'
    return head + "".join(parts) + "</svg>"


def legend(names: Sequence[str]) -> str:
    """An HTML list of names with their colors."""
    items = (
        f'<li><span class="key c{number % NUM_COLORS}"></span>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
