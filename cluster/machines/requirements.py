"""What a recipe needs beside this project: a model library, the user's own modules, a file of weights.

Checked before a launch. Only the trainer imports the modules; here they are located without running their code.
"""

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from train.recipe.schema import Recipe
from train.recipe.validators import MODEL_LIBRARIES

# Networks of this project that torchvision has weights for, under the same name.
TORCHVISION_MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def model_library(recipe: Recipe) -> str:
    """Return the library that the recipe's model comes from, such as "timm"; "" if it needs none."""
    name, colon, _ = recipe.model.name.partition(":")
    return name if colon and name in MODEL_LIBRARIES else ""


def user_modules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (recipe field, module) for each function that the recipe names as package.module:function."""
    functions_by_field = {
        "model, name": recipe.model.name,
        "optim, name": recipe.optim.name,
        "optim, loss": recipe.optim.loss,
    }
    for field, function in functions_by_field.items():
        module, colon, _ = function.partition(":")
        if colon and module not in MODEL_LIBRARIES:
            yield field, module


def missing_requirements(recipe: Recipe) -> list[str]:
    """Return one line for each requirement that is missing on this computer."""
    lines = []
    if (library := model_library(recipe)) and not _is_importable(library):
        lines.append(
            f"model, name: {recipe.model.name} needs {library}, which is not installed here; "
            f"install it: pip install {library}"
        )
    for field, module in user_modules(recipe):
        if not _is_importable(module.partition(".")[0]):
            lines.append(
                f"{field}: there is no module {module} here: "
                f"it is neither in {Path.cwd()} nor in PYTHONPATH, nor installed"
            )
    if recipe.model.weights:
        path = Path(recipe.model.weights).expanduser().absolute()
        if not path.is_file():
            lines.append(f"model, weights: {path}: there is no such file{_download_hint(recipe.model.name, path)}")
    return lines


def _download_hint(model_name: str, path: Path) -> str:
    """Return how to create a file of pretrained weights, "" for a network that torchvision does not have."""
    if model_name not in TORCHVISION_MODELS:
        return ""
    save = f"torch.save(torchvision.models.{model_name}(weights='DEFAULT').state_dict(), '{path.name}')"
    return (
        f"; to create it in {path.parent}, with torchvision's weights: "
        f'pip install torchvision; python -c "import torch, torchvision; {save}"'
    )


def requirements_not_sent(recipe: Recipe, code_root: Path) -> list[str]:
    """Return one line for each requirement that is not sent to the machines with the code of `code_root`.

    The user has to bring these to the machines.
    """
    lines = [
        f"{field}: {module} must be installed on the machines; only files in {code_root} are sent there"
        for field, module in user_modules(recipe)
        if not PathFinder.find_spec(module.partition(".")[0], [str(code_root)])
    ]
    if weights := recipe.model.weights:
        is_absolute = weights.startswith(("/", "~"))
        hint = "" if is_absolute else f"; give the whole path, such as ~/.imgnet/shared/{Path(weights).name}"
        lines.append(f"model, weights: {weights} must exist on each machine{hint}")
    return lines


def _is_importable(name: str) -> bool:
    """Whether a trainer would find a top-level module here. It also looks in the folder in which it is started."""
    return PathFinder.find_spec(name, [*sys.path, str(Path.cwd())]) is not None
