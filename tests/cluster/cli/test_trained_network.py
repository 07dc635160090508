"""`export`, `predict` and `pull` of a finished job, and what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from train.data.decode import NOT_AN_IMAGE
from train.weights.safetensors_file import read_safetensors


def test_export_writes_a_state_dict_for_plain_torch(finished: Any, tmp_path: Path) -> None:
    file = tmp_path / "net.pt"
    # An export in another format has left it already.
    shutil.copy(finished.job().path / "network" / "classes.json", tmp_path / "net.classes.json")
    ran = finished.cli("export", "job-1", "--format", "torch", "-o", file)
    assert ran.code == 0, ran
    state = torch.load(file, weights_only=True)
    expected = read_safetensors(finished.job().path / "network" / "model.safetensors")
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{file}: resnet10_tiny after 3 epochs, top-1 ")
    assert lines[1].startswith(f"{tmp_path / 'net.classes.json'}: ") and lines[2].startswith("load it: ")
    for written in (file, tmp_path / "net.safetensors"):
        if written != file:
            lines = finished.cli("export", "job-1", "-o", written).out.splitlines()
        loaded: dict[str, torch.nn.Module] = {}
        exec(lines[2].removeprefix("load it: "), {}, loaded)  # the line runs as it is printed
        assert all(torch.equal(loaded["net"].state_dict()[name], expected[name]) for name in expected)
    again = finished.cli("export", "job-1", "--format", "torch", "-o", file)
    assert again.code == 2 and again.err == f"error: {file}: exists already; remove it, or name another file: -o FILE\n"


def test_export_default_name_is_the_jobs(finished: Any, tmp_path: Path) -> None:
    ran = finished.cli("export", "job-1", cwd=tmp_path, env={"IMGNET_RUNS": str(finished.path / "runs")})
    assert ran.code == 0 and {path.name for path in tmp_path.iterdir()} == {"job-1.classes.json", "job-1.safetensors"}
    ran = finished.cli("predict", tmp_path / "job-1.safetensors", next((finished.data / "val").glob("*/*")))
    assert ran.code == 0 and len(ran.out.splitlines()) == 6, ran


def test_predict_answers_for_each_image(finished: Any, tmp_path: Path) -> None:
    images = sorted((finished.data / "val").glob("*/*"))[:2]
    ran = finished.cli("predict", "job-1", *images, "-o", "json")
    assert ran.code == 0, ran
    predictions = json.loads(ran.out)
    assert [prediction["file"] for prediction in predictions] == list(map(str, images))
    for prediction in predictions:
        percents = [answer["percent"] for answer in prediction["answers"]]
        assert len(percents) == 5 and percents == sorted(percents, reverse=True) and sum(percents) <= 100.01
    (tmp_path / "bad.jpg").write_text("no image")
    ran = finished.cli("predict", "job-1", images[0], tmp_path / "bad.jpg")
    assert ran.code == 1 and ran.out.splitlines()[0] == str(images[0]) and len(ran.out.splitlines()) == 6
    assert ran.err == f"warning: {tmp_path}/bad.jpg: {NOT_AN_IMAGE}\nerror: 1 of 2 images could not be read\n"
    ran = finished.cli("predict", "job-1", images[0], tmp_path / "none.jpg")
    assert (ran.code, ran.out, ran.err) == (2, "", f"error: {tmp_path}/none.jpg: there is no such file\n")


def test_pull_says_where_the_files_are(finished: Any) -> None:
    ran = finished.cli("pull", "job-1")
    assert ran.code == 0, ran
    files = [Path(line.rsplit("  ", 1)[0]) for line in ran.out.splitlines()]
    assert finished.job().path / "network" / "model.safetensors" in files and all(file.is_file() for file in files)
