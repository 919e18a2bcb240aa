"""Small plots as SVG text for a self-contained report. Text is escaped; sizes are pixels of the view box."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from html import escape

INK, MUTED, GRID, ACCENT, REJECT = "#1c1e21", "#6b7280", "#e5e7eb", "#0b6e99", "#b0b7c0"


@dataclasses.dataclass(frozen=True)
class Point:
    """A capability in the coverage/gap plot, with its intervals."""

    name: str
    coverage: float
    gap: float
    coverage_interval: tuple[float, float]
    gap_interval: tuple[float, float]
    selected: bool


def text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 11, fill: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {place}>{escape(content)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, dash: str = "", width: float = 1) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{stroke}" stroke-width="{width}"{dashed}/>'


def svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def coverage_gap(points: Sequence[Point], rho: float, delta: float) -> str:
    """Coverage against gap with 95 % intervals; what lies above and right of both dashed lines passes on average."""
    left, top, width, height = 52.0, 26.0, 600.0, 340.0
    x_max = math.ceil(max([0.2, float(rho) * 1.5, *(p.coverage_interval[1] for p in points)]) * 10) / 10
    y_min = math.floor(min([0.0, *(p.gap_interval[0] for p in points)]) * 5) / 5

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / x_max * width, top + height - (y - y_min) / (1 - y_min) * height

    parts = []
    for n in range(round(x_max * 10) + 1):
        px, _ = at(n / 10, y_min)
        parts.append(line(px, top, px, top + height, GRID))
        parts.append(text(px, top + height + 16, f"{n / 10:.1f}", anchor="middle", fill=MUTED))
    for n in range(round((1 - y_min) * 5) + 1):
        _, py = at(0, y_min + n / 5)
        parts.append(line(left, py, left + width, py, GRID))
        parts.append(text(left - 6, py + 4, f"{y_min + n / 5:.1f}", anchor="end", fill=MUTED))
    px, _ = at(rho, 0)
    _, py = at(0, delta)
    parts += [line(px, top, px, top + height, INK, dash="4 3"), line(left, py, left + width, py, INK, dash="4 3")]
    parts.append(text(px + 4, top + height - 6, f"rho = {rho:g}"))
    parts.append(text(left + width - 4, py - 5, f"delta = {delta:g}", anchor="end"))
    for n, p in enumerate(points, 1):
        parts += _point(n, p, at)
        fill = INK if p.selected else MUTED
        parts.append(text(left + width + 24, top + 12 + 18 * (n - 1), f"{n}  {p.name}", fill=fill))
    parts.append(text(left + width / 2, top + height + 34, "Cov: share of the failures", anchor="middle"))
    parts.append(text(left, top - 10, "Delta: error rate on failed minus on passed"))
    legend = 18.0 * len(points) - height
    return svg(left + width + 330, top + height + 44 + max(0.0, legend), "coverage and gap", parts)


def _point(n: int, p: Point, at: Callable[[float, float], tuple[float, float]]) -> list[str]:
    colour = ACCENT if p.selected else REJECT
    (x, y), (x0, _), (x1, _) = (at(v, p.gap) for v in (p.coverage, *p.coverage_interval))
    (_, y0), (_, y1) = (at(p.coverage, v) for v in p.gap_interval)
    bars = [line(x0, y, x1, y, colour, width=1.5), line(x, y0, x, y1, colour, width=1.5)]
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{colour}"><title>{escape(p.name)}</title></circle>'
    return [*bars, dot, text(x, y + 3.5, str(n), anchor="middle", size=10, fill="#ffffff")]


def bars(rows: Sequence[tuple[str, float | None, bool]], *, mark: float | None = None, label: str) -> str:
    """Horizontal bars in [0, 1]; a None has no bar. ``mark`` draws a dashed line."""
    left, width, step = 270.0, 420.0, 22.0
    parts = []
    for n, (name, value, strong) in enumerate(rows):
        y = 8 + n * step
        parts.append(text(left - 8, y + 12, name, anchor="end"))
        if value is None:
            parts.append(text(left + 4, y + 12, "undefined", fill=MUTED))
            continue
        size = max(0.0, min(1.0, value)) * width
        fill = ACCENT if strong else REJECT
        parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="{size:.1f}" height="15" fill="{fill}"/>')
        parts.append(text(left + size + 5, y + 12, f"{value:.3f}", fill=MUTED))
    height = 14 + len(rows) * step
    if mark is not None:
        parts.append(line(left + mark * width, 2, left + mark * width, height - 4, INK, dash="4 3"))
    return svg(left + width + 60, height, label, parts)


def shade(value: float) -> str:
    """White to the accent colour for 0 to 1."""
    low, high = (255, 255, 255), (11, 78, 110)
    mixed = [round(a + (b - a) * max(0.0, min(1.0, value))) for a, b in zip(low, high, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def heat_map(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], label: str) -> str:
    """A cell for each row and column, 0 white to 1 dark; the cell's tooltip names it."""
    left, cell_height = 270.0, 18.0
    cell = max(2.0, min(16.0, 900.0 / max(1, len(columns))))
    parts = []
    for r, name in enumerate(rows):
        y = 4 + r * cell_height
        parts.append(text(left - 8, y + 13, name, anchor="end"))
        for c, column in enumerate(columns):
            value = values[r][c]
            parts.append(
                f'<rect x="{left + c * cell:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell_height - 2:.1f}" '
                f'fill="{shade(value)}"><title>{escape(f"{name} / {column}: {value:.2f}")}</title></rect>'
            )
    width, height = len(columns) * cell, len(rows) * cell_height
    parts.append(f'<rect x="{left}" y="3" width="{width:.1f}" height="{height:.1f}" fill="none" stroke="{GRID}"/>')
    return svg(left + width + 10, height + 10, label, parts)
