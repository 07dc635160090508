"""Colours and font that all plots share."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


SERIES_COLOURS = ("#1f6fb4", "#d1495b", "#2a9d5c", "#e08e0b", "#7b4fa3", "#444444")  # apart also without red or green


TEXT_COLOUR, GRID_COLOUR, BACKGROUND_COLOUR = "#222222", "#dddddd", "#ffffff"


def load_font(size: int) -> Any:
    """Return Pillow's own font."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
