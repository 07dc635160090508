"""A few validation images, small, with the part of each that a validation looks at."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SIDE = 220  # pixels of a picture's longer side
MOST_PIXELS = 64_000_000  # an image of more is left out
LOOK = 60  # images among which the few are chosen, for their shapes
Box = tuple[float, float, float, float]  # left, top, width, height as shares of the image
Size = tuple[int, int]  # width, height
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


def pictures(root: Path, copies: Path, row: Mapping[str, Any], count: int) -> tuple[list[dict[str, Any]], str]:
    """Return `count` images of root/val from tall to broad, as a schedule's `row` validates them, or why there is none.

    Of each "label", "src" (a data URI), "size", "square" and "rectangle" (boxes; None when they are not looked at).
    """
    if not count or not row:
        return [], "no images were asked for"
    root = root.expanduser()
    try:
        found = _candidates(_with_images(root, copies.expanduser()))
        shapes = sorted(((width / height, number) for number, (_, (width, height), _) in enumerate(found)))
        chosen = [found[number] for _, number in _spread(shapes, count)]
        shown = [_picture(label, size, data, row) for label, size, data in chosen]
    except Exception as error:  # of a folder that anything may have happened to since; a report goes without
        return [], f"the validation images are not at hand: {' '.join(str(error).split()) or type(error).__name__}"
    return shown, "" if shown else f"the validation images were not at hand in {root / 'val'}"


def _spread(things: Sequence[Any], count: int) -> list[Any]:
    """So many of them, the first and the last among them."""
    if len(things) <= count:
        return list(things)
    return [things[round(one * (len(things) - 1) / max(1, count - 1))] for one in range(count)]


def _with_images(root: Path, copies: Path) -> Path:
    """The root, or the largest copy beside it where only the index of the full-size images is here."""
    from train.data import packed

    if (root / "val").is_dir() and not (packed.is_packed(root / "val") and _index_only(root / "val")):
        return root
    sizes = sorted((int(one.name) for one in copies.glob("[0-9]*") if one.name.isdigit()), reverse=True)
    return next((copies / str(one) for one in sizes if (copies / str(one) / "val").is_dir()), root)


def _index_only(folder: Path) -> bool:
    from train.data import packed

    return packed.read_manifest(folder).fetched == "index"


def _candidates(root: Path) -> list[tuple[str, Size, bytes]]:
    """Some images with their class's name and size; none when there is no such folder."""
    from train.data import packed

    folder = root / "val"
    if not folder.is_dir():
        return []
    return list(_packed(folder) if packed.is_packed(folder) else _files(folder))


def _packed(folder: Path) -> Iterator[tuple[str, Size, bytes]]:
    from train.data import packed

    index = packed.load(folder, None)
    for number in _spread(range(len(index)), LOOK):
        label = index.classes[int(index.labels[number])]
        yield label, (int(index.widths[number]), int(index.heights[number])), index.read(number)


def _files(folder: Path) -> Iterator[tuple[str, Size, bytes]]:
    from PIL import Image

    classes = _spread(sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] != "."), LOOK)
    for one in classes:
        files = sorted(file for file in one.iterdir() if file.is_file() and file.name[0] != ".")
        for file in _spread(files, max(1, LOOK // len(classes))):
            try:
                with Image.open(file, formats=FORMATS) as image:
                    size = image.size
                yield one.name, size, file.read_bytes()
            except Exception:  # not an image: the run may have left it out too
                continue


def _picture(label: str, size: Size, data: bytes, row: Mapping[str, Any]) -> dict[str, Any]:
    from PIL import Image

    from train.data.shapes import rectangle

    if size[0] * size[1] > MOST_PIXELS:
        raise ValueError(f"an image of {size[0]} x {size[1]} pixels")
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        small = image.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        small.save(out, "JPEG", quality=80)
    side = int(row["size"])
    high, wide = rectangle(*size, side)
    return {
        "label": label,
        "size": size,
        "shown": small.size,
        "src": "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode(),
        "square": box(size, (side, side)),
        "rectangle": box(size, (high, wide)) if row.get("rect_val") else None,
        "pixels": (wide, high) if row.get("rect_val") else (side, side),
    }


def box(size: Size, shape: tuple[int, int]) -> Box:
    """Return the part of an image that a validation's centre crop of `shape` (height, width) looks at.

    The image's short side is made `MARGIN` times the crop's, or longer where the crop would not fit (train/data/crop).
    """
    from train.data.shapes import MARGIN

    width, height = size
    factor = max(round(min(shape) * MARGIN) / min(size), shape[0] / height, shape[1] / width)
    high, wide = (min(1.0, cut / (one * factor)) for cut, one in zip(shape, (height, width), strict=True))
    return (1 - wide) / 2, (1 - high) / 2, wide, high
