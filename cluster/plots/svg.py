"""Converts matplotlib figures to SVG elements that can be inlined in an HTML page.

The elements have no fixed size, no style sheet of their own and no external references. Colors are CSS variables of the
page, so that the same drawing is readable in the light and in the dark scheme.
"""

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from .palette import GRID_COLOR, MUTED_COLOR, PAGE_BACKGROUND_COLOR, SERIES_COLORS, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS_VARIABLE_BY_COLOR = {
    TEXT_COLOR: "ink",
    GRID_COLOR: "grid",
    PAGE_BACKGROUND_COLOR: "paper",
    MUTED_COLOR: "soft",
} | {color: f"s{index + 1}" for index, color in enumerate(SERIES_COLORS)}


def figure_to_svg(figure: "Figure", id_prefix: str, title: str) -> str:
    """Return a figure as an SVG element.

    `id_prefix` must be unique in the page, because SVG ids are global there. Screen readers read `title`.
    """
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg_text = output.getvalue()
    root = ElementTree.fromstring(svg_text)
    used_ids = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg_text))
    for parent in list(root.iter()):
        for child in list(parent):
            if _local_name(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        _clean_element(element, id_prefix, used_ids)
    root.attrib = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local_name(qualified_name: str) -> str:
    return qualified_name.rpartition("}")[2]


def _clean_element(element: ElementTree.Element, id_prefix: str, used_ids: set[str]) -> None:
    """Adapt an element to the page: no namespaces, only ids that are referenced, CSS colors, short numbers."""
    element.tag = _local_name(element.tag)
    attributes = {}
    for qualified_name, value in element.attrib.items():
        name = _local_name(qualified_name)
        if (name == "id" and value not in used_ids) or name in ("version", "xmlns", "type"):
            continue
        if name == "id":
            value = f"{id_prefix}-{value}"
        elif name == "href":
            value = f"#{id_prefix}-{value[1:]}"
        elif name == "clip-path":
            value = value.replace("#", f"#{id_prefix}-")
        elif name == "style":
            value = _use_css_colors(value)
        elif name in ("d", "x", "y"):
            value = _shorten_path(value)
        attributes[name] = value
    element.attrib = attributes
    if element.tag != "text" and not (element.text or "").strip():
        element.text = None
    if not (element.tail or "").strip():
        element.tail = None


def _shorten_path(path: str) -> str:
    """Round the numbers of a path, or a single number, to a tenth of a unit, and drop needless spaces."""
    path = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), path)
    path = re.sub(r"\s*([A-Za-z])\s*", r"\1", path.strip())
    return re.sub(r"M(\S+) (\S+?)L(\S+?) \2L\3 (\S+?)L\1 \4z", r"M\1 \2H\3V\4H\1z", path)  # a rectangle


def _use_css_colors(css: str) -> str:
    """Replace our colors by CSS variables of the page, and drop fonts, which the page sets."""
    css = re.sub(r"font:\s*([\d.]+px)[^;]*", r"font-size: \1", css)
    css = re.sub(r"font-family:[^;]*;?\s*", "", css)

    def to_variable(match: re.Match[str]) -> str:
        variable = CSS_VARIABLE_BY_COLOR.get(match[0])
        return f"var(--{variable})" if variable else match[0]

    return re.sub(r"#[0-9a-f]{6}", to_variable, css)
