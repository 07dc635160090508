"""From bytes to pixels: the same ones as PIL's, whatever the file calls itself."""

import io
import subprocess
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image

from train.data import decode as module
from train.data.decode import BadImage, Pixels, decode_image, decode_region, encode_jpeg, region_decoder
from train.data.packing.synthetic import draw_image


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **how)
    return data.getvalue()


def picture(number: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(draw_image(0, "train", number))).convert("RGB")


def by_pil(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)


def assert_like_pil(data: bytes) -> None:
    mine, theirs = decode_image(data), by_pil(data)
    assert mine.dtype == np.uint8 and mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 2


@pytest.mark.parametrize("number", range(6))
def test_pixels_are_those_of_pil(number: int) -> None:
    assert_like_pil(draw_image(0, "train", number))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_every_kind_of_jpeg_is_read(subsampling: int, progressive: bool) -> None:
    assert_like_pil(saved(picture(), "JPEG", subsampling=subsampling, progressive=progressive))


@pytest.mark.parametrize("mode", ["L", "CMYK", "YCbCr"])
def test_grey_and_cmyk_become_rgb(mode: str) -> None:
    assert_like_pil(saved(picture().convert(mode), "JPEG", quality=95))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "L"), ("BMP", "RGB")]
)
def test_another_format_under_the_name_of_a_jpeg_is_read(kind: str, mode: str) -> None:
    assert_like_pil(saved(picture().convert(mode), kind))


def test_bytes_after_the_end_do_not_matter() -> None:
    whole = draw_image(0, "train", 1)
    assert (decode_image(whole + b"tail" * 100) == decode_image(whole)).all()


def test_the_camera_s_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image = picture().resize((60, 40))
    assert decode_image(saved(image, "JPEG", exif=exif)).shape == (40, 60, 3)


@pytest.mark.parametrize("keep", [0, 1, 20, 200, 3000, -2000])
def test_a_cut_file_is_refused_in_one_line(keep: int) -> None:
    with pytest.raises(BadImage) as caught:
        decode_image(draw_image(0, "train", 3)[:keep])
    assert str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_file_is_called_empty() -> None:
    with pytest.raises(BadImage, match="empty"):
        decode_image(b"")


def test_noise_is_refused_and_never_anything_but_a_bad_image() -> None:
    rng = np.random.default_rng(0)
    whole = bytearray(saved(picture().resize((64, 48)), "JPEG"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL's on odd metadata
        for _ in range(150):
            data = bytearray(whole)
            for place in rng.integers(0, len(data), 4):
                data[place] = rng.integers(256)
            try:
                assert decode_image(bytes(data)).shape[2] == 3
            except BadImage:
                continue
        with pytest.raises(BadImage):
            decode_image(rng.bytes(500))


def test_encoded_pixels_come_back_nearly_as_they_were() -> None:
    pixels = np.asarray(picture().resize((96, 64)))
    data = encode_jpeg(pixels, 90)
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (96, 64))
    assert np.abs(decode_image(data).astype(np.int64) - pixels).mean() < 6


def test_pixels_that_do_not_fit_into_a_byte_are_refused_and_not_clipped() -> None:
    grey = Image.fromarray(np.full((4, 4), 60000, np.uint16))
    with pytest.raises(BadImage, match="more than 8 bits"):
        decode_image(saved(grey, "PNG"))


def test_whatever_a_reader_of_pil_raises_is_a_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of AVIF and DDS raise RuntimeError and NotImplementedError for a damaged file."""

    data = saved(picture(), "PNG")

    def read(*_: Any) -> None:
        raise NotImplementedError("a format\nof tomorrow")

    monkeypatch.setattr(Image.Image, "convert", read)
    with pytest.raises(BadImage, match=r"^a format of tomorrow$"):
        decode_image(data)


@pytest.mark.parametrize("data", [b"words\n", b"\0" * 100])
def test_what_is_no_image_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(BadImage, match=r"^not an image$"):
        decode_image(data)


def odd_files() -> dict[str, bytes]:
    image = picture().resize((180, 120))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    plain = saved(image, "JPEG")
    return {
        "plain": plain,
        "grey": saved(image.convert("L"), "JPEG"),
        "CMYK": saved(image.convert("CMYK"), "JPEG"),
        "colours as they are": saved(image, "JPEG", keep_rgb=True),
        "progressive": saved(image, "JPEG", progressive=True),
        "4:4:4": saved(image, "JPEG", subsampling=0),
        "4:2:2, progressive": saved(image, "JPEG", subsampling=1, progressive=True),
        "restart markers": saved(image, "JPEG", restart_marker_blocks=5),
        "turned": saved(image, "JPEG", exif=exif),
        "PNG": saved(image, "PNG"),
        "junk after the end": plain + b"junk",
        "bytes before the end": plain[:-2] + b"\0" * 9 + plain[-2:],
    }


@pytest.mark.parametrize("name", odd_files())
def test_a_part_is_the_part_of_the_whole_by_every_route(name: str, route: str) -> None:
    data = odd_files()[name]
    whole = decode_image(data)
    assert whole.shape == (120, 180, 3)
    for top, left, height, width in (
        (0, 0, 120, 180),
        (0, 0, 1, 1),
        (37, 51, 64, 99),
        (119, 179, 1, 1),
        (8, 16, 100, 3),
    ):
        part = decode_region(data, (120, 180), (top, left, height, width))
        assert (part == whole[top : top + height, left : left + width]).all()


def test_parts_of_plain_files_come_from_the_region_s_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one that says what it was asked, and knows the answers: so this holds where it is not installed."""
    asked: list[bytes] = []

    def region(data: bytes, box: module.Box) -> Pixels:
        asked.append(data)
        return np.full((*box[2:], 3), 7, np.uint8)

    monkeypatch.setattr(module, "region_decoder", lambda _: region)
    files = odd_files()
    for data in files.values():
        decode_region(data, (120, 180), (3, 4, 50, 60))
        decode_region(data, (120, 180), (0, 0, 120, 180))
    others = {"CMYK", "PNG", "junk after the end"}
    assert asked == [data for name, data in files.items() if name not in others]


def test_a_region_s_decoder_that_gives_nothing_leaves_it_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "region_decoder", lambda _: lambda *_: None)
    data = odd_files()["plain"]
    assert (decode_region(data, (120, 180), (3, 4, 50, 60)) == decode_image(data)[3:53, 4:64]).all()


@pytest.mark.parametrize("keep", [0, 1, 20, 200, 3000, -2000, -2])
def test_a_cut_file_is_refused_by_every_route(keep: int, route: str) -> None:
    data = draw_image(0, "train", 3)
    height, width, _ = decode_image(data).shape
    with pytest.raises(BadImage):
        decode_region(data[:keep], (height, width), (0, 0, 30, 30))


def test_an_image_of_another_size_is_refused_by_every_route(route: str) -> None:
    with pytest.raises(BadImage, match=r"^has 180x120 pixels and not 120x180$"):
        decode_region(odd_files()["plain"], (180, 120), (0, 0, 30, 30))


def test_each_thread_has_a_region_s_decoder_of_its_own() -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="the extra nvimgcodec is not installed")
    found = [region_decoder(threading.get_native_id()) for _ in range(2)]
    other = threading.Thread(target=lambda: found.append(region_decoder(threading.get_native_id())))
    other.start()
    other.join()
    assert found[0] is found[1] is not None and found[2] not in (found[0], None)


def test_nothing_is_heard_of_a_region_s_decoder() -> None:
    """When it is loaded, it tells stderr of everything that this machine lacks."""
    pytest.importorskip("nvidia.nvimgcodec", reason="the extra nvimgcodec is not installed")
    code = "import sys, train.data.decode as d; print(d.region_decoder(0) is None); print('heard', file=sys.stderr)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (said.stdout, said.stderr) == ("False\n", "heard\n")


def test_without_the_extra_there_is_no_region_s_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)  # as an import that fails
    monkeypatch.setitem(sys.modules, "nvidia", None)
    region_decoder.cache_clear()
    try:
        assert region_decoder(threading.get_native_id()) is None
    finally:
        region_decoder.cache_clear()
