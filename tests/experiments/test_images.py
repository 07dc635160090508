"""The images of the experiments: the same ones from a folder and a tar, none in both splits, nothing given away."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.harness import images
from experiments.harness.images import ImageSourceError
from train.data.index import open as index_open


def picture(number: int, size: tuple[int, int] = (8, 8)) -> bytes:
    rng = np.random.default_rng(number)
    with io.BytesIO() as file:
        Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8)).save(file, "JPEG")
        return file.getvalue()


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    for split, count in (("train", 6), ("val", 3)):
        for kind in ("cat", "dog"):
            folder = tmp_path / "cifar" / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{kind}{number}.png").write_bytes(picture(number))
    (tmp_path / "cifar" / ".train.index.npz").write_bytes(b"")
    return tmp_path / "cifar"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.JPEG").write_bytes(picture(number, (200 + 10 * number, 300)))
    return folder


def files(folder: Path, split: str) -> list[str]:
    """The names class/file of a packed split."""
    return index_open.load_index(folder, split).names()


def test_a_part_of_the_training_images_and_all_for_validation(cifar: Path, tmp_path: Path) -> None:
    found = images.prepare_cifar(cifar, tmp_path / "work", per_class=4)
    train = files(found.folder, "train")
    assert len(train) == 8 and len(files(found.folder, "val")) == 6 and found.classes == 2
    first = [f"{kind}/{kind}{number}.png" for kind in ("cat", "dog") for number in range(4)]
    assert set(train) != set(first)  # not the first by name


def test_a_tar_gives_the_same_images_as_its_folder(cifar: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.add(cifar, "some/where")
    one = images.prepare_cifar(cifar, tmp_path / "a", per_class=4)
    other = images.prepare_cifar(tmp_path / "x.tar.gz", tmp_path / "b", per_class=4)
    assert one.fingerprint == other.fingerprint and files(one.folder, "train") == files(other.folder, "train")
    mine, theirs = (index_open.load_index(folder, "train").read(0) for folder in (one.folder, other.folder))
    assert mine == theirs == (cifar / "train" / files(one.folder, "train")[0]).read_bytes()


def test_images_are_made_once_and_known_by_their_fingerprint(cifar: Path, tmp_path: Path) -> None:
    one = images.prepare_cifar(cifar, tmp_path / "work", per_class=4)
    assert images.prepare_cifar(Path("gone"), tmp_path / "work", per_class=4) == one
    assert images.prepare_cifar(cifar, tmp_path / "again", per_class=4).fingerprint == one.fingerprint
    (cifar / "val" / "cat" / "cat0.png").write_bytes(picture(99))
    assert images.prepare_cifar(cifar, tmp_path / "other", per_class=4).fingerprint != one.fingerprint


def test_too_few_images_or_none_are_one_line_and_leave_nothing(cifar: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageSourceError, match="train/cat has 6 images; 7 of each class are needed"):
        images.prepare_cifar(cifar, tmp_path / "work", per_class=7)
    with pytest.raises(ImageSourceError, match="--data has no train"):
        images.prepare_cifar(cifar / "train", tmp_path / "work", per_class=1)
    with pytest.raises(ImageSourceError, match="neither a folder nor a tar"):
        images.prepare_cifar(tmp_path / "nothing", tmp_path / "work", per_class=1)
    assert not list((tmp_path / "work").iterdir())


def test_a_photograph_is_in_one_split_with_both_of_its_versions(photographs: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    for fold in range(images.FOLDS):
        folder = images.prepare_photographs(photographs, tmp_path / "work", fold).folder
        split = {}
        for name in ("train", "val"):
            found = [one.split("/") for one in files(folder, name)]
            split[name] = {file for kind, file in found if kind == "upright"}
            assert {file for kind, file in found if kind == "turned"} == split[name]
        assert not split["train"] & split["val"] and len(split["train"] | split["val"]) == 20
        seen += split["val"]
    assert len(seen) == 20 == len(set(seen))  # each one in validation once


def test_neither_the_shape_nor_the_saving_gives_a_turned_photograph_away() -> None:
    turned, upright = (Image.open(io.BytesIO(one)) for one in images.turned_and_upright(picture(1, (300, 200))))
    assert turned.size == upright.size == (192, 128)
    assert turned.info.keys() == upright.info.keys()
    assert turned.quantization == upright.quantization  # type: ignore[attr-defined]
    off = np.abs(np.asarray(turned.transpose(Image.Transpose.ROTATE_180), int) - np.asarray(upright, int)).mean()
    assert off < 20 < np.abs(np.asarray(turned, int) - np.asarray(upright, int)).mean()


def test_a_small_or_grey_photograph_is_enlarged_to_three_channels() -> None:
    with io.BytesIO() as file:
        Image.new("L", (60, 30)).save(file, "JPEG")
        turned, _ = images.turned_and_upright(file.getvalue())
    with Image.open(io.BytesIO(turned)) as one:
        assert one.size == (256, 128) and one.mode == "RGB"
