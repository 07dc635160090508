"""From a figure of matplotlib to SVG that lies in a page: no size, no style sheet, no address, colours by their names.

The colours are variables of the page's style, so that one drawing is read in the dark and in the light.
"""

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from .palette import GRID_COLOUR, SERIES_COLOURS, TEXT_COLOUR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_BACKGROUND_COLOUR, MUTED_COLOUR = "#fefefe", "#5d6670"
CSS_VARIABLE_BY_COLOUR = {
    TEXT_COLOUR: "ink",
    GRID_COLOUR: "grid",
    PAGE_BACKGROUND_COLOUR: "paper",
    MUTED_COLOUR: "soft",
} | {colour: f"s{place + 1}" for place, colour in enumerate(SERIES_COLOURS)}
WIDTH_INCHES, HEIGHT_INCHES = 4.9, 3.0  # inches of 72 units: a unit is about a pixel on a phone
MATPLOTLIB_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "imgnet-cluster", "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"], "font.size": 10, "axes.labelsize": 10, "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5, "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.edgecolor": MUTED_COLOUR, "axes.labelcolor": MUTED_COLOUR, "xtick.color": MUTED_COLOUR,
    "ytick.color": MUTED_COLOUR, "text.color": TEXT_COLOUR, "grid.color": GRID_COLOUR, "axes.grid": True, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "ytick.major.size": 0, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "lines.linewidth": 1.8, "lines.markersize": 4.5, "axes.formatter.useoffset": False,
    "axes.formatter.limits": [-4, 6], "hatch.linewidth": 0.7, "axes.unicode_minus": True, "axes.ymargin": 0.08,
}  # fmt: skip


@contextlib.contextmanager
def matplotlib_settings() -> Iterator[None]:
    """Draw by our settings within this context, whatever a matplotlibrc of the user's says."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells when it looks for fonts
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams  # whose types name every setting of one version
        settings.update(MATPLOTLIB_SETTINGS)
        yield


def make_axes(width: float = WIDTH_INCHES, height: float = HEIGHT_INCHES, rows: int = 1) -> "tuple[Figure, list[Any]]":
    """Return a figure of so many inches, and its axes, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    found = figure.subplots(rows, 1, sharex=True, squeeze=False)
    return figure, [one[0] for one in found]


def figure_to_svg(figure: "Figure", id_prefix: str, title: str) -> str:
    """Return a figure as an SVG element for a page, `name` apart from all others of that page, `title` read aloud."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(out.getvalue())
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', out.getvalue()))
    for parent in list(root.iter()):
        for child in list(parent):
            if _local_name(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for one in root.iter():
        _clean_element(one, id_prefix, used)
    box = root.get("viewBox", "")
    root.attrib = {"viewBox": box, "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _local_name(qualified_name: str) -> str:
    return qualified_name.rpartition("}")[2]


def _clean_element(element: ElementTree.Element, id_prefix: str, used_ids: set[str]) -> None:
    """Make an element one of a page: no namespaces, ids only where they are used and of this page, short numbers."""
    element.tag = _local_name(element.tag)
    words = {}
    for key, value in element.attrib.items():
        key = _local_name(key)
        if (key == "id" and value not in used_ids) or key in ("version", "xmlns", "type"):
            continue
        if key == "id":
            value = f"{id_prefix}-{value}"
        elif key == "href":
            value = f"#{id_prefix}-{value[1:]}"
        elif key == "clip-path":
            value = value.replace("#", f"#{id_prefix}-")
        elif key == "style":
            value = _use_css_colours(value)
        elif key in ("d", "x", "y"):
            value = _shorten_path(value)
        words[key] = value
    element.attrib = words
    if element.tag != "text" and not (element.text or "").strip():
        element.text = None
    if not (element.tail or "").strip():
        element.tail = None


def _shorten_path(path: str) -> str:
    """A path, or a number, to a tenth of a unit and without what need not be said."""
    path = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), path)
    path = re.sub(r"\s*([A-Za-z])\s*", r"\1", path.strip())
    return re.sub(r"M(\S+) (\S+?)L(\S+?) \2L\3 (\S+?)L\1 \4z", r"M\1 \2H\3V\4H\1z", path)  # a box


def _use_css_colours(css: str) -> str:
    """A style with our colours by their names, and without fonts: those are the page's."""
    css = re.sub(r"font:\s*([\d.]+px)[^;]*", r"font-size: \1", css)
    css = re.sub(r"font-family:[^;]*;?\s*", "", css)
    return re.sub(
        r"#[0-9a-f]{6}",
        lambda found: f"var(--{CSS_VARIABLE_BY_COLOUR[found[0]]})" if found[0] in CSS_VARIABLE_BY_COLOUR else found[0],
        css,
    )
