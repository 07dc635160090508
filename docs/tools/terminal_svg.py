"""Draws what a command prints on a terminal as an SVG: text with its colors, without fonts or links from elsewhere."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

CHARACTER_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 18, 14, 12  # pixels
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
SGR = re.compile(r"\x1b\[([0-9;]*)m")  # the escape sequence that sets color and weight
CLASS_BY_CODE = {
    **{"1": "bold", "2": "dim"},
    **{"31": "red", "32": "green", "33": "yellow", "34": "blue", "35": "magenta", "36": "cyan"},
}
THEMES = {  # the terminal colors of GitHub's two themes
    "light": {
        "page": "#ffffff", "text": "#1f2328", "dim": "#59636e", "red": "#cf222e", "green": "#1a7f37",
        "yellow": "#9a6700", "blue": "#0969da", "magenta": "#8250df", "cyan": "#1b7c83",
    },
    "dark": {
        "page": "#0d1117", "text": "#e6edf3", "dim": "#9198a1", "red": "#ff7b72", "green": "#3fb950",
        "yellow": "#d29922", "blue": "#58a6ff", "magenta": "#bc8cff", "cyan": "#39c5cf",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Characters of one style in a line, from a column on."""

    column: int
    text: str
    style: str  # names of CSS classes


def terminal_lines(output: str, columns: int) -> Iterator[list[Run]]:
    """Yield the lines of a terminal that is `columns` wide: it breaks longer ones wherever they end."""
    style = ""
    for line in output.rstrip("\n").split("\n"):
        runs: list[Run] = []
        column = 0
        for index, piece in enumerate(SGR.split(line)):
            if index % 2:
                style = " ".join(CLASS_BY_CODE[code] for code in piece.split(";") if code not in ("", "0"))
                continue
            while piece:
                if column == columns:
                    yield runs
                    runs, column = [], 0
                part, piece = piece[: columns - column], piece[columns - column :]
                runs.append(Run(column, part, style))
                column += len(part)
        yield runs


def draw_terminal(output: str, columns: int, theme: str) -> str:
    """Return the SVG of a command's output, which has the escape sequences of its colors."""
    colors = THEMES[theme]
    lines = list(terminal_lines(output, columns))
    width = round(columns * CHARACTER_WIDTH + 2 * MARGIN)
    height = len(lines) * LINE_HEIGHT + 2 * MARGIN
    rules = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items() if name in CLASS_BY_CODE.values())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" xml:space="preserve">',
            f"<style>text{{font:{FONT_SIZE}px {FONTS};fill:{colors['text']};white-space:pre}}"
            f".bold{{font-weight:bold}}{rules}</style>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{colors["page"]}"/>',
            *(draw_run(run, row) for row, runs in enumerate(lines) for run in runs if run.text.strip()),
            "</svg>\n",
        ]
    )


def draw_run(run: Run, row: int) -> str:
    """Return the SVG element of a run. Its length is stated, because fonts of readers differ in width."""
    text = run.text.strip()
    column = run.column + len(run.text) - len(run.text.lstrip())
    style = f' class="{run.style}"' if run.style else ""
    place = f'x="{MARGIN + column * CHARACTER_WIDTH:g}" y="{MARGIN + row * LINE_HEIGHT + FONT_SIZE}"'
    return f'<text {place} textLength="{len(text) * CHARACTER_WIDTH:g}"{style}>{escape(text, quote=False)}</text>'
