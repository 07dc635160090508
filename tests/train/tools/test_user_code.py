"""Modules of users: where they are searched for."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.tools import agent_protocol, user_code
from train.tools.errors import TrainingError


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """A job's two folders of modules, an installed package's, and the folder in which the program started."""
    paths = [tmp_path / name for name in ("first", "second", "installed", "started")]
    for path in paths:
        path.mkdir()
    monkeypatch.chdir(paths[3])
    monkeypatch.setattr(sys, "path", [str(paths[2]), *sys.path])
    variable = agent_protocol.module_folders_variable(map(str, paths[:2]))
    monkeypatch.setenv(*next(iter(variable.items())))
    modules_before = set(sys.modules)
    yield paths
    for name in set(sys.modules) - modules_before:
        del sys.modules[name]


def imported_from(name: str) -> Path:
    return Path(user_code.import_function("model, name", f"{name}:build")())


def test_modules_are_searched_in_the_projects_folders_first_and_in_the_current_one_last(folders: list[Path]) -> None:
    text = "def build():\n    return __file__\n"
    for number in range(4):
        for folder in folders[number:]:
            (folder / f"own_nets_{number}.py").write_text(text)
        assert imported_from(f"own_nets_{number}").parent == folders[number]
    assert sys.path[0] == str(folders[2])  # the standard library and packages keep their place after the import


def test_modules_find_each_other_also_when_their_functions_run(folders: list[Path]) -> None:
    (folders[0] / "own_late.py").write_text("def build():\n    import own_parts\n    return own_parts.__file__\n")
    (folders[1] / "own_parts.py").write_text("")
    assert imported_from("own_late") == folders[1] / "own_parts.py"


@pytest.mark.parametrize(("text", "message"), [
    (None, r"own_parts cannot be imported here \(ModuleNotFoundError: .*\); put it beside the recipe file"),
    ("\nimport json\njson.loads('no')", r"cannot be imported here \(JSONDecodeError: .*, own_parts.py line 3\)"),
    ("import sys\nsys.exit(0)", r"ends the program when it is imported \(SystemExit: 0, own_parts.py line 2\)"),
    ("build = 3", "own_parts has no function build"),
])  # fmt: skip
def test_module_that_cannot_be_used_is_one_line(text: str | None, message: str, folders: list[Path]) -> None:
    if text is not None:
        (folders[0] / "own_parts.py").write_text(text)
    search_path = list(sys.path)
    with pytest.raises(TrainingError, match=f"^model, name: .*{message}") as caught:
        user_code.import_function("model, name", "own_parts:build")
    assert "\n" not in str(caught.value) and sys.path[: len(search_path)] == search_path


def test_function_that_fails_is_an_error_of_one_line() -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    for function, error in ((fail, "ValueError: first second"), (sys.exit, "SystemExit")):
        with pytest.raises(TrainingError, match=rf"^optim, loss: own:loss fails, {error}") as caught:
            user_code.call_user_code("optim, loss", "own:loss", function)
        assert "\n" not in str(caught.value)
    with pytest.raises(TrainingError, match=r", test_user_code\.py line \d+$"):
        user_code.call_user_code("optim, loss", "own:loss", fail)
