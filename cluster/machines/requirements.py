"""What a recipe needs besides the project: a library, somebody's module, a file of weights. Looked at before a launch.

Only the trainer imports them; here it is asked whether they are there, without running any of them.
"""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from train.recipe.schema import Recipe
from train.recipe.validators import MODEL_LIBRARIES


def model_library(recipe: Recipe) -> str:
    """Return the library that the model comes from, "" when it needs none."""
    name, colon, _ = recipe.model.name.partition(":")
    return name if colon and name in MODEL_LIBRARIES else ""


def user_modules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the field and the module of each function that the recipe names as package.module:function."""
    for field, name in (
        ("model, name", recipe.model.name), ("optim, name", recipe.optim.name), ("optim, loss", recipe.optim.loss),
    ):  # fmt: skip
        module, colon, _ = name.partition(":")
        if colon and module not in MODEL_LIBRARIES:
            yield field, module


def missing_requirements(recipe: Recipe) -> list[str]:
    """Return a line for each thing that is not on this computer."""
    lines = []
    if (name := model_library(recipe)) and not _is_importable(name):
        lines.append(f"model, name: {recipe.model.name} needs {name}, which is not installed here; pip install {name}")
    for field, module in user_modules(recipe):
        if not _is_importable(module.partition(".")[0]):
            where = f"it is neither in {Path.cwd()} nor in PYTHONPATH, nor installed"
            lines.append(f"{field}: there is no module {module} here: {where}")
    if recipe.model.weights and not (path := Path(recipe.model.weights).expanduser().absolute()).is_file():
        lines.append(f"model, weights: {path}: there is no such file")
    return lines


def requirements_not_sent(recipe: Recipe, code_root: Path) -> list[str]:
    """Return a line for each thing that other machines must have and that is not sent there with the code of `root`."""
    lines = [
        f"{field}: {module} must be installed on the machines; only files in {code_root} are sent there"
        for field, module in user_modules(recipe)
        if not PathFinder.find_spec(module.partition(".")[0], [str(code_root)])
    ]
    if weights := recipe.model.weights:
        whole = weights.startswith(("/", "~"))
        more = "" if whole else "; say the whole path, such as ~/.imgnet/shared/" + Path(weights).name
        lines.append(f"model, weights: {weights} must lie on each machine{more}")
    return lines


def _is_importable(name: str) -> bool:
    """Whether a trainer would find a top-level module here: it looks into the folder that it is started in, too."""
    return PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is not None
