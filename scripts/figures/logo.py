"""The logo: a ball that passes the sharp valley by and rests in the wide one."""

import math

from diagram import IMAGES

INDIGO, LIGHT, AMBER = "#4051b5", "#c5cae9", "#ffb300"


def valley(x: float) -> float:
    """A sharp minimum and a flat one."""
    sharp = 0.78 * math.exp(-(((x - 0.2) / 0.055) ** 2))
    wide = 0.86 * math.exp(-(((x - 0.66) / 0.2) ** 4))
    return sharp + wide


def way(left: float, top: float, width: float, height: float) -> str:
    points = [
        (left + width * i / 120, top + height * valley(i / 120)) for i in range(121)
    ]  # down is larger
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def mark(size: float) -> str:
    line = way(0.1 * size, 0.26 * size, 0.8 * size, 0.54 * size)
    x, y = 0.1 * size + 0.8 * size * 0.66, 0.26 * size + 0.54 * size * 0.86
    return (
        f'<rect width="{size:g}" height="{size:g}" rx="{0.2 * size:g}" fill="{INDIGO}"/>'
        f'<path d="{line}" fill="none" stroke="{LIGHT}" stroke-width="{0.055 * size:g}" '
        'stroke-linecap="round" stroke-linejoin="round"/>'
        f'<circle cx="{x:.1f}" cy="{y - 0.115 * size:.1f}" r="{0.085 * size:g}" fill="{AMBER}"/>'
    )


def svg(width: int, height: int, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>seht</title>{body}</svg>\n"
    )


word = (
    '<text x="116" y="70" font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" '
    f'font-size="60" font-weight="700" textLength="145" lengthAdjust="spacingAndGlyphs" fill="{INDIGO}">seht</text>'
)
(IMAGES / "logo-mark.svg").write_text(svg(100, 100, mark(100)), encoding="utf-8")
(IMAGES / "logo.svg").write_text(svg(270, 100, mark(100) + word), encoding="utf-8")
