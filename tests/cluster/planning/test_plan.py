"""plan(): GPUs, images, steps, folders and notes of a launch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.display.plan import show_schedule
from cluster.errors import BadInput
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes, plan
from train.recipe import SAMPLE, Data, Model, Phase, Recipe

Fixture = Any
PHASES = [Phase(epochs=(0, 1), size=32, batch=10, lr=0.1), Phase(epochs=(1, 3), size=64, batch=20, lr=(0.1, 0.0))]
RECIPE = Recipe(
    name="tiny", data=Data(name="d", root="/nowhere", train=1000, val=10), model=Model(name="resnet10_tiny"),
    machines=2, gpus=4, phases=PHASES,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def test_plan_local_has_one_process_and_scales_the_rate() -> None:
    planned = plan(RECIPE)
    assert (planned.spec.backend, planned.spec.machines, planned.spec.procs, planned.spec.schedule_gpus) == (
        "local",
        1,
        1,
        1,
    )
    first, second = planned.recipe_schedule.table()
    assert (first.batch, first.global_batch, first.steps) == (10, 10, 100)
    assert (second.global_batch, second.steps) == (20, 100)
    assert first.lr == pytest.approx((0.1 / 8, 0.1 / 8)) and first.lr_per_256 == pytest.approx((0.32, 0.32))
    (note,) = planned.notes
    assert "stated for 8 GPUs" in note and "linear scaling rule" in note and "0.125" in note


@pytest.mark.parametrize(("machines", "spares"), [(99_999_999, 0), (1, 99_999_999), (10_000, 1)])
def test_plan_refuses_more_machines_than_a_job_can_have(machines: int, spares: int) -> None:
    for backend in ("local", "plan"):
        options = make_launch_options(backend, machines=machines, spares=spares)
        with pytest.raises(BadInput, match=rf"^{machines + spares} machines \(--machines plus --spares\) are too many"):
            plan(RECIPE, options)


def test_plan_names_the_images_in_the_root_of_the_file_system() -> None:
    """A launch refuses them later, because there are no images."""
    planned = plan(RECIPE, make_launch_options(backend="plan", data="/"))
    assert (planned.spec.recipe.data.root, planned.spec.recipe.data.name) == ("/", "data")


def test_plan_on_the_nominal_machines_has_no_notes() -> None:
    planned = plan(RECIPE, make_launch_options(backend="plan"))
    assert (planned.spec.machines, planned.spec.procs, planned.spec.schedule_gpus, planned.notes) == (2, 4, 8, ())
    assert [row.global_batch for row in planned.recipe_schedule.table()] == [80, 160]
    assert plan(RECIPE, make_launch_options(backend="plan", machines=4)).spec.schedule_gpus == 16


def test_plan_local_has_a_process_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert plan(RECIPE).spec.procs == plan(RECIPE).spec.schedule_gpus == 3
    assert plan(RECIPE, make_launch_options(procs=2)).spec.schedule_gpus == 2


def test_plan_local_says_that_too_few_gpus_mean_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for options in (make_launch_options(machines=3, spares=1), make_launch_options(procs=4)):
        note = plan(RECIPE, options).notes[-1]
        assert note.startswith("THE JOB TRAINS ON THE CPU: its 4 trainer processes need a GPU each")
    assert not any("ON THE CPU" in note for note in plan(RECIPE, make_launch_options(machines=2, spares=1)).notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not any("ON THE CPU" in note for note in plan(RECIPE, make_launch_options(machines=2)).notes)


def test_plan_keep_batch_accumulates_gradients() -> None:
    planned = plan(RECIPE, make_launch_options(procs=2, keep_batch=True))
    assert (planned.spec.procs, planned.spec.schedule_gpus) == (2, 8)
    assert [row.global_batch for row in planned.recipe_schedule.table()] == [80, 160]
    assert planned.recipe_schedule.table()[0].lr == (0.1, 0.1)
    (note,) = planned.notes
    assert note == (
        "the schedule is for 8 GPUs: the 2 processes accumulate gradients over several batches, so that the global "
        "batch stays the same"
    )


def test_plan_names_missing_copies_and_shows_that_the_full_size_images_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(RECIPE, phases=[Phase(epochs=(0, 1), size=32, batch=10, lr=0.1, copy=80)])
    small_set = tmp_path / "set"
    for split in ("train", "val"):
        (small_set / split / "disc").mkdir(parents=True)
        (small_set / split / "disc/1.JPEG").write_bytes(b"")
    options = make_launch_options(data=str(small_set), copies=str(tmp_path / "copies"), skip_bad=True)
    planned = plan(recipe, options)
    assert planned.missing_copies == (80,)
    (note,) = [note for note in planned.notes if note.startswith("no copies of 80 pixels")]
    assert note.endswith(f"data resize {small_set} {tmp_path / 'copies'} --sizes 80 --skip-bad")
    show_schedule(planned.recipe_schedule.table(), planned.missing_copies)
    assert "no" in capsys.readouterr().out.splitlines()[-1].split()
    (tmp_path / "copies/80").mkdir(parents=True)
    assert plan(recipe, options).missing_copies == ()


def test_plan_takes_the_table_for_the_machine_count() -> None:
    (large,) = load_recipes(str(Path(__file__).resolve().parents[3] / "recipes/resnet50_18min.py"))
    assert plan(large, make_launch_options(backend="plan")).spec.machines == 16
    for machines, epochs in ((1, 28), (2, 30), (4, 30), (8, 36), (16, 50), (9, 36), (3, 30), (32, 50)):
        planned = plan(large, make_launch_options(backend="plan", machines=machines))
        assert (planned.spec.recipe.epochs, planned.spec.schedule_gpus, planned.spec.recipe.tables) == (
            epochs,
            8 * machines,
            large.tables,
        )
    assert plan(large).spec.recipe.epochs == 28, "this computer is one machine"


def test_plan_says_which_classes_lack_validation_images_and_what_is_held_out(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/cat/2.png", "train/cat/3.png", "train/dog/1.png", "val/cat/1.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text("")
    recipe = replace(RECIPE, machines=1, gpus=1)
    note = "1 of 2 classes have no validation images, so the accuracy does not count them: dog"
    assert note in plan(recipe, make_launch_options(data=str(tmp_path / "set"))).notes
    (tmp_path / "set/val/cat/1.png").unlink()
    (tmp_path / "set/val/cat").rmdir()
    (tmp_path / "set/val").rmdir()
    planned = plan(recipe, make_launch_options(data=str(tmp_path / "set"), val_fraction=0.5))
    data = planned.spec.recipe.data
    assert (data.val_fraction, data.train, data.val) == (0.5, 2, 2) and note in planned.notes
    with pytest.raises(BadInput, match=r"is not in the range 0<=x<=0\.9"):
        make_launch_options(val_fraction=0.95)


def test_plan_of_a_small_set_on_many_machines_names_the_way_out() -> None:
    (quickstart,) = load_recipes(str(Path(__file__).resolve().parents[3] / "recipes/quickstart.py"))
    assert not any("few steps" in note for note in plan(quickstart).notes)
    (note,) = [note for note in plan(quickstart, make_launch_options(machines=4)).notes if "few steps" in note]
    assert "epochs 2-6 have 16 steps each" in note and "--keep-batch" in note
    for options in ({"keep_batch": True}, {"scale": 0.5}):
        planned = plan(quickstart, make_launch_options(machines=4, **options))
        assert not any("few steps" in note for note in planned.notes)


def test_plan_counts_images_or_takes_the_recipes_number(images: Path) -> None:
    assert plan(RECIPE).recipe_schedule.images == 1000
    assert plan(RECIPE, make_launch_options(data=images)).recipe_schedule.images == 60
    assert plan(RECIPE, make_launch_options(data=images)).spec.train.data == str(images)


def test_plan_counts_only_visible_files_in_class_folders(tmp_path: Path) -> None:
    for name in ("train/a/1.JPEG", "train/a/.hidden", "train/b/2.JPEG", "train/list.txt", "val/a/3.JPEG"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert plan(RECIPE, make_launch_options(data=tmp_path)).recipe_schedule.images == 2


@pytest.mark.parametrize("scale, images", [(1.0, 1000), (0.5, 500), (0.01, 10), (0.0101, 11), (0.1, 100), (1e-9, 1)])
def test_plan_scale_takes_a_fraction_of_the_images(scale: float, images: int) -> None:
    assert plan(RECIPE, make_launch_options(scale=scale)).recipe_schedule.images == images


def test_plan_max_steps_are_divided_among_all_phases() -> None:
    assert [row.steps for row in plan(RECIPE, make_launch_options(max_steps=10)).recipe_schedule.table()] == [5, 5]
    assert plan(RECIPE, make_launch_options(max_steps=2)).recipe_schedule.steps == 2
    assert plan(RECIPE, make_launch_options(max_steps=10**9)).recipe_schedule.steps == 200
    with pytest.raises(BadInput, match="1 is too few"):
        plan(RECIPE, make_launch_options(max_steps=1))


def test_plan_seed_replaces_the_recipes_seed() -> None:
    assert plan(RECIPE).spec.recipe.seed == 0
    assert plan(RECIPE, make_launch_options(seed=7)).spec.recipe.seed == 7


def test_plan_generates_the_sample_set_if_requested(tmp_path: Path) -> None:
    sample = plan(RECIPE, make_launch_options(data="sample"))
    assert sample.spec.generate_data and sample.spec.recipe.data == SAMPLE and sample.recipe_schedule.images == 4000
    assert sample.spec.train.data == str(tmp_path / SAMPLE.root)
    (quickstart,) = load_recipes(str(Path(__file__).resolve().parents[3] / "recipes/quickstart.py"))
    assert (
        plan(quickstart).spec.generate_data
        and not plan(quickstart, make_launch_options(data="/elsewhere")).spec.generate_data
        and not plan(RECIPE).spec.generate_data
    )


def test_plan_makes_data_folders_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    planned = plan(RECIPE, make_launch_options(data="~/images"))
    assert (planned.spec.train.data, planned.spec.train.copies) == ("/home/someone/images", "/home/someone/images-sz")
    assert plan(RECIPE, make_launch_options(data="images")).spec.train.data == str(tmp_path / "images")
    assert plan(RECIPE, make_launch_options(copies="small")).spec.train.copies == str(tmp_path / "small")


def test_plan_creates_no_files(tmp_path: Path) -> None:
    plan(RECIPE, make_launch_options(data="sample"))
    assert list(tmp_path.iterdir()) == []
