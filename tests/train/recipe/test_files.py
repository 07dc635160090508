"""Recipes from files: what is found, and the one line for what cannot be used."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.recipe import Recipe
from train.recipe.files import RecipeError, read_recipes, select_recipes

MAKE = """
from train.recipe import Data, Model, Phase, Recipe

def make(name, **more):
    return Recipe(
        name=name, data=Data(name="some", root="some", train=10, val=5), model=Model(name="resnet18"),
        phases=[Phase(epochs=(0, 1), size=64, batch=4, lr=0.1)], **more,
    )
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, and a module search path that must stay as it is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str, head: str = MAKE) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(head + text)
    return path


def names(path: str) -> list[str]:
    return [one.name for one in read_recipes(path)]


def refusal(path: str) -> str:
    """The one line of a `RecipeError`; the search path is as before."""
    before = list(sys.path)
    with pytest.raises(RecipeError) as caught:
        read_recipes(path)
    assert sys.path == before
    said = str(caught.value)
    assert said and "\n" not in said
    return said


def test_a_file_with_one_recipe() -> None:
    (found,) = read_recipes(write("one.py", "recipe = make('one')"))
    assert isinstance(found, Recipe) and found.name == "one"


def test_a_file_that_yields_several() -> None:
    assert names(write("many.py", "def recipes():\n    for n in 'abc':\n        yield make(n)")) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["folder/one.py", "folder/one", "folder.one"])
def test_a_recipe_is_found_by_its_path_and_by_its_dotted_name(name: str) -> None:
    write("folder/one.py", "recipe = make('one')")
    assert names(name) == ["one"]


def test_a_recipe_is_found_by_its_absolute_path(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("elsewhere") / "one.py"
    assert names(write(str(path), "recipe = make('one')")) == ["one"]


def test_recipes_of_a_package_may_import_each_other() -> None:
    write("mine_a/__init__.py", "", head="")
    write("mine_a/base.py", "recipe = make('base')")
    text = "from dataclasses import replace\nfrom .base import recipe as base\nrecipe = replace(base, name='next')"
    assert names(write("mine_a/next.py", text)) == ["next"]


def test_recipes_of_a_folder_may_import_each_other() -> None:
    write("plain/base_of_plain.py", "")
    assert names(write("plain/next.py", "recipe = make('n')", "from base_of_plain import make\n")) == ["n"]


def test_a_recipe_may_define_dataclasses_with_annotations_as_text() -> None:
    text = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nrecipe = make('one')"
    assert names(write("one.py", text, "from __future__ import annotations" + MAKE)) == ["one"]


def test_the_search_path_is_left_as_it_was() -> None:
    before = list(sys.path)
    read_recipes(write("one.py", "recipe = make('one')"))
    assert sys.path == before


def test_a_file_that_was_changed_is_read_again() -> None:
    assert names(write("one.py", "recipe = make('one')")) == ["one"]
    assert names(write("one.py", "recipe = make('other')")) == ["other"]


def test_a_recipe_as_json() -> None:
    (found,) = read_recipes(write("one.py", "recipe = make('one', seed=3)"))
    write("one.json", json.dumps(found.to_json()), head="")
    assert read_recipes("one.json") == [found]


@pytest.mark.parametrize("name", ["nothing.py", "nothing", "no.thing", "a/b.py", "nothing.json", "", ".", "/", ".."])
def test_a_file_that_is_not_there_is_named(name: str) -> None:
    assert refusal(name).startswith(name)


def test_a_folder_is_no_recipe(here: Path) -> None:
    (here / "folder").mkdir()
    assert "folder" in refusal("folder") and "is a folder" in refusal("folder")


def test_a_file_that_is_not_python_is_refused() -> None:
    assert "notes.txt" in refusal(write("notes.txt", "hello"))


@pytest.mark.parametrize(("text", "said"), [
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("recipe = make('x'", "SyntaxError"),
    ("1 / 0", "ZeroDivisionError"),
    ("recipe = make('a/b')", "ValueError: recipe 'a/b', name"),
    ("recipe = make('x', nodes=3)", "TypeError"),
    ("raise SystemExit('enough')", "SystemExit: enough"),
    ("import sys; sys.exit()", "SystemExit"),
    ("raise ValueError('first line\\nsecond line')", "first line"),
    ("raise RuntimeError", "RuntimeError"),
    ("from .base import recipe", "ImportError"),
])  # fmt: skip
def test_a_file_that_does_not_import_is_named_with_the_line(text: str, said: str) -> None:
    got = refusal(write("bad.py", text))
    assert re.match(r"bad\.py, line [59]: ", got) and said in got  # 9 is the text's own line, 5 is in make


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"recipe = 'caf\xe9'", b"a\0b"])
def test_a_file_that_is_no_text_is_refused(data: bytes, here: Path) -> None:
    (here / "bad.py").write_bytes(data)
    assert "bad.py" in refusal("bad.py")


@pytest.mark.parametrize(("text", "said"), [
    ("", "has no `recipe`"),
    ("recipe = 3", "must be a Recipe"),
    ("recipe = [make('x')]", "must be a Recipe"),
    ("def recipes():\n    return []", "at least one"),
    ("def recipes():\n    return [make('x'), 3]", "must be a Recipe"),
    ("def recipes():\n    return None", "recipes() failed: TypeError"),
    ("recipes = [make('x')]", "recipes() failed: TypeError"),
    ("def recipes():\n    yield make('x')\n    1 / 0", "recipes() failed: ZeroDivisionError"),
    ("def recipes():\n    yield make('x')\n    raise SystemExit(3)", "recipes() failed: SystemExit"),
    ("def recipes():\n    raise ValueError('first\\nsecond')", "recipes() failed: ValueError: first"),
    ("def recipes():\n    return [make('x'), make('y'), make('x')]", "two recipes named 'x'"),
])  # fmt: skip
def test_a_file_without_usable_recipes_is_named(text: str, said: str) -> None:
    got = refusal(write("bad.py", text))
    assert got.startswith("bad.py: ") and said in got


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "3", "null", '{"name": "x"}', "\xff"])
def test_json_that_is_no_recipe_is_named(text: str) -> None:
    assert "bad.json" in refusal(write("bad.json", text, head=""))


def test_select_takes_all_or_those_that_are_named_in_this_order() -> None:
    found = read_recipes(write("many.py", "def recipes():\n    return [make(n) for n in 'abc']"))
    assert select_recipes(found, []) == found
    assert [one.name for one in select_recipes(found, ["c", "a"])] == ["c", "a"]
    with pytest.raises(RecipeError, match="no recipe is named 'd'; there are a, b, c"):
        select_recipes(found, ["a", "d"])


def test_loading_a_recipe_imports_neither_torch_nor_boto3(here: Path) -> None:
    write("one.py", "recipe = make('one')")
    code = "import sys; from train.recipe.files import load; import train.recipe.schedule; load(sys.argv[1]);"
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'rich', 'paramiko'} & sys.modules.keys()))"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    run = subprocess.run([sys.executable, "-c", code, "one.py"], capture_output=True, text=True, env=path, timeout=60)
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_what_a_recipe_prints_and_where_it_goes_does_not_matter(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os\nprint('hello')\nos.chdir('/')\nrecipe = make('a')\n"
    assert names(write("talks.py", text)) == ["a"]
    assert Path.cwd() == here and capsys.readouterr() == ("", "hello\n")


def test_no_name_is_no_recipe() -> None:
    with pytest.raises(RecipeError, match="no recipe is named"):
        read_recipes("")
