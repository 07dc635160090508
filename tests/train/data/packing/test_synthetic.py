"""Tests of the built-in sample: same bytes, ImageNet's layout, safe interruption."""

import json
import multiprocessing
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.error_lines import error_line
from support.packed_sets import content
from support.waiting import wait_for

from train.data.packing import synthetic
from train.tools.host import usable_cpu_count


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    assert synthetic.draw_sample_set(root, train=130, val=20) == 150
    return root


def test_draw_sample_set_has_layout_of_imagenet(sample: Path) -> None:
    files = content(sample)
    parameters = {"seed": 0, "train": 130, "val": 20, "version": synthetic.SAMPLE_VERSION}
    assert json.loads(files.pop("sample.json")) == parameters
    name = synthetic.CLASSES[2]
    assert files[f"train/{name}/{name}_00000012.JPEG"] == synthetic.draw_image(0, "train", 12)
    assert Counter(file.rsplit("/", 1)[0] for file in files) == {
        f"{split}/{name}": count for split, count in (("train", 13), ("val", 2)) for name in synthetic.CLASSES
    }


def test_draw_sample_set_keeps_complete_and_other_sets(sample: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sample.rglob("*")}
    assert synthetic.draw_sample_set(sample, train=130, val=20) == 0
    error_line(ValueError, synthetic.draw_sample_set, sample, match="holds a sample drawn with", seed=1)
    assert {path: path.stat().st_mtime_ns for path in sample.rglob("*")} == before
    (tmp_path / "train/n01440764").mkdir(parents=True)
    with pytest.raises(ValueError, match="n01440764"):
        synthetic.draw_sample_set(tmp_path, train=10, val=10)
    assert not list(tmp_path.rglob("*.JPEG"))


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_draw_sample_set_after_kill_resumes(tmp_path: Path, sample: Path) -> None:
    fork = multiprocessing.get_context("fork")
    parent = fork.Process(target=synthetic.draw_sample_set, args=(tmp_path,), kwargs={"train": 130, "val": 20})
    parent.start()
    wait_for(lambda: len(list(tmp_path.rglob("*.JPEG"))) > 4)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.join()
    assert len(children) == usable_cpu_count()
    wait_for(lambda: not any(map(is_alive, children)))
    assert not (tmp_path / "sample.json").exists()
    with pytest.raises(ValueError, match="holds a sample drawn with"):
        synthetic.draw_sample_set(tmp_path, seed=1, train=130, val=20)
    (tmp_path / "val" / "disc" / ".disc_00000003.JPEG.tmp").write_bytes(b"cut short")
    assert synthetic.draw_sample_set(tmp_path, train=130, val=20) > 0
    assert content(tmp_path) == content(sample)


def test_draw_sample_set_twice_at_once_draws_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(synthetic.draw_sample_set, tmp_path, train=20, val=10) for _ in range(2)]
        assert sorted(call.result(60) for call in calls) == [0, 30]
