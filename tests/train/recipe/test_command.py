"""Tests of `Command`: what it takes from its arguments, what it refuses, and that it survives JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train.recipe import Command, Recipe
from train.recipe.recipe_files import RecipeError, read_recipes, read_work


@pytest.mark.parametrize(("argv", "script", "module", "name"), [
    (["python", "train.py", "--lr", "0.1"], "train.py", "", "train"),
    (["/usr/bin/python3.11", "-u", "-X", "dev", "src/main.py"], "src/main.py", "", "main"),
    (["python", "-m", "mine.train", "x"], "", "mine.train", "mine.train"),
    (["python", "-c", "print(1)"], "", "", "python"),
    (["./train.sh", "x"], "./train.sh", "", "train.sh"),
    (["bash", "-e", "go.sh"], "go.sh", "", "go.sh"),
    (["sh", "-euc", "python train.py", "name"], "", "", "sh"),
    (["bash", "-euo", "pipefail", "-c", "python train.py"], "", "", "bash"),
    (["bash", "+x", "-O", "extglob", "--rcfile", "rc", "--norc", "go.sh", "-c"], "go.sh", "", "go.sh"),
    (["bash", "--", "go.sh"], "go.sh", "", "go.sh"),
    (["python", "-Im", "mine.train"], "", "mine.train", "mine.train"),
    (["python", "-mmine.train"], "", "mine.train", "mine.train"),
    (["python", "-Wignore", "-uXdev", "-W", "error", "train.py"], "train.py", "", "train"),
    (["python", "-uc", "print(1)"], "", "", "python"),
])  # fmt: skip
def test_command_finds_its_script_and_its_name(argv: list[str], script: str, module: str, name: str) -> None:
    command = Command(argv=argv)
    assert (command.script, command.module, command.name) == (script, module, name)


def test_command_survives_json() -> None:
    command = Command(argv=["python", "train.py", "a b"], machines=4, procs=2, env={"A": "1"}, secrets=("TOKEN",))
    command = replace(command, types=("p4d.24xlarge",), save_signal="sigusr1", elastic=False, retries=2)
    assert Command.from_json(json.loads(json.dumps(command.to_json()))) == command
    assert (command.save_signal, command.text) == ("USR1", "python train.py 'a b'")
    long = Command(argv=["echo", "a\nb", "x" * 1000])
    assert long.short_text == f"echo 'a b' {'x' * 486}..." and len(long.text) > 1000


@pytest.mark.parametrize(("fields", "problem"), [
    ({"argv": []}, "argv: names no program"),
    ({"argv": "python train.py"}, "argv: must be a list of texts"),
    ({"argv": ["x"], "procs": 0}, "'--procs': 0 is not in the range 1<=x<=1000"),
    ({"argv": ["x"], "procs": 2000}, "'--procs': 2000 is not in the range"),
    ({"argv": ["x"], "machines": 0}, "machines: must be"),
    ({"argv": ["x"], "retries": -1}, "'--retries': -1 is not in the range"),
    ({"argv": ["x"], "save_signal": "KILL"}, "'--save-signal': must be one of TERM"),
    ({"argv": ["x"], "env": {"RANK": "1"}}, "RANK is set for each process"),
    ({"argv": ["x"], "env": {"A B": "1"}}, "'A B' is not the name"),
    ({"argv": ["x"], "env": {"A": 1}}, "the value of A must be a text"),
    ({"argv": ["x"], "types": "p4d"}, "types: must be a list"),
    ({"argv": ["x"], "name": "a/b"}, "name: must be a text without slashes"),
])  # fmt: skip
def test_command_that_cannot_be_run_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Command(**fields)


def test_settings_are_the_arguments_as_one_row() -> None:
    argv = ["python", "t.py", "--lr", "0.1", "--epochs=3", "--amp", "--decay", "-1e-4", "model.name=vit", "-v"]
    settings = Command(argv=argv).settings(8)
    assert settings == {
        **{"command": "t", "world": 8, "lr": 0.1, "epochs": 3, "amp": 1},
        **{"decay": -1e-4, "model.name": "vit", "v": 1},
    }


def test_file_of_commands_is_work_but_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "sweep.py"
    path.write_text(
        "from train.recipe import Command\n"
        "def recipes():\n"
        "    for lr in (1, 2):\n"
        "        yield Command(argv=['python', 't.py', '--lr', str(lr)], name=f'lr {lr}')\n"
    )
    work = read_work(str(path))
    assert [each.name for each in work] == ["lr 1", "lr 2"] and not any(isinstance(each, Recipe) for each in work)
    with pytest.raises(RecipeError, match="has a Command, which has no schedule"):
        read_recipes(str(path))
