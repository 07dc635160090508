"""Recipes from files: what is read, and the one-line error for a file that cannot be used."""

import json
import sys
from pathlib import Path

import pytest
from support.error_lines import error_line

from train.recipe.recipe_files import PROJECT_RECIPES, RecipeError, import_folder, read_recipes, select_recipes

MAKE_RECIPE = """
from train.recipe import Data, Model, Phase, Recipe

def make(name, **more):
    return Recipe(
        name=name, data=Data(name="some", root="some", train=10, val=5), model=Model(name="resnet18"),
        phases=[Phase(epochs=(0, 1), size=64, batch=4, lr=0.1)], **more,
    )
"""


@pytest.fixture(autouse=True)
def working_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str, head: str = MAKE_RECIPE) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(head + text)
    return path


def recipe_names(path: str) -> list[str]:
    return [recipe.name for recipe in read_recipes(path)]


def error_of(path: str) -> str:
    """Return the one-line text of the `RecipeError`, and check that the module search path is restored."""
    search_path = list(sys.path)
    message = error_line(RecipeError, read_recipes, path)
    assert message and sys.path == search_path
    return message


def test_read_recipes_of_a_package_or_a_folder_may_import_each_other() -> None:
    write("mine_a/__init__.py", "", head="")
    write("mine_a/base.py", "recipe = make('base')")
    text = "from dataclasses import replace\nfrom .base import recipe as base\nrecipe = replace(base, name='next')"
    assert recipe_names(write("mine_a/next.py", text)) == ["next"]
    write("plain/base_of_plain.py", "")
    assert recipe_names(write("plain/next.py", "recipe = make('n')", "from base_of_plain import make\n")) == ["n"]


DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nrecipe = make('one')"


@pytest.mark.parametrize(("text", "head", "names"), [
    ("recipe = make('one')", MAKE_RECIPE, ["one"]),
    ("def recipes():\n    for n in 'abc':\n        yield make(n)", MAKE_RECIPE, ["a", "b", "c"]),
    (DATACLASS, "from __future__ import annotations" + MAKE_RECIPE, ["one"]),
])  # fmt: skip
def test_read_recipes_by_path_and_by_dotted_name(text: str, head: str, names: list[str], working_dir: Path) -> None:
    write("folder/one.py", text, head)
    for name in ("folder/one.py", "folder/one", "folder.one", str(working_dir / "folder/one.py")):
        assert recipe_names(name) == names
    recipes = read_recipes("folder/one.py")
    write("one.json", json.dumps(recipes[0].to_json()), head="")
    assert read_recipes("one.json") == recipes[:1]


@pytest.mark.parametrize(("name", "expected"), [
    ("own/frist.py", "there is no such recipe file; did you mean own/first.py?"),
    ("recipes/quickstrat.py", "there is no such recipe file; did you mean quickstart?"),
    ("quickstrat", "there is no such recipe file; did you mean quickstart?"),
    ("no.thing", "there is no such recipe file; those of this project are in {recipes}"),
    ("own", "is a folder; name one recipe in it, such as own/quickstart.py"),
    ("nothing.json", "No such file or directory"),
])  # fmt: skip
def test_read_recipes_missing_file_is_named_with_one_that_exists(name: str, expected: str) -> None:
    write("own/first.py", "recipe = make('first')")
    assert error_of(name) == f"{name}: {expected.format(recipes=PROJECT_RECIPES)}"


@pytest.mark.parametrize(("name", "content"), [
    ("notes.txt", b"hello"), *(("bad.py", data) for data in (b"\xff\xfe\x00", b"recipe = 'caf\xe9'", b"a\0b")),
    *(("bad.json", data) for data in (b"", b"{", b"{}", b"[]", b"3", b"null", b'{"name": "x"}', b"\xff")),
])  # fmt: skip
def test_read_recipes_refuses_a_file_of_another_kind(name: str, content: bytes, working_dir: Path) -> None:
    (working_dir / name).write_bytes(content)
    assert error_of(name).startswith(name)


def test_read_recipes_reads_a_changed_file_again() -> None:
    assert recipe_names(write("one.py", "recipe = make('one')")) == ["one"]
    assert recipe_names(write("one.py", "recipe = make('other')")) == ["other"]


@pytest.mark.parametrize(("text", "expected"), [
    ("import nothing_of_this_name; recipe = 1", "line 9: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("recipe = make('x'", "line 9: SyntaxError"),
    ("1 / 0; recipe = 1", "line 9: ZeroDivisionError"),
    ("recipe = make('a/b')", "line 5: ValueError: recipe 'a/b', name"),  # in make()
    ("recipe = make('x', nodes=3)", "line 5: Recipe has no field nodes; fields: name, data, "),
    ("from train.recipe import Optim; recipe = Optim(rate=1)", "line 9: Optim has no field rate; fields: name, "),
    ("import sys; sys.exit(); recipe = 1", "line 9: SystemExit"),
    ("raise ValueError('first line\\nsecond line'); recipe = 1", "line 9: ValueError: first line"),
    ("from .base import recipe", "line 9: ImportError"),
    ("raise RuntimeError('executed')", "has no `recipe`, so it was not executed"),  # such as a training script
    *((f"raise RuntimeError('executed')\n{binding}", "line 9: RuntimeError: executed") for binding in (
        "from one import recipe", "from one import recipe as x, recipe", "from one import *", "import one as recipes",
        "for recipe in [make('x')]:\n    pass", "if True:\n    recipe: object = make('x')", "class recipes: ...",
        "_, recipe = 1, make('x')", "with open('x') as recipe: ...",
    )),
    ("recipe = [make('x')]", "must be a Recipe"),
    ("def recipes():\n    return []", "at least one"),
    ("def recipes():\n    return [make('x'), 3]", "must be a Recipe"),
    ("def recipes():\n    return None", "recipes() failed: TypeError"),
    ("recipes = [make('x')]", "`recipes` must be a function"),
    ("def recipes():\n    yield make('x')\n    raise SystemExit(3)", "recipes() failed: SystemExit"),
    ("def recipes():\n    raise ValueError('first\\nsecond')", "recipes() failed: ValueError: first"),
    ("def recipes():\n    return [make('x'), make('y'), make('x')]", "two recipes named 'x'"),
])  # fmt: skip
def test_read_recipes_error_names_the_file_and_the_line(text: str, expected: str) -> None:
    message = error_of(write("bad.py", text))
    assert message.startswith(("bad.py: ", "bad.py, line ")) and expected in message


def test_select_recipes_by_name_in_the_given_order() -> None:
    recipes = read_recipes(write("many.py", "def recipes():\n    return [make(n) for n in 'abc']"))
    assert select_recipes(recipes, []) == recipes
    assert [recipe.name for recipe in select_recipes(recipes, ["c", "a"])] == ["c", "a"]
    with pytest.raises(RecipeError, match="no recipe is named 'd'; there are a, b, c"):
        select_recipes(recipes, ["a", "d"])


def test_read_recipes_isolates_output_and_current_folder(working_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os\nprint('hello')\nos.chdir('/')\nrecipe = make('a')\n"
    assert recipe_names(write("talks.py", text)) == ["a"]
    assert Path.cwd() == working_dir and capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize("name", ["quickstart", "quickstart.py", "recipes/quickstart.py", "recipes.quickstart"])
def test_read_recipes_finds_those_of_this_project_from_any_folder(name: str) -> None:
    assert recipe_names(name) == ["quickstart"]
    write("recipes/quickstart.py", "recipe = make('own')")
    write("quickstart.py", "recipe = make('own')")
    assert recipe_names(name) == ["own"]


def test_import_folder_is_the_one_that_the_recipes_modules_are_imported_from(working_dir: Path) -> None:
    assert import_folder(write("plain/one.py", "")) == working_dir / "plain"
    write("mine_c/sub/__init__.py", "")
    write("mine_c/__init__.py", "")
    assert import_folder(write("mine_c/sub/one.py", "")) == working_dir
