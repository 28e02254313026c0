"""The picture of ``bench/scripts/soak.py``: memory and journal over the rounds of a week."""

from __future__ import annotations

WIDTH, HEIGHT, LEFT, TOP = 430, 240, 60, 46
COLOURS = ["#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#57606a"]


def draw(entries: list[dict]) -> str:
    """Return the picture as SVG, with one line per selector for the undisturbed week and for the week of abuse."""
    panels = [
        ("Memory of the process, MB: undisturbed", "quiet", 1, 1e6),
        ("Memory, MB: a new process after every kill", "disturbed", 1, 1e6),
        ("Journal, MB: undisturbed", "quiet", 2, 1e6),
        ("Journal, MB: killed, and pruned every day", "disturbed", 2, 1e6),
    ]
    parts = []
    for i, (title, week, column, unit) in enumerate(panels):
        x, y = (i % 2) * (WIDTH + LEFT + 20), (i // 2) * (HEIGHT + TOP + 40)
        parts.append(f'<g transform="translate({x + LEFT},{y + TOP})">{_panel(entries, title, week, column, unit)}</g>')
    legend = "".join(
        f'<g transform="translate({LEFT + 150 * i},{2 * (HEIGHT + TOP + 40) + 16})"><rect width="14" height="4" y="-4" '
        f'fill="{COLOURS[i % len(COLOURS)]}"/><text x="20">{entry["selector"]}</text></g>'
        for i, entry in enumerate(entries)
    )
    width, height = 2 * (WIDTH + LEFT + 20), 2 * (HEIGHT + TOP + 40) + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#24292f"><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(parts)}{legend}</svg>\n"
    )


def _panel(entries: list[dict], title: str, week: str, column: int, unit: float) -> str:
    curves = [[(row[0], row[column] / unit, row[3]) for row in entry["curves"][week]] for entry in entries]
    right = max((point[0] for curve in curves for point in curve), default=1)
    top = _ceiling(max((point[1] for curve in curves for point in curve), default=1))
    lines = [f'<text y="-14" font-weight="bold">{title}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = HEIGHT * (1 - share)
        lines.append(f'<line x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
        lines.append(f'<text x="-8" y="{y + 4}" text-anchor="end">{top * share:g}</text>')
        lines.append(f'<text x="{WIDTH * share}" y="{HEIGHT + 18}" text-anchor="middle">{right * share:.0f}</text>')
    for i, curve in enumerate(curves):
        for pid in dict.fromkeys(point[2] for point in curve):
            points = [(x, y) for x, y, p in curve if p == pid]
            path = " ".join(f"{x / right * WIDTH:.1f},{HEIGHT * (1 - y / top):.1f}" for x, y in points)
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.5"/>'
            )
    return "".join(lines)


def _ceiling(value: float) -> float:
    """Return the next number that divides well by four.

    >>> _ceiling(37.0), _ceiling(230.0)
    (40.0, 400.0)
    """
    step = 1.0
    while True:
        for factor in (1, 2, 4, 8):
            if value <= step * factor:
                return step * factor
        step *= 10
