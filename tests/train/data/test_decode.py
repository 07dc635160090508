"""Tests of decoding: pixels equal PIL's, whatever the file is called, and bad files raise BadImage."""

import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from train.data.decode import BadImage, decode_image, decode_region, size_in_header
from train.data.packing.synthetic import draw_image


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def drawn_image(number: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(draw_image(0, "train", number))).convert("RGB")


@pytest.mark.parametrize(("error", "expected"), [
    pytest.param(NotImplementedError("a format\nof tomorrow"), BadImage("a format of tomorrow"), id="AVIF, DDS"),
    pytest.param(MemoryError(), MemoryError(), id="no fault of the file"),
])  # fmt: skip
def test_decode_image_turns_any_pil_error_but_of_memory_into_bad_image(
    error: Exception, expected: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: Any) -> None:
        raise error

    data = encode(drawn_image(), "PNG")
    monkeypatch.setattr(Image.Image, "convert", convert)
    with pytest.raises(type(expected), match=f"^{expected}$"):
        decode_image(data)


@pytest.mark.parametrize(("data", "message"), [
    (b"words\n", "^not an image "),
    (b"\0" * 100, "^not an image "),
    (b"", "empty"),
    (encode(drawn_image(), "EPS"), r"^not an image \(JPEG, PNG"),  # which PIL would give to Ghostscript, a program
    (encode(Image.fromarray(np.full((4, 4), 60000, np.uint16)), "PNG"), "more than 8 bits"),
    (encode(Image.new("RGB", (65_600, 2)), "PNG"), "^65600 x 2 pixels do not fit into a JPEG file"),
])  # fmt: skip
def test_decode_image_of_other_data_says_so(data: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        decode_image(data)
    assert size_in_header(io.BytesIO(data)) is None, "only decoding can tell"


@pytest.mark.parametrize(("kind", "options"), [
    ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {}), ("BMP", {}), ("GIF", {}),
    ("TIFF", {"tiffinfo": {274: 6}}),  # which PIL rotates
])  # fmt: skip
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_size_in_header_is_that_of_the_pixels(kind: str, options: dict[str, Any], mode: str) -> None:
    data = encode(drawn_image().convert(mode), kind, **options)
    assert size_in_header(io.BytesIO(data)) == decode_image(data).shape[:2]


def test_decode_image_refuses_lost_pixels_cut_files_and_sizes_that_fill_the_memory() -> None:
    """PIL fills the rest of such a JPEG with gray; a header alone may claim gigabytes."""
    marker = b"\xff\xd9"
    for options in ({"subsampling": 0}, {"progressive": True}, {"restart_marker_blocks": 20}, {}):
        good = encode(drawn_image(), "JPEG", **options)
        half = len(good) // 2
        zeros = good[:half] + b"\0" * half
        damaged = [zeros, zeros + marker, good[:half] + marker, good[:700] + marker, good[:-900] + b"\0" * 898 + marker]
        if "subsampling" not in options:  # without it, they decode to pixels of noise
            damaged.append(good[:half] + b"\0" * 4096 + good[half + 4096 :])
        for data in damaged:
            with pytest.raises(BadImage, match=r"a part of its pixels is lost|truncated"):
                decode_image(data)
        decode_image(good[:-2] + b"\0" * 2226 + marker)
    for end in (1, 20, 200, half, -2000, -2):
        with pytest.raises(BadImage):
            decode_image(good[:end])
    size_at = good.index(b"\xff\xc0") + 5
    with pytest.raises(BadImage, match="20000 x 20000 pixels are more than 178956970"):
        decode_image(good[:size_at] + (20_000).to_bytes(2, "big") * 2 + good[size_at + 4 :])


def test_decode_image_refuses_scans_that_take_hours_and_accepts_a_film_after_the_image() -> None:
    good = encode(drawn_image(), "JPEG", progressive=True)
    last_scan = good[good.rindex(b"\xff\xda") : -2]
    with pytest.raises(BadImage, match="scans are too many"):
        decode_image(good[:-2] + last_scan * 100 + good[-2:])
    assert (decode_image(good + b"film\xff\xda" * 1000) == decode_image(good)).all()


def unusual_files() -> dict[str, bytes]:
    image = drawn_image().resize((180, 120))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("workflow", "a" * 3_000_000, zip=True)  # as image generators write it
    plain = encode(image, "JPEG")
    return {
        "plain": plain,
        "grayscale": encode(image.convert("L"), "JPEG"),
        "CMYK": encode(image.convert("CMYK"), "JPEG"),
        "RGB without color transform": encode(image, "JPEG", keep_rgb=True),
        "progressive": encode(image, "JPEG", progressive=True),
        "4:4:4": encode(image, "JPEG", subsampling=0),
        "4:2:2, progressive": encode(image, "JPEG", subsampling=1, progressive=True),
        "restart markers": encode(image, "JPEG", restart_marker_blocks=5),
        "rotated by EXIF": encode(image, "JPEG", exif=exif),
        **{f"PNG {mode}": encode(image.convert(mode), "PNG") for mode in ("RGB", "RGBA", "P", "L")},
        "PNG with long texts": encode(image, "PNG", pnginfo=texts, icc_profile=bytes(3_000_000)),
        "BMP": encode(image, "BMP"),
        "junk after the end": plain + b"junk",
        "bytes before the end": plain[:-2] + b"\0" * 9 + plain[-2:],
    }


@pytest.mark.parametrize("name", unusual_files())
def test_decode_matches_pil_and_a_region_is_a_slice(name: str) -> None:
    data = unusual_files()[name]
    whole = decode_image(data)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)
    assert whole.dtype == np.uint8 and whole.shape == (120, 180, 3) and np.abs(whole - expected).max() <= 2
    for top, left, height, width in ((0, 0, 120, 180), (37, 51, 64, 99), (119, 179, 1, 1)):
        part = decode_region(data, (120, 180), (top, left, height, width))
        assert (part == whole[top : top + height, left : left + width]).all()


def test_decode_image_of_a_transparent_palette_keeps_its_colors_without_a_warning() -> None:
    image = drawn_image().convert("P")
    transparent = encode(image, "PNG", transparency=bytes(256))
    assert (decode_image(transparent) == decode_image(encode(image, "PNG"))).all()


def test_large_image_is_read_without_a_warning_of_pil() -> None:
    script = "import io; from PIL import Image; from train.data.decode import decode_image; file = io.BytesIO()\n"
    script += "Image.new('1', (9000, 10000)).save(file, 'BMP'); print(decode_image(file.getvalue()).shape)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("(10000, 9000, 3)\n", "")
