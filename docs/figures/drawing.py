"""A picture as SVG, written by hand: shapes and text with a few shared colours, and the same bytes each time."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, GREY, LINE, PAPER, PALE = "#1f2933", "#5f6b7a", "#9aa5b1", "#ffffff", "#f1f4f8"
BLUE, ORANGE, GREEN, PURPLE, RED, TEAL = "#2f6db5", "#c8691c", "#2f8a4e", "#7d55b0", "#b3404a", "#1f8a8f"
TINTS = {
    BLUE: "#dce8f6",
    ORANGE: "#fbe6d3",
    GREEN: "#dcf0e2",
    PURPLE: "#eae0f5",
    RED: "#f7dfe1",
    TEAL: "#d8eff0",
    GREY: "#e6eaef",
}
"""A colour to the pale one that fills what it outlines."""

AXES = {"pp": PURPLE, "dp": ORANGE, "cp": TEAL, "tp": GREEN}
"""The colour of an axis of the mesh, in every picture."""


class Picture:
    """A picture of a fixed size, in pixels, to which shapes are added from back to front.

    Args:
        width, height: in pixels.
        label: what the picture shows, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []
        self._arrows: set[str] = set()

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = PAPER, line: str = LINE, r: float = 6,
        dashed: bool = False, weight: float = 1,
    ) -> None:  # fmt: skip
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{r:g}" fill="{fill}" '
            f'stroke="{line}" stroke-width="{weight:g}"{dash}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, colour: str = INK, bold: bool = False,
        anchor: str = "start", mono: bool = False,
    ) -> None:  # fmt: skip
        """Adds a line of text whose baseline is at ``y``."""
        style = ' font-weight="600"' if bold else ""
        style += f' text-anchor="{anchor}"' if anchor != "start" else ""
        style += ' font-family="ui-monospace, Menlo, Consolas, monospace" xml:space="preserve"' if mono else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{style}>{escape(text)}</text>'
        )

    def lines(self, x: float, y: float, texts: Sequence[str], *, step: float = 17, **style) -> None:
        for number, text in enumerate(texts):
            self.text(x, y + number * step, text, **style)

    def centred(
        self, x: float, y: float, width: float, height: float, texts: Sequence[str], *, step: float = 16, **style
    ):
        """Adds lines of text in the middle of a box."""
        first = y + height / 2 + 4.5 - (len(texts) - 1) * step / 2
        self.lines(x + width / 2, first, texts, step=step, anchor="middle", **style)

    def path(
        self, points: str, colour: str = GREY, *, weight: float = 1.5, start: bool = False, end: bool = False,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """Adds a line along ``points``, in the language of SVG, with arrows at its ends if they are asked for."""
        ends = ""
        for wanted, name in ((start, "start"), (end, "end")):
            if wanted:
                self._arrows.add(colour)
                ends += f' marker-{name}="url(#arrow-{colour[1:]})"'
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="{weight:g}" '
            f'stroke-linejoin="round"{dash}{ends}/>'
        )

    def svg(self) -> str:
        arrows = "".join(
            f'<marker id="arrow-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path d="M0 0.5 L10 5 L0 9.5 z" fill="{colour}"/></marker>'
            for colour in sorted(self._arrows)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" role="img" '
            f'aria-label="{escape(self.label, {chr(34): "&quot;"})}">'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>'
        defs = [f"<defs>{arrows}</defs>"] if arrows else []
        return "\n".join([head, f"<title>{escape(self.label)}</title>", *defs, paper, *self._parts, "</svg>", ""])
