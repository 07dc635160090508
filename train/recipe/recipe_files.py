"""Read recipes from a Python file, from the dotted name of a module, or from a resolved recipe as JSON."""

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from train.tools.errors import one_line_error
from train.tools.files import PROJECT_ROOT
from train.tools.text_files import parse_json

from .command import Command
from .components import Comm, Data, Model, Optim
from .schema import Phase, Recipe

PROJECT_RECIPES = PROJECT_ROOT / "recipes"


class RecipeError(Exception):
    """A recipe cannot be used. The text is one line that names the file and the reason."""


WorkT = TypeVar("WorkT", Recipe, Recipe | Command)


def read_recipes(name: str) -> list[Recipe]:
    """Return the recipes in a file as `read_work` does. Raises `RecipeError` also for a file with a command."""
    work = read_work(name)
    recipes = [each for each in work if isinstance(each, Recipe)]
    if len(recipes) < len(work):
        raise RecipeError(f"{name}: has a Command, which has no schedule; start it: imgnet-cluster launch {name}")
    return recipes


def read_work(name: str) -> list[Recipe | Command]:
    """Return the recipes and commands in `recipes/x.py`, `recipes.x` or `x.json`, each with its own name.

    What the file prints goes to stderr. Raises `RecipeError`, also for no recipe, and for two of the same name.
    """
    if not name:
        raise RecipeError(f"no recipe is named; those of this project are in {PROJECT_RECIPES}")
    if name.endswith(".json"):
        return [_load_json_recipe(Path(name))]
    with contextlib.redirect_stdout(sys.stderr), contextlib.chdir("."):  # stdout may be JSON; a file may change folders
        recipes = _collect_recipes(name, _import_file(_find_file(name)))
    names = [recipe.name for recipe in recipes]
    duplicates = sorted({each for each in names if names.count(each) > 1})
    if duplicates:
        kind = "commands" if all(isinstance(recipe, Command) for recipe in recipes) else "recipes"
        listed = ", ".join(map(repr, duplicates))
        raise RecipeError(f"{name}: yields two {kind} named {listed}; give each its own name, name=...")
    return recipes


def _load_json_recipe(path: Path) -> Recipe:
    try:
        return Recipe.from_json(parse_json(path.read_bytes()))
    except OSError as error:
        raise RecipeError(one_line_error(error)) from error
    except ValueError as error:
        raise RecipeError(f"{path}: {one_line_error(error)}") from error


def import_folder(name: str) -> Path:
    """Return where a recipe's file imports from: its folder, or its outermost package's. Raises `RecipeError`."""
    return _package_and_root(_find_file(name))[1]


def _find_file(name: str) -> Path:
    """Return the file that `recipes/x.py`, `recipes/x` or `recipes.x` means; or, also as `x`, that of this project."""
    path = Path(name)
    candidates = (path, Path(f"{name}.py"), Path(f"{name.replace('.', '/')}.py"))
    project_files = [PROJECT_RECIPES / file.name for file in candidates if file.parent in (Path(), Path("recipes"))]
    for candidate in (*candidates, *project_files):
        if candidate.is_file():
            return candidate.resolve()
    if path.is_dir():
        raise RecipeError(f"{name}: is a folder; name one recipe in it, such as {path / 'quickstart.py'}")
    near_files = _files_of_similar_name(path)
    hint = f"did you mean {near_files[0]}?" if near_files else f"those of this project are in {PROJECT_RECIPES}"
    raise RecipeError(f"{name}: there is no such recipe file; {hint}")


def _files_of_similar_name(path: Path) -> list[str]:
    """Return Python files of almost the same name in the folder of a path, or else names of this project's recipes."""
    for folder in (path.parent, PROJECT_RECIPES):
        names = [file.stem for file in folder.glob("[!_]*.py")]
        if near_names := difflib.get_close_matches(path.name.removesuffix(".py"), names):
            return near_names if folder == PROJECT_RECIPES else [str(folder / f"{name}.py") for name in near_names]
    return []


def _import_file(path: Path) -> ModuleType:
    """Import a file under its dotted name, for `from .other import recipe`. The search path is restored afterwards."""
    if path.suffix != ".py":
        raise RecipeError(f"{path.name}: is not a Python file; a recipe's name ends in .py")
    if bound_names(path).isdisjoint({"recipe", "recipes", "*"}):  # a training script, which must not be executed
        raise RecipeError(
            f"{path.name}: has no `recipe`, so it was not executed; define recipe = Recipe(...) or recipes(). For a "
            f"training script of your own: imgnet-cluster run -- python {path.name}"
        )
    parts, root = _package_and_root(path)
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
        raise RecipeError(f"{path.name}{_error_line_suffix(path, error)}: {_describe_error(error)}") from error
    finally:
        sys.modules.pop(dotted, None)
        if previous_module is not None:
            sys.modules[dotted] = previous_module
        sys.path.remove(str(root))


def _package_and_root(path: Path) -> tuple[list[str], Path]:
    """Return the parts of a file's dotted name, and the folder from which that name is imported."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    return parts, root


def bound_names(path: Path) -> set[str]:
    """Return the names that a Python file defines, assigns or imports anywhere, without running it.

    "*" is one when it imports all names of a module, or cannot be parsed: the attempt to import it says what is wrong.
    """
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return {"*"}
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            names.add((node.asname if isinstance(node, ast.alias) else None) or node.name)
    return names


def _error_line_suffix(path: Path, error: BaseException) -> str:
    """Return ", line N" for the last line of the file that an error passed through, "" when it passed through none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _describe_error(error: BaseException) -> str:
    """Return an error of a user's file as one line. An error about an unknown field lists the known fields."""
    text = one_line_error(error)
    for component in (Phase, Recipe, Command, Data, Model, Optim, Comm):
        prefix = f"{component.__name__}.__init__() got an unexpected keyword argument "
        if isinstance(error, TypeError) and text.startswith(prefix):
            field = text.removeprefix(prefix).split("'")[1]
            names = ", ".join(known.name for known in dataclasses.fields(component))
            return f"{component.__name__} has no field {field}; fields: {names}"
    return f"{type(error).__name__}: {text}"


def _collect_recipes(name: str, module: ModuleType) -> list[Recipe | Command]:
    make_recipes = getattr(module, "recipes", None)
    if make_recipes is not None and not callable(make_recipes):
        raise RecipeError(f"{name}: `recipes` must be a function that yields recipes: def recipes(): yield Recipe(...)")
    try:
        if make_recipes:
            recipes = list(make_recipes())
        elif hasattr(module, "recipe"):
            recipes = [module.recipe]
        else:
            raise RecipeError(f"{name}: has no `recipe`; define recipe = Recipe(...) or recipes()")
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{name}: recipes() failed: {_describe_error(error)}") from error
    if not recipes or not all(isinstance(recipe, Recipe | Command) for recipe in recipes):
        raise RecipeError(f"{name}: `recipe` must be a Recipe or a Command, and recipes() must yield at least one")
    return recipes


def select_recipes(recipes: Iterable[WorkT], names: Iterable[str]) -> list[WorkT]:
    """Return the recipes with these names, in this order; all for no names. Raises `RecipeError` for an unknown one."""
    recipe_list, name_list = list(recipes), list(names)
    by_name = {recipe.name: recipe for recipe in recipe_list}
    unknown = [name for name in name_list if name not in by_name]
    if unknown:
        raise RecipeError(f"no recipe is named {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[name] for name in name_list] if name_list else recipe_list
