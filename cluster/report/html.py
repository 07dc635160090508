"""HTML that cannot be broken into: every text is escaped, every element is made here.

Names of classes, recipes, machines, and reasons are other people's texts.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

VOID_ELEMENTS = ("meta", "img", "br")
NUMBER_PATTERN = re.compile(r"[-+$]?[\d.,:]+( %)?")


class Html(str):
    """A text that is HTML already, made by `tag` or `join`."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element. What is inside is escaped unless it is `Html`, None is left out; so are attributes of None.

    An attribute's underscore at the end is dropped (class_), others become dashes (aria_label).
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_display_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID_ELEMENTS:
        return Html(f"<{name}{words}>")
    return Html(f"<{name}{words}>{join(children)}</{name}>")


def join(parts: Iterable[Any]) -> Html:
    """Return the parts one after the other, escaped unless they are `Html`."""
    return Html(
        "".join(one if isinstance(one, Html) else escape(_display_text(one)) for one in parts if one is not None)
    )


def table(columns: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> Html:
    """Return a table that scrolls in itself when it is broader than the screen; numbers stand to the right."""
    shown = [[one if isinstance(one, Html) else _display_text(one) for one in row] for row in rows]
    right = [all(_is_numeric(row[place]) for row in shown) for place in range(len(columns))]
    kinds = ["number" if one else None for one in right]
    head = tag("tr", *(tag("th", name, class_=kind, scope="col") for name, kind in zip(columns, kinds, strict=True)))
    body = [
        tag("tr", *(tag("td", one, class_=kind or _cell_class(one)) for one, kind in zip(row, kinds, strict=True)))
        for row in shown
    ]
    inside = (tag("caption", caption) if caption else None, tag("thead", head), tag("tbody", *body))
    return tag("div", tag("table", *inside), class_="scroll", tabindex="0")


def _cell_class(text: str) -> str:
    """What is short stands in one line; texts of machines and people break theirs."""
    return "short" if len(text) < 28 else "long"


def _is_numeric(text: str) -> bool:
    return not text or NUMBER_PATTERN.fullmatch(text) is not None


def _display_text(value: Any) -> str:
    """A value as a person reads it; what no HTML may have is left out."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "".join(one for one in text if one.isprintable() or one in "\n\t ")
