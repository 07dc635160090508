"""What a launch would do: how many GPUs, images and steps, from where, and what a person should read."""

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import BadInput
from cluster.planning.resolve import load_recipes, plan
from train.recipe import SAMPLE, Data, Model, Phase, Recipe

Fixture = Any
ROWS = [Phase(epochs=(0, 1), size=32, batch=10, lr=0.1), Phase(epochs=(1, 3), size=64, batch=20, lr=(0.1, 0.0))]
RECIPE = Recipe(
    name="tiny", data=Data(name="d", root="/nowhere", train=1000, val=10), model=Model(name="resnet10_tiny"),
    machines=2, gpus=4, phases=ROWS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def test_a_recipe_is_planned_here_with_one_process_and_the_linear_rule() -> None:
    one = plan(RECIPE)
    assert (one.spec.backend, one.spec.machines, one.spec.procs, one.spec.schedule_gpus) == ("local", 1, 1, 1)
    first, second = one.schedule.table()
    assert (first["batch"], first["global_batch"], first["steps"]) == (10, 10, 100)
    assert (second["global_batch"], second["steps"]) == (20, 100)
    assert first["lr"] == pytest.approx([0.1 / 8, 0.1 / 8]) and first["lr_per_256"] == pytest.approx([0.32, 0.32])
    (note,) = one.notes
    assert "stated for 8 GPUs" in note and "linear rule" in note and "0.125" in note


def test_on_the_nominal_machines_nothing_is_changed_and_nothing_is_said() -> None:
    one = plan(RECIPE, backend="plan")
    assert (one.spec.machines, one.spec.procs, one.spec.schedule_gpus, one.notes) == (2, 4, 8, ())
    assert [row["global_batch"] for row in one.schedule.table()] == [80, 160]
    assert plan(RECIPE, backend="plan", machines=4).spec.schedule_gpus == 16


def test_there_is_a_process_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert plan(RECIPE).spec.procs == plan(RECIPE).spec.schedule_gpus == 3
    assert plan(RECIPE, procs=2).spec.schedule_gpus == 2


def test_the_global_batch_can_be_kept_with_fewer_processes() -> None:
    one = plan(RECIPE, procs=2, keep_batch=True)
    assert (one.spec.procs, one.spec.schedule_gpus) == (2, 8)
    assert [row["global_batch"] for row in one.schedule.table()] == [80, 160]
    assert one.schedule.table()[0]["lr"] == [0.1, 0.1]
    (note,) = one.notes
    assert note == "the schedule is that of 8 GPUs: each of 2 processes accumulates gradients"


def test_the_table_for_the_number_of_machines_is_taken() -> None:
    (large,) = load_recipes(str(Path(__file__).resolve().parents[3] / "recipes/resnet50_18min.py"))
    assert plan(large, backend="plan").spec.machines == 16
    for asked, found in ((1, 28), (2, 30), (4, 30), (8, 36), (16, 50), (9, 36), (3, 30), (32, 50)):
        one = plan(large, backend="plan", machines=asked)
        assert (one.spec.recipe.epochs, one.spec.schedule_gpus, one.spec.recipe.tables) == (
            found,
            8 * asked,
            large.tables,
        )
    assert plan(large).spec.recipe.epochs == 28, "here is one machine"


def test_images_are_counted_in_the_folder_and_where_there_is_none_the_recipe_tells(images: Path) -> None:
    assert plan(RECIPE).schedule.images == 1000
    assert plan(RECIPE, data=images).schedule.images == 60
    assert plan(RECIPE, data=images).spec.data == str(images)


def test_hidden_files_and_files_beside_the_classes_are_not_counted(tmp_path: Path) -> None:
    for name in ("train/a/1.JPEG", "train/a/.hidden", "train/b/2.JPEG", "train/list.txt", "val/a/3.JPEG"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert plan(RECIPE, data=tmp_path).schedule.images == 2


@pytest.mark.parametrize("scale, images", [(1.0, 1000), (0.5, 500), (0.01, 10), (0.0101, 11), (0.1, 100), (1e-9, 1)])
def test_a_rehearsal_takes_a_fraction_and_one_image_at_least(scale: float, images: int) -> None:
    assert plan(RECIPE, scale=scale).schedule.images == images


def test_so_many_steps_are_shared_out_and_every_phase_has_one() -> None:
    assert [row["steps"] for row in plan(RECIPE, max_steps=10).schedule.table()] == [5, 5]
    assert plan(RECIPE, max_steps=2).schedule.steps == 2
    assert plan(RECIPE, max_steps=10**9).schedule.steps == 200
    with pytest.raises(BadInput, match="1 is too few"):
        plan(RECIPE, max_steps=1)


def test_another_seed_is_the_recipes_seed() -> None:
    assert plan(RECIPE).spec.recipe.seed == 0
    assert plan(RECIPE, seed=7).spec.recipe.seed == 7


def test_the_built_in_set_is_drawn_when_it_is_asked_for_or_the_recipe_names_it(tmp_path: Path) -> None:
    asked = plan(RECIPE, data="sample")
    assert asked.spec.generate_data and asked.spec.recipe.data == SAMPLE and asked.schedule.images == 4000
    assert asked.spec.data == str(tmp_path / SAMPLE.root)
    (own,) = load_recipes(str(Path(__file__).resolve().parents[3] / "recipes/quickstart.py"))
    assert (
        plan(own).spec.generate_data
        and not plan(own, data="/elsewhere").spec.generate_data
        and not plan(RECIPE).spec.generate_data
    )


def test_folders_are_absolute_and_copies_lie_beside_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    one = plan(RECIPE, data="~/images")
    assert (one.spec.data, one.spec.copies) == ("/home/someone/images", "/home/someone/images-sz")
    assert plan(RECIPE, data="images").spec.data == str(tmp_path / "images")
    assert plan(RECIPE, copies="small").spec.copies == str(tmp_path / "small")


def test_planning_makes_nothing(tmp_path: Path) -> None:
    plan(RECIPE, data="sample")
    assert list(tmp_path.iterdir()) == []
