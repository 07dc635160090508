"""Recipes from files: what is read, and the one-line error for a file that cannot be used."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.recipe import Recipe
from train.recipe.files import RecipeError, import_folder, read_recipes, select_recipes

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
    """Make an empty working directory."""
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
    with pytest.raises(RecipeError) as caught:
        read_recipes(path)
    assert sys.path == search_path
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_read_recipes_file_with_one_recipe() -> None:
    (recipe,) = read_recipes(write("one.py", "recipe = make('one')"))
    assert isinstance(recipe, Recipe) and recipe.name == "one"


def test_read_recipes_file_that_yields_several() -> None:
    assert recipe_names(write("many.py", "def recipes():\n    for n in 'abc':\n        yield make(n)")) == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize("name", ["folder/one.py", "folder/one", "folder.one"])
def test_read_recipes_accepts_path_and_dotted_name(name: str) -> None:
    write("folder/one.py", "recipe = make('one')")
    assert recipe_names(name) == ["one"]


def test_read_recipes_accepts_an_absolute_path(working_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("elsewhere") / "one.py"
    assert recipe_names(write(str(path), "recipe = make('one')")) == ["one"]


def test_read_recipes_of_a_package_may_import_each_other() -> None:
    write("mine_a/__init__.py", "", head="")
    write("mine_a/base.py", "recipe = make('base')")
    text = "from dataclasses import replace\nfrom .base import recipe as base\nrecipe = replace(base, name='next')"
    assert recipe_names(write("mine_a/next.py", text)) == ["next"]


def test_read_recipes_of_a_folder_may_import_each_other() -> None:
    write("plain/base_of_plain.py", "")
    assert recipe_names(write("plain/next.py", "recipe = make('n')", "from base_of_plain import make\n")) == ["n"]


def test_read_recipes_file_may_define_dataclasses() -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nrecipe = make('one')"
    assert recipe_names(write("one.py", text, "from __future__ import annotations" + MAKE_RECIPE)) == ["one"]


def test_read_recipes_reads_a_changed_file_again() -> None:
    assert recipe_names(write("one.py", "recipe = make('one')")) == ["one"]
    assert recipe_names(write("one.py", "recipe = make('other')")) == ["other"]


def test_read_recipes_reads_json() -> None:
    (recipe,) = read_recipes(write("one.py", "recipe = make('one', seed=3)"))
    write("one.json", json.dumps(recipe.to_json()), head="")
    assert read_recipes("one.json") == [recipe]


@pytest.mark.parametrize("name", ["nothing.py", "nothing", "no.thing", "a/b.py", "nothing.json", "", ".", "/", ".."])
def test_read_recipes_missing_file_is_named(name: str) -> None:
    assert error_of(name).startswith(name)


@pytest.mark.parametrize(("name", "expected"), [
    ("own/frist.py", "did you mean own/first.py?"),
    ("recipes/quickstrat.py", "did you mean {recipes}/quickstart.py?"),
    ("quickstrat", "did you mean {recipes}/quickstart.py?"),
    ("nothing.py", "those of this project are in {recipes}"),
])  # fmt: skip
def test_read_recipes_missing_file_suggests_one_that_exists(name: str, expected: str) -> None:
    write("own/first.py", "recipe = make('first')")
    recipes = Path(__file__).resolve().parents[3] / "recipes"
    assert error_of(name) == f"{name}: there is no such recipe file; {expected.format(recipes=recipes)}"


def test_read_recipes_refuses_a_folder(working_dir: Path) -> None:
    (working_dir / "folder").mkdir()
    assert "folder" in error_of("folder") and "is a folder" in error_of("folder")


def test_read_recipes_refuses_a_file_that_is_not_python() -> None:
    assert "notes.txt" in error_of(write("notes.txt", "hello"))


@pytest.mark.parametrize(("text", "expected"), [
    ("import nothing_of_this_name; recipe = 1", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("recipe = make('x'", "SyntaxError"),
    ("1 / 0; recipe = 1", "ZeroDivisionError"),
    ("recipe = make('a/b')", "ValueError: recipe 'a/b', name"),
    ("recipe = make('x', nodes=3)", "Recipe has no field nodes; fields: name, data, "),
    ("from train.recipe import Optim; recipe = Optim(rate=1)", "Optim has no field rate; fields: name, "),
    ("recipe = len(1)", "TypeError: "),
    ("raise SystemExit('enough'); recipe = 1", "SystemExit: enough"),
    ("import sys; sys.exit(); recipe = 1", "SystemExit"),
    ("raise ValueError('first line\\nsecond line'); recipe = 1", "first line"),
    ("raise RuntimeError; recipe = 1", "RuntimeError"),
    ("from .base import recipe", "ImportError"),
])  # fmt: skip
def test_read_recipes_import_error_names_file_and_line(text: str, expected: str) -> None:
    message = error_of(write("bad.py", text))
    assert re.match(r"bad\.py, line [59]: ", message) and expected in message  # line 9 is in the text, line 5 in make()


@pytest.mark.parametrize(
    ("phases", "line"),
    [
        ("[\n    Phase(epochs=(0, 2), **rest),\n    Phase(epochs=(3, 4), **rest)]", 5),
        ("[Phase(epochs=(start, start + 2), **rest) for start in (0, 3)]", 2),
    ],
)
def test_gap_between_phases_names_the_line_of_the_second_one(phases: str, line: int, working_dir: Path) -> None:
    (working_dir / "gap.py").write_text(
        "from train.recipe import IMAGENET, Model, Phase, Recipe; rest = dict(size=32, batch=8, lr=1.0)\n"
        "recipe = Recipe(name='gap', data=IMAGENET, model=Model(name='resnet18'), gpus=1,\n"
        f"    phases={phases})\n"
    )
    assert error_of("gap.py").startswith(f"gap.py, line {line}: ValueError: recipe 'gap', row 2, epochs: starts at 3")


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"recipe = 'caf\xe9'", b"a\0b"])
def test_read_recipes_refuses_a_binary_file(data: bytes, working_dir: Path) -> None:
    (working_dir / "bad.py").write_bytes(data)
    assert "bad.py" in error_of("bad.py")


@pytest.mark.parametrize(("text", "expected"), [
    ("", "has no `recipe`"),
    ("recipe = 3", "must be a Recipe"),
    ("recipe = [make('x')]", "must be a Recipe"),
    ("def recipes():\n    return []", "at least one"),
    ("def recipes():\n    return [make('x'), 3]", "must be a Recipe"),
    ("def recipes():\n    return None", "recipes() failed: TypeError"),
    ("recipes = [make('x')]", "`recipes` must be a function"),
    ("def recipes():\n    yield make('x')\n    1 / 0", "recipes() failed: ZeroDivisionError"),
    ("def recipes():\n    yield make('x')\n    raise SystemExit(3)", "recipes() failed: SystemExit"),
    ("def recipes():\n    raise ValueError('first\\nsecond')", "recipes() failed: ValueError: first"),
    ("def recipes():\n    return [make('x'), make('y'), make('x')]", "two recipes named 'x'"),
])  # fmt: skip
def test_read_recipes_unusable_recipes_name_the_file(text: str, expected: str) -> None:
    message = error_of(write("bad.py", text))
    assert message.startswith("bad.py: ") and expected in message


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "3", "null", '{"name": "x"}', "\xff"])
def test_read_recipes_invalid_json_is_named(text: str) -> None:
    assert "bad.json" in error_of(write("bad.json", text, head=""))


def test_select_recipes_by_name_in_the_given_order() -> None:
    recipes = read_recipes(write("many.py", "def recipes():\n    return [make(n) for n in 'abc']"))
    assert select_recipes(recipes, []) == recipes
    assert [recipe.name for recipe in select_recipes(recipes, ["c", "a"])] == ["c", "a"]
    with pytest.raises(RecipeError, match="no recipe is named 'd'; there are a, b, c"):
        select_recipes(recipes, ["a", "d"])


def test_read_recipes_does_not_execute_a_training_script(working_dir: Path) -> None:
    text = "import pathlib\ndef train(recipe): ...\npathlib.Path('executed').touch()\ntrain(3)\n"
    assert "script.py: has no `recipe`, so it was not executed" in error_of(write("script.py", text, head=""))
    assert not (working_dir / "executed").exists()


@pytest.mark.parametrize("text", [
    "from one import recipe", "from one import recipe as x, recipe", "from one import *", "import one as recipes",
    "for recipe in [make('x')]:\n    pass", "if True:\n    recipe: object = make('x')", "class recipes: ...",
    "_, recipe = 1, make('x')", "with open('x') as recipe: ...",
])  # fmt: skip
def test_read_recipes_executes_every_file_that_may_bind_the_name(text: str) -> None:
    message = error_of(write("bad.py", "raise RuntimeError('executed')\n" + text, head=""))
    assert "executed" in message and "not executed" not in message


def test_read_recipes_of_a_package_precede_a_file_of_its_name_in_the_search_path(
    working_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("shadow/mine_b.py", "", head="raise SystemExit('the wrong one')")
    write("own/mine_b/__init__.py", "", head="")
    monkeypatch.setattr(sys, "path", [str(working_dir / "shadow"), str(working_dir / "own"), *sys.path])
    assert recipe_names(write("own/mine_b/one.py", "recipe = make('one')")) == ["one"]


def test_read_recipes_imports_neither_torch_nor_boto3(working_dir: Path) -> None:
    write("one.py", "recipe = make('one')")
    code = "import sys, train.recipe.schedule; from train.recipe.files import read_recipes; read_recipes(sys.argv[1]);"
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'rich', 'paramiko'} & sys.modules.keys()))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    completed = subprocess.run(
        [sys.executable, "-c", code, "one.py"], capture_output=True, text=True, env=env, timeout=60
    )
    assert (completed.stdout, completed.stderr) == ("[]\n", "")


def test_read_recipes_isolates_output_and_working_directory(
    working_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
