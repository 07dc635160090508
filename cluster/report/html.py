"""HTML elements that no text can break out of: every text is escaped, and every element is made by `tag`.

Names of classes, recipes and machines, and the reasons of failures, are texts that other people wrote.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape

VOID_ELEMENTS = ("meta", "img", "br")
NUMBER_PATTERN = re.compile(r"[-+$]?[\d.,:]+( %)?")
MAX_SHORT_CELL = 28  # characters; longer cells of a table may break into lines


class Html(str):
    """Text that is HTML already, made by `tag` or `join`."""


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element. Children are escaped unless they are `Html`; children and attributes of None are left out.

    In the name of an attribute, an underscore at the end is dropped (class_) and others become dashes (aria_label).
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_display_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID_ELEMENTS:
        return Html(f"<{name}{attribute_text}>")
    return Html(f"<{name}{attribute_text}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Return the parts one after the other, escaped unless they are `Html`. None is left out."""
    return Html(
        "".join(part if isinstance(part, Html) else escape(_display_text(part)) for part in parts if part is not None)
    )


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """Return a table that scrolls by itself when it is wider than the screen. Columns of numbers are right-aligned."""
    cells = [[cell if isinstance(cell, Html) else _display_text(cell) for cell in row] for row in rows]
    column_classes = [
        "number" if all(_is_numeric(row[index]) for row in cells) else None for index in range(len(columns))
    ]
    header_cells = [
        tag("th", name, class_=column_class, scope="col")
        for name, column_class in zip(columns, column_classes, strict=True)
    ]
    body_rows = []
    for row in cells:
        body_cells = [
            tag("td", cell, class_=column_class or _cell_class(cell))
            for cell, column_class in zip(row, column_classes, strict=True)
        ]
        body_rows.append(tag("tr", *body_cells))
    content = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", tag("tr", *header_cells)),
        tag("tbody", *body_rows),
    )
    return tag("div", content, class_="scroll", tabindex="0")


def _cell_class(text: str) -> str:
    """Return the class of a cell: short texts stay on one line, long texts may break."""
    return "short" if len(text) < MAX_SHORT_CELL else "long"


def _is_numeric(text: str) -> bool:
    return not text or NUMBER_PATTERN.fullmatch(text) is not None


def _display_text(value: object) -> str:
    """Return a value as text for people, without the characters that HTML does not allow."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "".join(character for character in text if character.isprintable() or character in "\n\t ")
