"""docs/screenshots: the pictures are those of the current tables, small, and name no folder of a computer."""

import re
from pathlib import Path
from xml.etree import ElementTree

from screenshots import draw_pictures

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
