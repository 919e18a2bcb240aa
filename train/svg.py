"""Small charts as inline SVG: no script, no font, no network; they print and read offline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

COLOURS = ("#2a6fbb", "#d9742b", "#3a9a5b", "#b8405e", "#7a5fb5", "#8a7434", "#3b9fae", "#777777")


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    span = max(high - low, 1e-9)
    raw = span / wanted
    scale = 10.0 ** int(f"{raw:e}".split("e")[1])
    step = next(s * scale for s in (1, 2, 5, 10) if s * scale >= raw * 0.999)
    first = int(low / step) - (low < 0)
    ticks = [round(i * step, 10) for i in range(first, first + wanted * 4)]
    return [t for t in ticks if low - 1e-9 <= t <= high + 1e-9]


IntervalRow = tuple[str, Sequence[tuple[str, Mapping[str, float] | None]]]


def interval_chart(rows: Sequence[IntervalRow], title: str, low: float = 0.0, high: float = 1.0) -> str:
    """Dots with intervals: one row per label, one colour per series.

    Args:
        rows: (label, [(series, {"value", "low", "high"} or None)]).
    """
    left, width, top, pitch = 210.0, 440.0, 26.0, 13.0
    series = list(dict.fromkeys(name for _, points in rows for name, _ in points))
    row_height = pitch * max(1, len(series)) + 10
    height = top + row_height * len(rows) + 40

    def x(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * width

    parts = [_line(x(t), top, x(t), height - 34, 'class="grid"') for t in nice_ticks(low, high)]
    parts += [_text(x(t), height - 20, f"{t:g}", "middle") for t in nice_ticks(low, high)]
    if low < 0 < high:
        parts.append(_line(x(0), top, x(0), height - 34, 'class="axis"'))
    for i, (label, points) in enumerate(rows):
        middle = top + row_height * (i + 0.5)
        parts.append(_text(left - 12, middle + 4, label, "end"))
        for name, point in points:
            if point is None:
                continue
            k = series.index(name)
            y = middle + (k - (len(series) - 1) / 2) * pitch
            colour = COLOURS[k % len(COLOURS)]
            parts.append(
                _line(x(point["low"]), y, x(point["high"]), y, f'stroke="{colour}" stroke-width="3" opacity=".45"')
            )
            tip = f"{label}, {name}: {point['value']:.3f} [{point['low']:.3f}, {point['high']:.3f}]"
            parts.append(
                f'<circle cx="{x(point["value"]):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
            parts.append(_text(left + width + 10, y + 4, f"{point['value']:.3f}", "start", f'style="fill:{colour}"'))
    parts += _legend(series, left, 12)
    return _svg(left + width + 70, height, parts, title)


def _legend(names: Sequence[str], x: float, y: float) -> list[str]:
    parts = []
    for k, name in enumerate(names):
        parts.append(f'<circle cx="{x + 5:.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[k % len(COLOURS)]}"/>')
        parts.append(_text(x + 14, y + 4, name))
        x += _legend_width([name])
    return parts


def _legend_width(names: Iterable[str]) -> float:
    return sum(30 + 7.2 * len(name) for name in names)


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]], title: str, y_label: str, y_max: float = 1.0,
    x_label: str = "iteration",
) -> str:  # fmt: skip
    """Lines over an axis of iterations, or of ``x_label``, from zero to ``y_max``.

    Args:
        series: name -> [(x, y)], in order of x.
    """
    left, width, top, height = 56.0, 560.0, 30.0, 220.0
    xs = [x for points in series.values() for x, _ in points]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    span = max(high - low, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - low) / span * width, top + height * (1 - min(max(y, 0.0), y_max) / y_max)

    parts = []
    for tick in nice_ticks(0.0, y_max):
        _, y = place(low, tick)
        parts += [_line(left, y, left + width, y, 'class="grid"'), _text(left - 8, y + 4, f"{tick:g}", "end")]
    for tick in nice_ticks(low, high, 8):
        parts.append(_text(place(tick, 0)[0], top + height + 18, f"{tick:g}", "middle"))
    parts.append(_text(left + width / 2, top + height + 36, x_label, "middle"))
    parts.append(_text(left, top - 12, y_label))
    for k, (name, points) in enumerate(series.items()):
        colour = COLOURS[k % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            cx, cy = place(x, y)
            tip = escape(f"{name}, {x_label} {x:.10g}: {y:.3f}")
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="2.6" fill="{colour}"><title>{tip}</title></circle>')
    start = left + 24 + 6.4 * len(y_label)
    parts += _legend(list(series), start, top - 16)
    return _svg(max(left + width + 20, start + _legend_width(series)), top + height + 46, parts, title)


def heat_map(rows: Sequence[Sequence[float]], columns: Sequence[str], labels: Sequence[str], title: str) -> str:
    """Shares in [0, 1] as shades; row = layer, column = slot."""
    left, cell_height, top = 60.0, 15.0, 34.0
    cell_width = max(110.0, 12 + 7.2 * max(map(len, columns), default=0))
    parts = [_text(left + (j + 0.5) * cell_width, top - 8, name, "middle") for j, name in enumerate(columns)]
    for i, row in enumerate(rows):
        y = top + i * cell_height
        parts.append(_text(left - 8, y + 11, labels[i], "end"))
        for j, share in enumerate(row):
            x = left + j * cell_width
            tip = escape(f"layer {labels[i]}, {columns[j]}: {share:.3f}")
            fill = f'fill="{COLOURS[j % len(COLOURS)]}" fill-opacity="{0.03 + 0.97 * min(max(share, 0.0), 1.0):.3f}"'
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell_width - 2:.1f}" height="{cell_height - 2:.1f}" {fill}>'
                f"<title>{tip}</title></rect>"
            )
    return _svg(left + cell_width * len(columns) + 10, top + cell_height * len(rows) + 10, parts, title)
