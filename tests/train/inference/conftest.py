"""A trained network as a run leaves it, and the command line of train.inference in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.inference import __main__
from train.models.registry import build_model
from train.recipe import Recipe
from train.weights.network_description import NetworkDescription
from train.weights.safetensors_file import write_safetensors

CLASSES = ("airplane", "bird", "ship")


def describe_network(recipe: Recipe, classes: tuple[str, ...] = CLASSES) -> NetworkDescription:
    """Return the description of a network that was trained for 4 epochs of 10 steps."""
    return NetworkDescription.of_run(
        recipe, epoch=4, step=40, validated=None, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3), classes=classes
    )


@pytest.fixture
def describe() -> Callable[..., NetworkDescription]:
    """`describe_network`."""
    return describe_network


@pytest.fixture
def write_trained(tmp_path: Path) -> Callable[..., Path]:
    """Write a network as a run leaves it, with statistics that are not those of a fresh one. Returns the file."""

    def write(recipe: Recipe, classes: tuple[str, ...] = CLASSES) -> Path:
        state = build_model(recipe.model, len(classes), 1).state_dict()
        for name, tensor in state.items():
            if "running" in name:
                tensor += 0.25
        path = tmp_path / "model.safetensors"
        write_safetensors(path, state, describe_network(recipe, classes).metadata(recipe))
        return path

    return write


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command line in this process; return its exit code and its messages."""

    def exit_instead(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", exit_instead)

    def run(task: str, source: Path, *files: Path, **options: str) -> tuple[int, list[dict[str, Any]]]:
        named = {"file": str(files[0])} if task == "export" else {"images": list(map(str, files))}
        try:
            code = __main__.main([task, json.dumps({"source": str(source), **named, **options})])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run
