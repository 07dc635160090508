"""Colors that all plots share."""

# Distinguishable also by readers who cannot tell red from green.
SERIES_COLORS = ("#1f6fb4", "#d1495b", "#2a9d5c", "#e08e0b", "#7b4fa3", "#444444")
TEXT_COLOR = "#222222"
MUTED_COLOR = "#5d6670"
GRID_COLOR = "#dddddd"
BACKGROUND_COLOR = "#ffffff"
PAGE_BACKGROUND_COLOR = "#fefefe"  # of the report, in which it is a variable
