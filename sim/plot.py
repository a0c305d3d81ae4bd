"""Figures as SVG, written by hand: no library, the same bytes every time, readable without colour."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from sim.report import Figure

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 20, 44, 56
LEGEND_PX = 17
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
"""Colours of Okabe and Ito, which most people can distinguish."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
LARGEST = 1e15
"""Largest value drawn; values beyond it, and on a logarithmic axis below its inverse, are left out."""
DECADES_MAX = 12
"""Most decades of a logarithmic axis; smaller values lie on its lower end."""
POINTS_MAX = 1500
"""Most points of one line; more are thinned out, since the pixels are too few to show them."""


def svg(figures: Sequence[Figure]) -> str:
    """One SVG with the figures one below the other."""
    heights = [HEIGHT + LEGEND_PX * ((len(figure.series) + 2) // 3) for figure in figures]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{sum(heights)}" '
        f'viewBox="0 0 {WIDTH} {sum(heights)}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{sum(heights)}" fill="#ffffff"/>',
    ]
    top = 0
    for figure, height in zip(figures, heights, strict=True):
        parts.append(f'<g transform="translate(0 {top})">{_figure(figure)}</g>')
        top += height
    return "\n".join([*parts, "</svg>"]) + "\n"


class Axis:
    """One axis: from data to pixels, linear or logarithmic, and where its marks are."""

    def __init__(self, values: Sequence[float], begin_px: float, end_px: float, log: bool, zero: bool) -> None:
        usable = [value for value in values if abs(value) <= LARGEST and (not log or value >= 1 / LARGEST)] or [1.0]
        low, high = min(usable), max(usable)
        if log:
            low, high = 10 ** math.floor(math.log10(low) + 1e-9), 10 ** math.ceil(math.log10(high) - 1e-9)
            high = high if high > low else low * 10
            low = max(low, high / 10**DECADES_MAX)
            self.marks = [10.0**at for at in range(round(math.log10(low)), round(math.log10(high)) + 1)]
        else:
            low = 0.0 if zero and low > 0 and low < 0.7 * high else low
            size = max(abs(low), abs(high))
            span = high - low if high - low > 1e-9 * size else size
            step = _step(span if span > 1e-12 else 1.0)  # what is that small is nothing on paper
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
            high = high if high > low else low + step
            self.marks = [low + step * at for at in range(round((high - low) / step) + 1)]
        self.low, self.high, self.log = low, high, log
        self.begin_px, self.end_px = begin_px, end_px

    def __call__(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin_px + (self.end_px - self.begin_px) * share


def _step(span: float) -> float:
    rough = span / 5
    ten = 10.0 ** math.floor(math.log10(rough))
    return next(ten * nice for nice in (1, 2, 2.5, 5, 10) if ten * nice >= rough * 0.999)


def mark(value: float) -> str:
    """The label of a value: `10k`, `2.5M`, `0.25`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.6g}" if abs(value) > 1e-9 else "0"


def _figure(figure: Figure) -> str:
    x = Axis([v for line in figure.series for v in line.x], LEFT, WIDTH - RIGHT, figure.log_x, zero=True)
    y = Axis([v for line in figure.series for v in line.y], HEIGHT - BOTTOM, TOP, figure.log_y, zero=True)
    parts = [
        f'<title>{escape(figure.title)}</title><text x="{LEFT}" y="22" font-size="15">{escape(figure.title)}</text>'
    ]
    for value in x.marks:
        at = x(value)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{mark(value)}</text>')
    for value in y.marks:
        at = y(value)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{mark(value)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#333333"/>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - BOTTOM + 36}" text-anchor="middle">'
        f"{escape(figure.x_label)}</text>"
        f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(figure.y_label)}</text>'
    )
    for number, line in enumerate(figure.series):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        look = f'fill="none" stroke="{colour}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
        points = _thinned(
            [(a, b) for a, b in zip(line.x, line.y, strict=True) if abs(a) <= LARGEST and abs(b) <= LARGEST]
        )
        parts.append(f'<path d="{_path([(x(a), y(b)) for a, b in points], figure.steps)}" {look}/>')
        left, below = LEFT + 225 * (number % 3), HEIGHT + LEGEND_PX * (number // 3)
        parts.append(f'<path d="M{left} {below - 4}h24" {look}/>')
        parts.append(f'<text x="{left + 30}" y="{below}">{escape(line.label)}</text>')
    return "".join(parts)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // POINTS_MAX)
    return points if every <= 1 else [*points[::every], points[-1]]


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    if not points:
        return ""
    text = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for across, up in points[1:]:
        text.append(f"H{across:.1f}V{up:.1f}" if steps else f"L{across:.1f} {up:.1f}")
    return "".join(text)
