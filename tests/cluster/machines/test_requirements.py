"""Requirements of a recipe beyond this project: found missing before anything is launched."""

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


def with_names(recipe: Recipe, model: str = "resnet10_tiny", weights: str | None = None, **optim: str) -> Recipe:
    return replace(recipe, model=Model(name=model, weights=weights), optim=Optim(**optim))  # type: ignore[arg-type]


def test_missing_requirements_own_model_needs_nothing(tiny: Recipe) -> None:
    assert requirements.model_library(tiny) == ""
    assert requirements.missing_requirements(tiny) == []
    assert requirements.requirements_not_sent(tiny, PROJECT_ROOT) == []


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_missing_requirements_names_missing_library(
    library: str, tiny: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_names(tiny, f"{library}:resnet18")
    monkeypatch.setattr(requirements, "_is_importable", lambda name: False)
    assert requirements.model_library(recipe) == library
    assert requirements.requirements_not_sent(recipe, PROJECT_ROOT) == []  # the machines install it themselves
    assert requirements.missing_requirements(recipe) == [
        f"model, name: {library}:resnet18 needs {library}, which is not installed here; "
        f"install it: pip install {library}"
    ]


def test_missing_requirements_looks_in_current_folder(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = with_names(tiny, "nets.small:tiny", name="nets.opt:make", loss="nets:loss")
    lines = requirements.missing_requirements(recipe)
    assert [line.partition(":")[0] for line in lines] == ["model, name", "optim, name", "optim, loss"]
    assert "no module nets.small here" in lines[0] and str(tmp_path) in lines[0]
    assert len(requirements.requirements_not_sent(recipe, PROJECT_ROOT)) == 3
    assert requirements.requirements_not_sent(with_names(tiny, "recipes:x"), PROJECT_ROOT) == []
    (tmp_path / "nets.py").write_text("raise SystemExit('imported by a check that must not run it')")
    assert requirements.missing_requirements(recipe) == [] == requirements.requirements_not_sent(recipe, tmp_path)


def test_missing_requirements_names_weights_file(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = with_names(tiny, weights="own.pt")
    assert requirements.missing_requirements(recipe) == [
        f"model, weights: {tmp_path / 'own.pt'}: there is no such file"
    ]
    (line,) = requirements.missing_requirements(with_names(tiny, "resnet50", weights="own.pt"))
    assert "torchvision.models.resnet50(weights='DEFAULT').state_dict(), 'own.pt')" in line and str(tmp_path) in line
    assert "give the whole path" in requirements.requirements_not_sent(recipe, PROJECT_ROOT)[0]
    (tmp_path / "own.pt").write_bytes(b"")
    assert requirements.missing_requirements(recipe) == []
    assert len(requirements.requirements_not_sent(with_names(tiny, weights="~/own.pt"), PROJECT_ROOT)) == 1


def test_launch_with_missing_module_is_refused_and_plan_notes_it(sandbox: Fixture) -> None:
    recipe = sandbox.write_recipe(1)
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("resnet10_tiny", "nowhere:net"))
    completed = sandbox.cli("launch", "--local", "-y", recipe)
    assert completed.code == 2 and "no module nowhere here" in completed.err and completed.err.count("\n") == 1, (
        completed
    )
    assert sandbox.cli("ls").out.strip() == "" or "job-1" not in sandbox.cli("ls").out
    completed = sandbox.cli("plan", recipe)
    assert completed.code == 0 and "note: model, name: there is no module nowhere here" in completed.out


def test_launch_exact_with_fp16_comm_is_refused(sandbox: Fixture) -> None:
    recipe = sandbox.write_recipe(1)
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("recipe = Recipe(", 'recipe = Recipe(comm="fp16", ', 1))
    completed = sandbox.cli("launch", "--local", "-y", "--exact", recipe)
    assert (
        completed.code == 2 and "the comm hook fp16, which rounds" in completed.err and completed.err.count("\n") == 1
    ), completed
