"""Boxes, arrows and words as plain SVG: all that the diagrams of the documentation need."""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"
INK, MUTED, CARD = "#1f2937", "#6b7280", "#ffffff"
BLUE, AMBER, GREEN, GREY = "#dbeafe", "#fef3c7", "#dcfce7", "#f3f4f6"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


class Diagram:
    """A picture on a white card, so that it reads on a dark page, too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = 13, colour: str = INK,
        anchor: str = "start", weight: int = 400,
    ) -> None:  # fmt: skip
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, title: str, *lines: str,
        fill: str = GREY,
    ) -> None:  # fmt: skip
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" '
            f'fill="{fill}" stroke="#9ca3af"/>'
        )
        self.text(x + 12, y + 21, title, 13, weight=600)
        for i, line in enumerate(lines):
            self.text(x + 12, y + 40 + 17 * i, line, 11, "#374151")

    def arrow(self, *points: tuple[float, float], words: str = "", dashed: bool = False) -> None:
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{way}" fill="none" stroke="{MUTED}" stroke-width="1.6"{dash} '
            'marker-end="url(#head)"/>'
        )
        if words:
            (x0, y0), (x1, y1) = points[0], points[1]
            self.text((x0 + x1) / 2 + 6, (y0 + y1) / 2 + 4, words, 12, MUTED)

    def save(self, name: str) -> None:
        """Into ``docs/images``."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{MUTED}"/></marker>'
        )
        body = "\n".join(self.parts)
        (IMAGES / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{CARD}"/>\n'
            f"{body}\n</svg>\n",
            encoding="utf-8",
        )
