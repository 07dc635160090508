"""Colors and the font that all plots share."""

from typing import Any

# Distinguishable also by readers who cannot tell red from green.
SERIES_COLORS = ("#1f6fb4", "#d1495b", "#2a9d5c", "#e08e0b", "#7b4fa3", "#444444")
TEXT_COLOR = "#222222"
GRID_COLOR = "#dddddd"
BACKGROUND_COLOR = "#ffffff"


def load_font(size: int) -> Any:
    """Return Pillow's built-in font at a size in pixels."""
    from PIL import ImageFont

    return ImageFont.load_default(size)
