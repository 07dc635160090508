"""Requirements of a recipe beyond this project: found missing before anything is launched."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import BadInput
from cluster.machines import requirements
from cluster.state.spec import UserProject
from train.recipe import SAMPLE, Model, Optim, Phase, Recipe

TINY = Recipe(
    name="tiny",
    data=SAMPLE,
    model=Model(name="resnet10_tiny"),
    phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1)],
)


def recipe_with(model: str = "resnet10_tiny", weights: str | None = None, **optim: str) -> Recipe:
    return replace(TINY, model=Model(name=model, weights=weights), optim=Optim(**optim))  # type: ignore[arg-type]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_missing_requirements_names_missing_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_with(f"{library}:resnet18")
    monkeypatch.setattr(requirements, "_is_importable", lambda name: False)
    assert requirements.model_library(recipe) == library
    assert requirements.requirements_not_sent(recipe, None) == []  # the machines install it themselves
    assert requirements.missing_requirements(recipe) == [
        f"model, name: {library}:resnet18 needs {library}, which is not installed here; "
        f"install it: pip install {library}"
    ]


def test_missing_requirements_looks_in_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_with("nets.small:tiny", name="nets.opt:make", loss="nets:loss")
    lines = requirements.missing_requirements(recipe)
    assert [line.partition(":")[0] for line in lines] == ["model, name", "optim, name", "optim, loss"]
    assert "no module nets.small here" in lines[0] and str(tmp_path) in lines[0]
    assert len(requirements.requirements_not_sent(recipe, None)) == 3
    project = UserProject(folder=str(tmp_path), search=("code",))
    (tmp_path / "code").mkdir()
    assert len(requirements.requirements_not_sent(recipe, project)) == 3
    (tmp_path / "code/nets.py").write_text("raise SystemExit('imported by a check that must not run it')")
    assert len(requirements.missing_requirements(recipe)) == 3
    assert requirements.missing_requirements(recipe, project) == []
    assert requirements.requirements_not_sent(recipe, project) == []
    (tmp_path / "code/nets.py").rename(tmp_path / "nets.py")
    assert requirements.missing_requirements(recipe) == []


@pytest.mark.parametrize(("code", "is_found"), [
    ("def small(): ...", True),
    ("if True:\n    small = large = print", True),
    ("from somewhere import large as small", True),
    ("def __getattr__(name): return print", True),
    ("globals()['sm' + 'all'] = print", True),
    ("def", True),  # the trainer says where
    ("raise SystemExit('imported by a check that must not run it')\ndef smal(): ...", False),
])  # fmt: skip
def test_function_of_a_module_is_looked_up_without_running_it(code: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "nets.py"
    file.write_text(code)
    project = UserProject(folder=str(tmp_path), search=(".",))
    recipe = recipe_with("mine.nets:small", loss="elsewhere:loss")
    if is_found:
        return requirements.require_functions(recipe, project)
    with pytest.raises(BadInput) as caught:
        requirements.require_functions(recipe, project)
    assert str(caught.value) == f"model, name: mine.nets has no function small; correct the recipe, or {file}"


def test_missing_requirements_names_weights_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_with(weights="own.pt")
    assert requirements.missing_requirements(recipe) == [
        f"model, weights: {tmp_path / 'own.pt'}: there is no such file"
    ]
    (line,) = requirements.missing_requirements(recipe_with("resnet50", weights="own.pt"))
    assert "torchvision.models.resnet50(weights='DEFAULT').state_dict(), 'own.pt')" in line and str(tmp_path) in line
    assert "give the whole path" in requirements.requirements_not_sent(recipe, None)[0]
    (tmp_path / "own.pt").write_bytes(b"")
    assert requirements.missing_requirements(recipe) == []
    assert len(requirements.requirements_not_sent(recipe_with(weights="~/own.pt"), None)) == 1


@pytest.mark.parametrize(("text", "new_text", "option", "problem"), [
    ("resnet10_tiny", "nowhere:net", "--yes", "no module nowhere here"),
    ("recipe = Recipe(", 'recipe = Recipe(comm="fp16", ', "--exact", "the comm hook fp16, which rounds"),
])  # fmt: skip
def test_launch_without_what_the_recipe_needs_is_refused(
    sandbox: Any, text: str, new_text: str, option: str, problem: str
) -> None:
    recipe = Path(sandbox.write_recipe(1))
    recipe.write_text(recipe.read_text().replace(text, new_text, 1))
    launched = sandbox.cli("launch", "--local", "-y", option, recipe)
    assert launched.code == 2 and launched.err.count("\n") == 1, launched
    assert (launched.out + launched.err).count(problem) == 1 and "job-1" not in sandbox.cli("ls").out
    if option == "--yes":
        planned = sandbox.cli("plan", recipe)
        assert planned.code == 0 and "note: model, name: there is no module nowhere here" in planned.out
