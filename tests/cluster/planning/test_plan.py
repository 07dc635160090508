"""plan(): GPUs, images, steps, folders and notes of a launch."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.display.plan import show_schedule
from cluster.errors import BadInput
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes, plan
from train.recipe import SAMPLE, Data, Model, Phase, Recipe

PHASES = [Phase(epochs=(0, 1), size=32, batch=10, lr=0.1), Phase(epochs=(1, 3), size=64, batch=20, lr=(0.1, 0.0))]
RECIPE = Recipe(
    name="tiny", data=Data(name="d", root="/nowhere", train=1000, val=10), model=Model(name="resnet10_tiny"),
    machines=2, gpus=4, phases=PHASES,
)  # fmt: skip
(LARGE,), (QUICKSTART,) = (load_recipes(f"recipes/{name}") for name in ("resnet50_18min.py", "quickstart.py"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("options", "processes", "batches", "first_lr", "note"), [
    pytest.param({}, (1, 1, 1), [10, 20], 0.1 / 8, "for 8 GPUs; .* linear scaling rule, .* by 0.125$", id="local"),
    pytest.param({"backend": "plan"}, (2, 4, 8), [80, 160], 0.1, "", id="the recipe's machines"),
    pytest.param(
        {"procs": 2, "keep_batch": True}, (1, 2, 8), [80, 160], 0.1,
        "the schedule is for 8 GPUs: the 2 processes accumulate gradients over several batches", id="keep batch",
    ),
])  # fmt: skip
def test_plan_has_processes_batches_rates_and_says_why_they_differ(
    options: Any, processes: tuple[int, ...], batches: list[int], first_lr: float, note: str
) -> None:
    planned = plan(RECIPE, make_launch_options(**options))
    assert (planned.spec.machines, planned.spec.procs, planned.spec.schedule_gpus) == processes
    table = planned.recipe_schedule.table()
    assert [row.global_batch for row in table] == batches and table[0].lr == pytest.approx((first_lr, first_lr))
    assert len(planned.notes) == bool(note) and re.search(note, "".join(planned.notes))


def test_plan_local_has_a_process_per_gpu_and_says_that_too_few_mean_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_on_cpu(**options: Any) -> bool:
        return any("TRAINS ON THE CPU: its 4" in note for note in plan(RECIPE, make_launch_options(**options)).notes)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert plan(RECIPE).spec.procs == plan(RECIPE).spec.schedule_gpus == 3
    assert is_on_cpu(machines=3, spares=1) and is_on_cpu(procs=4) and not is_on_cpu(machines=2, spares=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not is_on_cpu(machines=4)


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
    assert plan(LARGE, make_launch_options(backend="plan")).spec.machines == 16
    for machines, epochs in ((1, 28), (2, 30), (4, 30), (8, 36), (16, 50), (9, 36), (3, 30), (32, 50)):
        spec = plan(LARGE, make_launch_options(backend="plan", machines=machines)).spec
        assert (spec.recipe.epochs, spec.schedule_gpus, spec.recipe.tables) == (epochs, 8 * machines, LARGE.tables)
    assert plan(LARGE).spec.recipe.epochs == 28, "this computer is one machine"


def test_plan_counts_images_and_says_which_classes_lack_validation_images_and_what_is_held_out(tmp_path: Path) -> None:
    names = ("cat/1.png", "cat/2.png", "cat/3.png", "dog/1.png", "dog/.hidden", "list.txt")
    for name in (*(f"train/{name}" for name in names), "val/cat/1.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text("")
    recipe = replace(RECIPE, machines=1, gpus=1)
    note = "1 of 2 classes have no validation images, so the accuracy does not count them: dog"
    planned = plan(recipe, make_launch_options(data=str(tmp_path / "set")))
    assert planned.recipe_schedule.images == 4 and note in planned.notes
    shutil.rmtree(tmp_path / "set/val")
    planned = plan(recipe, make_launch_options(data=str(tmp_path / "set"), val_fraction=0.5))
    data = planned.spec.recipe.data
    assert (data.val_fraction, data.train, data.val) == (0.5, 2, 2) and note in planned.notes


def test_plan_of_a_small_set_on_many_machines_names_the_way_out() -> None:
    def notes(**options: Any) -> list[str]:
        return [note for note in plan(QUICKSTART, make_launch_options(**options)).notes if "few steps" in note]

    (note,) = notes(machines=4)
    assert "epochs 2-6 have 16 steps each" in note and "--keep-batch" in note
    assert not notes() and not notes(machines=4, keep_batch=True) and not notes(machines=4, scale=0.5)


def test_plan_scale_seed_and_max_steps() -> None:
    images = {1.0: 1000, 0.5: 500, 0.01: 10, 0.0101: 11, 1e-9: 1}
    planned = {scale: plan(RECIPE, make_launch_options(scale=scale)).recipe_schedule.images for scale in images}
    assert planned == images
    assert plan(RECIPE, make_launch_options(seed=7)).spec.recipe.seed == 7 != RECIPE.seed
    assert [row.steps for row in plan(RECIPE, make_launch_options(max_steps=10)).recipe_schedule.table()] == [5, 5]
    assert plan(RECIPE, make_launch_options(max_steps=10**9)).recipe_schedule.steps == 200
    with pytest.raises(BadInput, match="1 is too few"):
        plan(RECIPE, make_launch_options(max_steps=1))


def test_plan_generates_the_sample_set_if_requested_and_makes_data_folders_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(recipe: Recipe, **options: str) -> tuple[bool, str, str]:
        spec = plan(recipe, make_launch_options(**options)).spec
        return spec.generate_data, spec.train.data, spec.train.copies

    monkeypatch.setenv("HOME", "/home/someone")
    assert folders(RECIPE, backend="plan", data="~/images") == (
        False,
        "/home/someone/images",
        "/home/someone/images-sz",
    )
    assert folders(QUICKSTART, backend="plan", data="images")[:2] == (False, f"{tmp_path}/images")
    assert folders(RECIPE, copies="small")[2] == f"{tmp_path}/small"
    assert folders(RECIPE, data="sample")[:2] == folders(QUICKSTART)[:2] == (True, f"{tmp_path}/{SAMPLE.root}")
    sample = plan(RECIPE, make_launch_options(data="sample"))
    assert (sample.spec.recipe.data, sample.recipe_schedule.images) == (SAMPLE, 4000) and not list(tmp_path.iterdir())
