"""Typed records: they survive JSON, and damaged data is refused with the name of its field."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from train.tools.records import DamagedRecord, decode, encode, read_record


class Color(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    y: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Drawing:
    color: Color
    points: tuple[Point, ...] = ()
    by_name: dict[str, Point] | None = None


DRAWING = Drawing(color=Color.RED, points=(Point(x=1, y=0.5),), by_name={"a": Point(x=2)})


def test_decode_ignores_unknown_fields_and_takes_whole_numbers_as_floats() -> None:
    assert decode(Point, {"x": 1, "y": 2, "later": None}) == Point(x=1, y=2.0)


@pytest.mark.parametrize(("data", "problem"), [
    ({}, "color"),
    ([], "array"),
    (None, "null"),
    ({"color": "blue"}, "blue"),
    ({"color": "red", "points": [{"x": True}]}, "points[0].x"),
    ({"color": "red", "points": [{"x": "1"}]}, "points[0].x"),
    ({"color": "red", "by_name": {"a": 3}}, "by_name"),
])  # fmt: skip
def test_decode_wrong_data_names_the_field(data: Any, problem: str) -> None:
    with pytest.raises(DamagedRecord) as failure:
        decode(Drawing, data, "drawing.json")
    assert str(failure.value).startswith("drawing.json: ") and problem in str(failure.value)


def test_read_record_missing_file_is_none_and_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "drawing.json"
    assert read_record(path, Drawing) is None
    infinite = '{"color": "red", "points": [{"x": 1e999}]}'
    for text in (json.dumps(encode(DRAWING))[:-5], "[1]", "", "[" * 100_000, infinite):
        path.write_text(text)
        with pytest.raises(DamagedRecord, match=str(path)):
            read_record(path, Drawing)
    path.write_text(json.dumps(encode(DRAWING)))
    assert read_record(path, Drawing) == DRAWING
