"""Converts matplotlib figures to SVG elements that can be inlined in an HTML page.

The elements have no fixed size, no style sheet of their own and no external references. Colors are CSS variables of the
page, so that the same drawing is readable in the light and in the dark scheme.
"""

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from cluster.plots.figures import GRID_COLOR, MUTED_COLOR, PAGE_BACKGROUND_COLOR, SERIES_COLORS, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS_VARIABLE_BY_COLOR = {TEXT_COLOR: "ink", GRID_COLOR: "grid", PAGE_BACKGROUND_COLOR: "paper", MUTED_COLOR: "soft"} | {
    color: f"s{index + 1}" for index, color in enumerate(SERIES_COLORS)
}


def figure_to_svg(figure: "Figure", title: str, job: str = "") -> str:
    """Return a figure as an SVG element. Screen readers read `title`; with `job`, it is unique in the page."""
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(output.getvalue())
    id_prefix = re.sub(r"\W+", "-", f"{job} {title} ")  # SVG ids are global in the page
    for element in root.iter():
        element.tag = _local_name(element.tag)
        element[:] = [child for child in element if _local_name(child.tag) not in ("metadata", "style")]
        element.attrib = {
            name: _adapt_attribute(name, value, id_prefix)
            for name, value in ((_local_name(name), value) for name, value in element.attrib.items())
            if name not in ("version", "xmlns", "type")
        }
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local_name(qualified_name: str) -> str:
    return qualified_name.rpartition("}")[2]


def _adapt_attribute(name: str, value: str, id_prefix: str) -> str:
    """Return an attribute as the page needs it: ids that are unique there, CSS colors, short numbers."""
    if name == "id":
        return f"{id_prefix}{value}"
    if name in ("href", "clip-path"):
        return value.replace("#", f"#{id_prefix}")
    if name == "style":
        return _use_css_colors(value)
    return _shorten_path(value) if name in ("d", "x", "y") else value


def _shorten_path(path: str) -> str:
    """Round the numbers of a path, or a single number, to a tenth of a unit, and drop needless spaces."""
    path = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), path)
    path = re.sub(r"\s*([A-Za-z])\s*", r"\1", path.strip())
    return re.sub(r"M(\S+) (\S+?)L(\S+?) \2L\3 (\S+?)L\1 \4z", r"M\1 \2H\3V\4H\1z", path)  # a rectangle


def _use_css_colors(css: str) -> str:
    """Replace our colors by CSS variables of the page, and drop fonts, which the page sets."""
    css = re.sub(r"font:\s*([\d.]+px)[^;]*", r"font-size: \1", css)
    css = re.sub(r"font-family:[^;]*;?\s*", "", css)
    for color, variable in CSS_VARIABLE_BY_COLOR.items():
        css = css.replace(color, f"var(--{variable})")
    return css
