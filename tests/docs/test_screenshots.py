"""docs/screenshots: the pictures are those of the current tables, and name no folder of a computer."""

import re
from pathlib import Path

from screenshots import draw_pictures

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screenshots"


def test_pictures_are_what_the_commands_print() -> None:
    pictures = dict(draw_pictures())
    assert {path.name for path in FOLDER.iterdir()} == {*pictures}
    for name, svg in pictures.items():
        assert (FOLDER / name).read_text() == svg, f"{name}: python docs/tools/screenshots.py docs/screenshots"
        assert "…" not in svg and not re.search(r"/root|/work|/tmp|/home/(?!you)", svg), name
