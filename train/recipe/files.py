"""Read recipes from a Python file, from the dotted name of a module, or from a resolved recipe as JSON."""

import ast
import contextlib
import difflib
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

PROJECT_RECIPES = Path(__file__).resolve().parents[2] / "recipes"


class RecipeError(Exception):
    """A recipe cannot be used. The text is one line that names the file and the reason."""


def read_recipes(name: str) -> list[Recipe]:
    """Return the recipes in `recipes/x.py`, `recipes.x` or `x.json`, each with its own name.

    What the file prints goes to stderr. Raises `RecipeError` when the file is missing, cannot be imported, has no
    recipe, or yields two of the same name.
    """
    if not name:
        raise RecipeError(f"no recipe is named; those of this project are in {PROJECT_RECIPES}")
    if name.endswith(".json"):
        return [_load_json_recipe(Path(name))]
    with _isolate_stdout_and_cwd():
        recipes = _collect_recipes(name, _import_file(_find_file(name)))
    names = [recipe.name for recipe in recipes]
    duplicates = sorted({each for each in names if names.count(each) > 1})
    if duplicates:
        raise RecipeError(
            f"{name}: yields two recipes named {', '.join(map(repr, duplicates))}; give each its own name"
        )
    return recipes


@contextlib.contextmanager
def _isolate_stdout_and_cwd() -> Iterator[None]:
    """Send a recipe's output to stderr, because stdout may be JSON, and undo its changes of the working directory."""
    working_dir = Path.cwd()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            os.chdir(working_dir)


def _load_json_recipe(path: Path) -> Recipe:
    try:
        return Recipe.from_json(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: {one_line_error(error)}") from error


def _find_file(name: str) -> Path:
    """Return the file that `recipes/x.py`, `recipes/x` or `recipes.x` means."""
    path = Path(name)
    for candidate in (path, Path(f"{name}.py"), Path(f"{name.replace('.', '/')}.py")):
        if candidate.is_file():
            return candidate.resolve()
    if path.is_dir():
        raise RecipeError(f"{name}: is a folder; name one recipe in it, such as {path / 'quickstart.py'}")
    near_files = _files_of_similar_name(path)
    hint = f"did you mean {near_files[0]}?" if near_files else f"those of this project are in {PROJECT_RECIPES}"
    raise RecipeError(f"{name}: there is no such recipe file; {hint}")


def _files_of_similar_name(path: Path) -> list[str]:
    """Return Python files in the folder of a path, or else in this project's recipes, of almost the same name."""
    for folder in (path.parent, PROJECT_RECIPES):
        names = [file.stem for file in folder.glob("[!_]*.py")]
        if near_names := difflib.get_close_matches(path.name.removesuffix(".py"), names):
            return [str(folder / f"{name}.py") for name in near_names]
    return []


def _import_file(path: Path) -> ModuleType:
    """Import a file under its dotted name, so that a recipe may say `from .other import recipe`.

    The module search path and `sys.modules` are restored afterwards, so that a changed file is read again.
    """
    if path.suffix != ".py":
        raise RecipeError(f"{path.name}: is not a Python file; a recipe's name ends in .py")
    if not _may_define_recipes(path):
        raise RecipeError(
            f"{path.name}: has no `recipe`, so it was not executed; define recipe = Recipe(...) or recipes()"
        )
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    dotted = ".".join(parts)
    previous_module = sys.modules.get(dotted)
    sys.path.insert(0, str(root))  # first: a file in PYTHONPATH may have the name of the recipe's package
    try:
        if len(parts) > 1:
            importlib.import_module(".".join(parts[:-1]))
        spec = importlib.util.spec_from_file_location(dotted, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[dotted] = module  # only while it runs: dataclasses look up the module that defines them
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise RecipeError(
            f"{path.name}{_error_line_suffix(path, error)}: {type(error).__name__}: {one_line_error(error)}"
        ) from error
    finally:
        sys.modules.pop(dotted, None)
        if previous_module is not None:
            sys.modules[dotted] = previous_module
        sys.path.remove(str(root))


def _may_define_recipes(path: Path) -> bool:
    """Whether a file's text binds the name `recipe` or `recipes`. A training script does not, and must not be executed.

    A file that cannot be parsed may: the attempt to import it says what is wrong.
    """
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return True
    names: set[str | None] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            names.add((node.asname if isinstance(node, ast.alias) else None) or node.name)
    return not names.isdisjoint({"recipe", "recipes", "*"})


def _error_line_suffix(path: Path, error: BaseException) -> str:
    """Return ", line N" for the last line of the file that an error passed through, "" when it passed through none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _collect_recipes(name: str, module: ModuleType) -> list[Recipe]:
    """Return what a recipe file's `recipes()` yields, or its `recipe`."""
    try:
        if hasattr(module, "recipes"):
            recipes = list(module.recipes())
        elif hasattr(module, "recipe"):
            recipes = [module.recipe]
        else:
            raise RecipeError(f"{name}: has no `recipe`; define recipe = Recipe(...) or recipes()")
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{name}: recipes() failed: {type(error).__name__}: {one_line_error(error)}") from error
    if not recipes or not all(isinstance(recipe, Recipe) for recipe in recipes):
        raise RecipeError(f"{name}: `recipe` must be a Recipe, and recipes() must yield at least one")
    return recipes


def select_recipes(recipes: Iterable[Recipe], names: Iterable[str]) -> list[Recipe]:
    """Return the recipes with the given names, in this order; all recipes when no name is given.

    Raises `RecipeError` on an unknown name.
    """
    recipe_list, name_list = list(recipes), list(names)
    by_name = {recipe.name: recipe for recipe in recipe_list}
    unknown = [name for name in name_list if name not in by_name]
    if unknown:
        raise RecipeError(f"no recipe is named {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in name_list] if name_list else recipe_list
