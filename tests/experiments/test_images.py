"""Tests of the image sets: folder and tar give the same set, splits are disjoint, and shapes reveal no label."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.harness import images
from experiments.harness.images import ImageSourceError
from train.data.index import open as index_open


def noise_jpeg(seed: int, size: tuple[int, int] = (8, 8)) -> bytes:
    """Return a JPEG file of noise, of a size (width, height)."""
    rng = np.random.default_rng(seed)
    with io.BytesIO() as file:
        Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8)).save(file, "JPEG")
        return file.getvalue()


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder in the form of CIFAR-10: 6 training and 3 validation images of each of two classes."""
    for split, count in (("train", 6), ("val", 3)):
        for class_name in ("cat", "dog"):
            folder = tmp_path / "cifar" / split / class_name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{class_name}{number}.png").write_bytes(noise_jpeg(number))
    (tmp_path / "cifar" / ".train.index.npz").write_bytes(b"")
    return tmp_path / "cifar"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A folder of 20 photographs of different widths."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.JPEG").write_bytes(noise_jpeg(number, (200 + 10 * number, 300)))
    return folder


def image_names(folder: Path, split: str) -> list[str]:
    """Return the names class/file of a packed split."""
    return index_open.load_index(folder, split).names()


def test_prepare_cifar_tar_equals_folder(cifar: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.add(cifar, "some/where")
    from_folder = images.prepare_cifar(cifar, tmp_path / "a", per_class=4)
    from_tar = images.prepare_cifar(tmp_path / "x.tar.gz", tmp_path / "b", per_class=4)
    assert from_folder.fingerprint == from_tar.fingerprint
    names = image_names(from_folder.folder, "train")
    assert len(names) == 8 and len(image_names(from_folder.folder, "val")) == 6 and from_folder.classes == 2
    assert names == image_names(from_tar.folder, "train")
    contents = [index_open.load_index(each.folder, "train").read(0) for each in (from_folder, from_tar)]
    assert contents == [(cifar / "train" / names[0]).read_bytes()] * 2


def test_prepare_cifar_bad_source_is_refused_and_leaves_nothing(cifar: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageSourceError, match="train/cat has 6 images; 7 of each class are needed"):
        images.prepare_cifar(cifar, tmp_path / "work", per_class=7)
    with pytest.raises(ImageSourceError, match="--data has no train"):
        images.prepare_cifar(cifar / "train", tmp_path / "work", per_class=1)
    with pytest.raises(ImageSourceError, match="neither a folder nor a tar"):
        images.prepare_cifar(tmp_path / "nothing", tmp_path / "work", per_class=1)
    assert not list((tmp_path / "work").iterdir())


def test_prepare_photographs_folds_are_disjoint_and_complete(photographs: Path, tmp_path: Path) -> None:
    validated: list[str] = []
    for fold in range(images.FOLDS):
        folder = images.prepare_photographs(photographs, tmp_path / "work", fold).folder
        files_by_split = {}
        for split in ("train", "val"):
            names = [name.split("/") for name in image_names(folder, split)]
            files_by_split[split] = {file for class_name, file in names if class_name == "upright"}
            assert {file for class_name, file in names if class_name == "turned"} == files_by_split[split]
        train, val = files_by_split["train"], files_by_split["val"]
        assert not train & val and len(train | val) == 20
        validated += val
    assert len(validated) == 20 == len(set(validated))  # each photograph is in one validation set


def test_turned_and_upright_have_equal_shape_and_encoding() -> None:
    turned, upright = (Image.open(io.BytesIO(jpeg)) for jpeg in images.turned_and_upright(noise_jpeg(1, (300, 200))))
    assert turned.size == upright.size == (192, 128)
    assert turned.info.keys() == upright.info.keys()
    assert turned.quantization == upright.quantization  # type: ignore[attr-defined]
    turned_back = turned.transpose(Image.Transpose.ROTATE_180)
    error = np.abs(np.asarray(turned_back, int) - np.asarray(upright, int)).mean()
    assert error < 20 < np.abs(np.asarray(turned, int) - np.asarray(upright, int)).mean()
