"""Images of a rented job: the plan says where they must be, and a job that certainly has none is refused."""

from pathlib import Path

import pytest

from cluster.backends.aws.planning.image_location import find_obstacle
from cluster.errors import BadInput
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from train.recipe import IMAGENET, Model, Phase, Recipe

RECIPE = Recipe(
    name="small",
    data=IMAGENET,
    model=Model(name="resnet50"),
    gpus=8,
    types=("p4d.24xlarge",),
    phases=[Phase(epochs=(0, 1), size=128, batch=32, lr=0.1)],
)


@pytest.mark.parametrize(
    ("folder", "ami", "has_file_system", "expected"),
    [
        ("~/data/imagenet", "", True, "no folder of this computer"),
        (str(Path.home() / "data/imagenet"), "", True, "no folder of this computer"),
        ("~/data/imagenet", "ami-1", True, ""),
        ("/data/imagenet", "", False, ""),
        ("~/.imgnet/shared/data/own", "", True, ""),
        ("~/.imgnet/shared/data/own", "ami-1", False, "does not exist yet"),
        ("/home/ubuntu/.imgnet/shared/own", "", False, "does not exist yet"),
    ],
)
def test_folder_without_images_is_an_obstacle(folder: str, ami: str, has_file_system: bool, expected: str) -> None:
    obstacle = find_obstacle(Path(folder), ami, has_file_system)
    assert expected in obstacle and bool(expected) == bool(obstacle)
    assert not obstacle or "imgnet-cluster data put FOLDER s3://BUCKET/NAME" in obstacle


def test_launch_with_images_of_this_computer_alone_rents_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMGNET_RUNS", str(tmp_path / "runs"))
    planned = submit.plan(RECIPE, make_launch_options("aws"), offline=True)
    assert planned.obstacles == (find_obstacle(Path("~/data/imagenet"), "", True),)
    with pytest.raises(BadInput, match=r"^~/data/imagenet: rented machines have no folder of this computer"):
        submit.launch(planned)
    assert not (tmp_path / "runs").exists()
