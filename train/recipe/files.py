"""Recipes from files: a Python file, the dotted name of a module, or a resolved recipe as JSON."""

import contextlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from train.tools.filesystem import one_line_error

from .schema import Recipe


class RecipeError(Exception):
    """A recipe that cannot be used; the text is one line that says which and why."""


def read_recipes(name: str) -> list[Recipe]:
    """Return the recipes that `recipes/x.py`, `recipes.x` or `x.json` holds, each with its own name.

    Raises `RecipeError` when the file is missing, does not import, holds none, or yields two of one name.
    """
    if not name:
        raise RecipeError("no recipe is named; see recipes/ for those that come with the project")
    if name.endswith(".json"):
        return [_load_json_recipe(Path(name))]
    with _isolate_stdout_and_cwd():
        found = _collect_recipes(name, _import_file(_find_file(name)))
    names = [recipe.name for recipe in found]
    twice = sorted({one for one in names if names.count(one) > 1})
    if twice:
        raise RecipeError(f"{name}: yields two recipes named {', '.join(map(repr, twice))}; give each its own name")
    return found


@contextlib.contextmanager
def _isolate_stdout_and_cwd() -> Iterator[None]:
    """What a recipe prints goes to stderr, for stdout may be JSON; the folder it goes to is left again."""
    here = os.getcwd()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            os.chdir(here)


def _load_json_recipe(path: Path) -> Recipe:
    try:
        return Recipe.from_json(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: {one_line_error(error)}") from error


def _find_file(name: str) -> Path:
    """The file behind `recipes/x.py`, `recipes/x` or `recipes.x`."""
    path = Path(name)
    for one in (path, Path(f"{name}.py"), Path(f"{name.replace('.', '/')}.py")):
        if one.is_file():
            return one.resolve()
    if path.is_dir():
        raise RecipeError(f"{name}: is a folder; name one recipe in it, such as {path / 'quickstart.py'}")
    raise RecipeError(f"{name}: there is no such recipe file; see recipes/ for those that come with the project")


def _import_file(path: Path) -> ModuleType:
    """Import the file under its dotted name, so that a recipe may say `from .other import recipe`."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    dotted = ".".join(parts)
    if path.suffix != ".py":
        raise RecipeError(f"{path.name}: is not a Python file; a recipe's name ends in .py")
    added, before = str(root) not in sys.path, sys.modules.get(dotted)
    if added:
        sys.path.insert(0, str(root))
    try:
        if len(parts) > 1:
            importlib.import_module(".".join(parts[:-1]))
        spec = importlib.util.spec_from_file_location(dotted, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[dotted] = module  # while it runs: dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # whatever a user's file may raise becomes one line
        raise RecipeError(
            f"{path.name}{_error_line_suffix(path, error)}: {type(error).__name__}: {one_line_error(error)}"
        ) from error
    finally:
        sys.modules.pop(dotted, None)
        if before is not None:
            sys.modules[dotted] = before
        if added:
            sys.path.remove(str(root))


def _error_line_suffix(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _collect_recipes(name: str, module: ModuleType) -> list[Recipe]:
    try:
        if hasattr(module, "recipes"):
            found = list(module.recipes())
        elif hasattr(module, "recipe"):
            found = [module.recipe]
        else:
            raise RecipeError(f"{name}: has no `recipe`; define recipe = Recipe(...) or recipes()")
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{name}: recipes() failed: {type(error).__name__}: {one_line_error(error)}") from error
    if not found or not all(isinstance(one, Recipe) for one in found):
        raise RecipeError(f"{name}: `recipe` must be a Recipe, and recipes() must yield at least one")
    return found


def select_recipes(recipes: Iterable[Recipe], names: Iterable[str]) -> list[Recipe]:
    """Return the recipes of these names, all when none is named. Raises `RecipeError` on an unknown name."""
    recipes, names = list(recipes), list(names)
    known = {one.name: one for one in recipes}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RecipeError(f"no recipe is named {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else recipes
