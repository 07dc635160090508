"""What a recipe needs beside this project: a model library, the user's own modules, a file of weights.

Checked before a launch. Only the trainer imports the modules; here they are located without running their code.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from cluster.errors import BadInput
from cluster.state.spec import UserProject
from train.recipe.recipe_files import bound_names
from train.recipe.schema import Recipe
from train.recipe.validators import MODEL_LIBRARIES

# Networks of this project that torchvision has weights for, under the same name.
TORCHVISION_MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

# A module with one of these texts may define names that its syntax tree does not show.
DYNAMIC_CODE = (b"globals(", b"exec(", b"setattr(", b"sys.modules")


def model_library(recipe: Recipe) -> str:
    """Return the library that the recipe's model comes from, such as "timm"; "" if it needs none."""
    name, colon, _ = recipe.model.name.partition(":")
    return name if colon and name in MODEL_LIBRARIES else ""


def user_functions(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield (recipe field, module, name) for each function that the recipe names as package.module:name."""
    functions_by_field = {
        "model, name": recipe.model.name,
        "optim, name": recipe.optim.name,
        "optim, loss": recipe.optim.loss,
        "transform": recipe.transform or "",
    }
    for field, function in functions_by_field.items():
        module, colon, name = function.partition(":")
        if colon and module not in MODEL_LIBRARIES:
            yield field, module, name


def require_functions(recipe: Recipe, project: UserProject | None) -> None:
    """Raise `BadInput` when a package of the user's project lacks the module or the function that the recipe names."""
    folders = project.search_folders(Path(project.folder)) if project else ()
    for field, module, name in user_functions(recipe):
        package = module.partition(".")[0]
        spec = find_module(module, folders)
        if not spec and find_module(package, folders):
            raise BadInput(f"{field}: there is no module {module} in {package} of {folders[0]}; correct the recipe")
        file = Path(spec.origin) if spec and spec.origin else Path()
        if file.suffix != ".py" or not bound_names(file).isdisjoint({name, "*", "__getattr__"}):
            continue
        if not any(text in file.read_bytes() for text in DYNAMIC_CODE):
            raise BadInput(f"{field}: {module} has no function {name}; correct the recipe, or {file}")


def find_module(module: str, folders: Iterable[str | Path]) -> ModuleSpec | None:
    """Return the specification of a module below folders, None when there is none. Imports nothing."""
    search: Iterable[str] | None = map(str, folders)
    spec = None
    for name in module.split("."):
        # By its own name only: with the whole name, Python asks for the imported parent of a package without a file.
        spec = PathFinder.find_spec(name, list(search)) if search else None
        search = spec.submodule_search_locations if spec else None
    return spec


def missing_requirements(recipe: Recipe, project: UserProject | None = None) -> list[str]:
    """Return one line for each requirement that trainers on this computer would not find."""
    lines = []
    if (library := model_library(recipe)) and not _is_importable(library):
        lines.append(
            f"model, name: {recipe.model.name} needs {library}, which is not installed here; "
            f"install it: pip install {library}"
        )
    for field, module, _ in user_functions(recipe):
        if not (_is_in_project(module, project) or _is_importable(module.partition(".")[0])):
            lines.append(
                f"{field}: there is no module {module} here: "
                f"it is neither beside the recipe nor in {Path.cwd()} nor in PYTHONPATH, nor installed"
            )
    if recipe.model.weights:
        path = Path(recipe.model.weights).expanduser().absolute()
        if not path.is_file():
            lines.append(f"model, weights: {path}: there is no such file{_download_hint(recipe.model.name, path)}")
    return lines


def _download_hint(model_name: str, path: Path) -> str:
    if model_name not in TORCHVISION_MODELS:
        return ""
    save = f"torch.save(torchvision.models.{model_name}(weights='DEFAULT').state_dict(), '{path.name}')"
    return (
        f"; to create it in {path.parent}, with torchvision's weights: "
        f'pip install torchvision; python -c "import torch, torchvision; {save}"'
    )


def requirements_not_sent(recipe: Recipe, project: UserProject | None) -> list[str]:
    """Return a line for each requirement that the user has to bring: a launch sends only the user's project."""
    lines = [
        f"{field}: {module} is neither beside the recipe nor in its git repository, so it is not sent; "
        "put it there, or install it on each machine"
        for field, module, _ in user_functions(recipe)
        if not _is_in_project(module, project)
    ]
    if weights := recipe.model.weights:
        is_absolute = weights.startswith(("/", "~"))
        hint = "" if is_absolute else f"; give the whole path, such as ~/.imgnet/shared/{Path(weights).name}"
        lines.append(f"model, weights: {weights} must exist on each machine{hint}")
    return lines


def _is_in_project(module: str, project: UserProject | None) -> bool:
    """Whether the trainers find a module in the job's copy of the user's project."""
    folders = project.search_folders(Path(project.folder)) if project else ()
    return find_module(module.partition(".")[0], folders) is not None


def _is_importable(name: str) -> bool:
    """Whether a trainer would find a top-level module here. It also looks in the folder in which it is started."""
    return PathFinder.find_spec(name, [*sys.path, str(Path.cwd())]) is not None
