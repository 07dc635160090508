"""Runs with a transform of the user: in one and two processes, resumed, and with functions that fail."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import open_trainer

from train.distributed.process_group import ProcessGroup
from train.engine import trainer as engine_trainer
from train.recipe import Phase
from train.tools import checkpoint_io
from train.tools.errors import TrainingError

STEPS = 4 + 4  # 50 images in global batches of 16


def shifted(pixels: Any, generator: np.random.Generator) -> Any:
    """Return another image where the generator says so, and the image changed in place where not."""
    if generator.integers(2):
        return np.roll(pixels, generator.integers(1, len(pixels)), axis=0)
    pixels[: generator.integers(1, len(pixels))] = generator.integers(256)
    return pixels


def test_runs_of_one_and_two_processes_and_resumed_ones_see_the_same_images(
    tiny: Any, tiny_data: Path, tmp_path: Path, in_group: Any, mine: Any
) -> None:
    mine.shifted = shifted
    augmented = Phase(epochs=(0, 1), size=32, batch=8, lr=0.05, augment="trivial")
    phases = [augmented, Phase(epochs=(1, 2), size=48, batch=8, lr=0.01)]
    recipe = tiny(phases=phases, transform="mine:shifted")

    def run(group: ProcessGroup, name: str, state: Any = None) -> dict[int, Any]:
        trainer, decoder = open_trainer(recipe, tiny_data, tmp_path / f"{name}-{group.rank}", group)
        states: dict[int, Any] = {}

        def keep_state(wait: bool = False, is_best: bool = False) -> None:
            states[trainer.steps_done] = checkpoint_io.copy_to_cpu(trainer.state())

        trainer.save = keep_state  # type: ignore[method-assign]
        trainer.options = replace(trainer.options, save_seconds=0)  # keep the state of each step
        if state:
            trainer.restore(state)
        trainer.train(decoder, workers=0 if state else 1)
        return states

    def work(group: ProcessGroup) -> tuple[list[str], list[list[float]]]:
        engine_trainer.MAX_STEPS_BETWEEN_SYNCS = 1
        states = run(group, "whole")
        assert sorted(states) == list(range(1, STEPS + 1))
        expected = states[STEPS]["model"]
        differing = [
            f"{step}: {name}"
            for step in (2, 4, 7)
            for name, value in run(group, f"from-{step}", states[step])[STEPS]["model"].items()
            if not torch.equal(value, expected[name])
        ]
        return differing, [value.flatten().tolist() for value in expected.values()]

    (alone,), (pair, other) = in_group(1, work), in_group(2, work)
    assert (alone[0], pair[0], other[0]) == ([], [], [])
    for ours, theirs in zip(alone[1], pair[1], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-4)


def fail(pixels: Any, generator: np.random.Generator) -> Any:
    raise ValueError("too\ndark")


def flattened(pixels: Any, generator: np.random.Generator) -> Any:
    pixels.shape = (-1,)
    return pixels


@pytest.mark.parametrize(("function", "reason"), [
    (fail, r"mine:change fails, ValueError: too dark, test_transform\.py line \d+"),
    (lambda pixels, generator: exit(3), r"mine:change fails, SystemExit: 3, test_transform\.py line \d+"),
    (lambda pixels: pixels, r"mine:change fails, TypeError: .* takes 1 positional argument but 2 were given"),
    (lambda pixels, generator: pixels[:-1], r"mine:change must return .* uint8 \[32, 32, 3\], not uint8 \[31, 32, 3\]"),
    (lambda pixels, generator: pixels / 255, r".* must return a numpy array uint8 .*, not float64 \[32, 32, 3\]"),
    (lambda pixels, generator: torch.from_numpy(pixels), r".* must return a numpy array uint8 .*, not Tensor"),
    (lambda pixels, generator: None, r".* must return a numpy array uint8 .*, not NoneType"),
    (flattened, r".* must return .*, not uint8 \[3072\]"),
])  # fmt: skip
def test_bad_function_ends_the_run_with_one_line_that_names_it_and_the_image(
    function: Any, reason: str, tiny: Any, tiny_data: Path, tmp_path: Path, mine: Any, in_group: Any
) -> None:
    mine.change = function
    recipe = tiny(transform="mine:change")

    def work(_: ProcessGroup) -> list[str]:
        messages = []
        for workers in (0, 1):
            trainer, decoder = open_trainer(recipe, tiny_data, tmp_path / str(workers))
            with pytest.raises(TrainingError) as caught:
                trainer.train(decoder, workers)
            messages.append(str(caught.value))
        return messages

    pattern = rf"transform: {reason}; the image: {tiny_data}/train/\w+/\w+\.JPEG"
    for message in in_group(1, work)[0]:
        assert "\n" not in message
        assert re.fullmatch(pattern, message), message


def test_function_is_left_out_of_phases_without_augment(tiny: Any, tiny_data: Path, tmp_path: Path, mine: Any) -> None:
    mine.change = fail
    phases = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.05, augment=False)]
    trainer, decoder = open_trainer(tiny(phases=phases, transform="mine:change"), tiny_data, tmp_path)
    trainer.train(decoder, 0)
    assert trainer.steps_done == 4
