"""docs/screenshots: the pictures are those of the current tables, small, and name no folder of a computer."""

import re
from pathlib import Path
from xml.etree import ElementTree

from screenshots import draw_pictures
from terminal_svg import THEMES, Run, terminal_lines

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
MAX_FILE_BYTES = 16_000


def test_pictures_are_what_the_commands_print() -> None:
    pictures = dict(draw_pictures())
    assert {path.name for path in FOLDER.iterdir()} == {*pictures}
    for name, svg in pictures.items():
        assert (FOLDER / name).read_text() == svg, f"{name}: python docs/tools/screenshots.py docs/screenshots"


def test_pictures_are_small_and_fit_their_terminal() -> None:
    for path in FOLDER.iterdir():
        svg = path.read_text()
        assert len(svg) < MAX_FILE_BYTES and "http" not in svg.replace("http://www.w3.org/2000/svg", ""), path
        assert "…" not in svg and not re.search(r"/root|/work|/tmp|/home/(?!you)", svg), path
        picture = ElementTree.fromstring(svg)
        for text in picture.iter("{http://www.w3.org/2000/svg}text"):
            end = float(text.attrib["x"]) + float(text.attrib["textLength"])
            assert end <= float(picture.attrib["width"]), (path, text.text)


def test_terminal_lines_have_colors_and_break_at_the_width() -> None:
    lines = list(terminal_lines("a \x1b[31mfailed\x1b[0m\n\n1234567\n", 6))
    assert lines == [
        [Run(0, "a ", ""), Run(2, "fail", "red")], [Run(0, "ed", "red")], [], [Run(0, "123456", "")], [Run(0, "7", "")],
    ]  # fmt: skip


def test_themes_have_the_same_colors() -> None:
    light, dark = THEMES.values()
    assert light.keys() == dark.keys() and len({*light.values(), *dark.values()}) == 2 * len(light)
