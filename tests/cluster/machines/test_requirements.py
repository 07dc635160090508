"""What a recipe needs besides the project is asked for before anything is launched."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.local import PROJECT_ROOT
from cluster.machines import requirements
from train.recipe import SAMPLE, Model, Optim, Phase, Recipe

Fixture = Any


@pytest.fixture
def tiny() -> Recipe:
    return Recipe(
        name="tiny",
        data=SAMPLE,
        model=Model(name="resnet10_tiny"),
        phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1)],
    )


def named(recipe: Recipe, model: str = "resnet10_tiny", weights: str | None = None, **optim: str) -> Recipe:
    return replace(recipe, model=Model(name=model, weights=weights), optim=Optim(**optim))  # type: ignore[arg-type]


def test_of_ours_nothing_is_missing_anywhere(tiny: Recipe) -> None:
    assert requirements.model_library(tiny) == "" and requirements.missing_requirements(
        tiny
    ) == [] == requirements.requirements_not_sent(tiny, PROJECT_ROOT)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed_is_named(library: str, tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = named(tiny, f"{library}:resnet18")
    monkeypatch.setattr(requirements, "_is_importable", lambda name: False)
    assert (
        requirements.model_library(recipe) == library and requirements.requirements_not_sent(recipe, PROJECT_ROOT) == []
    )  # the machines install it
    assert requirements.missing_requirements(recipe) == [
        f"model, name: {library}:resnet18 needs {library}, which is not installed here; pip install {library}"
    ]


def test_somebodys_module_is_looked_for_where_the_trainer_looks(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = named(tiny, "nets.small:tiny", name="nets.opt:make", loss="nets:loss")
    assert [line.partition(":")[0] for line in requirements.missing_requirements(recipe)] == [
        "model, name",
        "optim, name",
        "optim, loss",
    ]
    assert (
        "no module nets.small here" in requirements.missing_requirements(recipe)[0]
        and str(tmp_path) in requirements.missing_requirements(recipe)[0]
    )
    assert (
        len(requirements.requirements_not_sent(recipe, PROJECT_ROOT)) == 3
        and requirements.requirements_not_sent(named(tiny, "recipes:x"), PROJECT_ROOT) == []
    )
    (tmp_path / "nets.py").write_text("raise SystemExit('run by somebody who only asks whether it is there')")
    assert requirements.missing_requirements(recipe) == [] == requirements.requirements_not_sent(recipe, tmp_path)


def test_a_file_of_weights_is_named_whole(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = named(tiny, weights="own.pt")
    assert requirements.missing_requirements(recipe) == [
        f"model, weights: {tmp_path / 'own.pt'}: there is no such file"
    ]
    assert "give the whole path" in requirements.requirements_not_sent(recipe, PROJECT_ROOT)[0]
    (tmp_path / "own.pt").write_bytes(b"")
    assert (
        requirements.missing_requirements(recipe) == []
        and len(requirements.requirements_not_sent(named(tiny, weights="~/own.pt"), PROJECT_ROOT)) == 1
    )


def test_a_launch_here_is_refused_and_a_plan_tells(place: Fixture) -> None:
    recipe = place.recipe(1)
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("resnet10_tiny", "nowhere:net"))
    ran = place.cli("launch", "--local", "-y", recipe)
    assert ran.code == 2 and "no module nowhere here" in ran.err and ran.err.count("\n") == 1, ran
    assert place.cli("ls").out.strip() == "" or "job-1" not in place.cli("ls").out
    ran = place.cli("plan", recipe)
    assert ran.code == 0 and "note: model, name: there is no module nowhere here" in ran.out


def test_exact_sums_want_plain_ones(place: Fixture) -> None:
    recipe = place.recipe(1)
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("recipe = Recipe(", 'recipe = Recipe(comm="fp16", ', 1))
    ran = place.cli("launch", "--local", "-y", "--exact", recipe)
    assert ran.code == 2 and "comm fp16 rounds" in ran.err and ran.err.count("\n") == 1, ran
