"""The eight bugs of the trainer of 2018 (diux-dev/imagenet18), each with a test that fails if the bug comes back.

The test of bug 2, a resume with other weights, is test_resume.py. That a process which crashes exits with 1 and reports
why (bug 4): tests/train/engine/test_agent_channel.py. That a machine which powers off is terminated (bug 5):
tests/infra/aws/instances/test_request.py. Bug 7, `correct[:k].view(-1)` of a transposed tensor, which torch
refuses, would end every validation: test_validation.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.known import known
from support.trainer_in_process import (
    Array,
    RandomImages,
    linear_classifier,
    make_phase,
    make_recipe,
    make_trainer,
    parameter_values,
    run_steps,
)

from cluster.agent import watchdog
from train.distributed import process_group
from train.distributed.process_group import ProcessGroup
from train.recipe import Model
from train.recipe.recipe_files import RecipeError, read_recipes
from train.tools import checkpoint_io, errors
from train.tools.process import launch_ranks

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path for name in ("cluster", "infra", "recipes", "train") for path in sorted((ROOT / name).rglob("*.py"))]
TINY = Model(name="resnet10_tiny", zero_gamma=False)  # with zero gammas, the first step would not move every tensor


@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_bug_1_single_precision_trains_every_tensor_on_float32_inputs(
    precision: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 2018 a generator of parameters was used twice: `zip` paired neighbors, and half reached the optimizer."""
    monkeypatch.setattr(process_group, "compute_dtype", lambda *_: precision)  # a CPU's, or that of a GPU of 2018
    dataset = RandomImages(8)
    trainer = make_trainer(tmp_path, make_recipe(make_phase((0, 1), 8, 0.1), model=TINY), dataset, plain=False)
    optimized = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in optimized} == {id(parameter) for parameter in trainer.model.parameters()}
    assert {parameter.dtype for parameter in optimized} == {torch.float32}, "in any precision"
    assert trainer.scaler.is_enabled() == (precision == torch.float16)
    batch = dataset.decode_batch(next(trainer.sampler.train_requests(trainer.schedule.epochs[0])))
    assert trainer.preprocessor.prepare(batch)[0].dtype == torch.float32
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    if precision == torch.float16:  # a CPU computes what a float16 GPU would, in float32
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer.preprocessor.autocast = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    list(run_steps(trainer, dataset))
    unmoved = [name for name, parameter in trainer.model.named_parameters() if torch.equal(parameter, before[name])]
    assert unmoved == [] and len(before) > 20


def test_bug_3_rank_0_saves_every_epoch_into_the_run_folder(tmp_path: Path, in_group: Any) -> None:
    """In 2018 every machine saved, only at a high accuracy, into its current folder."""
    dataset = RandomImages(16, 12, classes=12)
    recipe = make_recipe(make_phase((0, 2), 4, 0.001), gpus=2)
    (tmp_path / "cwd").mkdir()

    def work(group: ProcessGroup) -> tuple[list[str], list[float]]:
        os.chdir(tmp_path / "cwd")
        trainer = make_trainer(tmp_path / f"of-rank-{group.rank}", recipe, dataset, group=group, plain=False)
        trainer.train(dataset, 0)  # type: ignore[arg-type]
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt")), [
            known(epoch.top5) for epoch in trainer.history
        ]

    (files, accuracies), (_, accuracies_of_rank_1) = in_group(2, work)
    assert accuracies == accuracies_of_rank_1 and len(accuracies) == 2 and max(accuracies) < 93
    folder = "of-rank-0/checkpoints/000001"
    assert files == [f"{folder}/step-00000002.pt", f"{folder}/step-00000004.pt"]
    assert list((tmp_path / "cwd").iterdir()) == [] and not list(tmp_path.glob("of-rank-1/**/*.pt"))


def test_bug_4_one_crash_ends_all_processes(tmp_path: Path) -> None:
    """One of three processes crashes and two would wait forever. All end, with the crashed one's exit code."""
    code = "import os, sys, time; from pathlib import Path; r = os.environ['RANK']; "
    code += "Path(sys.argv[1], r).write_text(str(os.getpid())); "
    code += "w = lambda: len(list(Path(sys.argv[1]).iterdir())) < 3\nwhile w(): time.sleep(0.01)\n"
    code += "sys.exit(7) if r == '1' else time.sleep(600)"
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        assert launch_ranks([sys.executable, "-c", code, str(tmp_path)], 3) == 7
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_bug_5_watchdog_sets_the_power_off_timer_with_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2018 the user had no right to shut the machine down. The timer is set first at boot, and again here."""
    calls: list[list[str]] = []
    fake = {"run": lambda argv, **_: calls.append(argv), "DEVNULL": None}
    monkeypatch.setattr(watchdog, "subprocess", SimpleNamespace(**fake, TimeoutExpired=subprocess.TimeoutExpired))
    watchdog.Watchdog(ROOT / "none", 1.0, 0.0, "", lambda: None, poweroff_grace=60.0).stop()
    assert calls == [["sudo", "-n", "imgnet-limit", "600"]]


def test_bug_6_no_input_is_executed_as_code(tmp_path: Path) -> None:
    """In 2018: `eval(args.phases)`, a base64 pickle as an option, `pickle.load` of a downloaded file.

    Ruff forbids these calls (pyproject.toml); torch.load and np.load unpickle only where they are told to.
    """
    for path in SOURCES:
        assert not re.search("weights_only=False|allow_pickle=True", path.read_text()), path
    harm = tmp_path / "harm"
    with pytest.raises(RecipeError):
        read_recipes(f"__import__('os').mkdir({str(harm)!r})")
    phases = f"[__import__('os').mkdir({str(harm)!r})]"
    recipe = make_recipe(make_phase((0, 1), 8, 0.05)).to_json()  # valid, but for its phases
    (tmp_path / "x.json").write_text(json.dumps({**recipe, "phases": phases}))
    with pytest.raises(RecipeError):
        read_recipes(str(tmp_path / "x.json"))

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(harm),)

    checkpoint_io.write_checkpoint(tmp_path, 1, {"x": Harm()})
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint_io.load_checkpoint(tmp_path / "step-00000001.pt")
    assert not harm.exists()


@pytest.mark.parametrize("way", ["sgd", "lars"])
def test_bug_8_overflow_on_one_rank_skips_the_step_on_all(way: str, tmp_path: Path, in_group: Any) -> None:
    """In 2018: a static loss scale and no check of the gradients; NaN in epoch 5 (imagenet18_old#19)."""
    dataset = RandomImages(32)
    recipe = make_recipe(make_phase((0, 1), 8, 0.05), gpus=2, name=way)

    def work(group: ProcessGroup) -> tuple[list[list[Array]], list[float]]:
        trainer = make_trainer(tmp_path, recipe, dataset, net := linear_classifier(), group)
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        weights_by_step, scales, loss = [parameter_values(net)], [], trainer.loss
        for overflows in (group.rank == 1, False):
            trainer.loss = (lambda *arguments: loss(*arguments) * float("inf")) if overflows else loss
            next(run_steps(trainer, dataset))
            weights_by_step.append(parameter_values(net))
            scales.append(trainer.scaler.get_scale())
        return weights_by_step, scales

    answers = in_group(2, work)
    for weights_by_step, scales in answers:
        assert scales == [512.0, 512.0], "halved once, on all ranks"
        for first, second in zip(weights_by_step[0], weights_by_step[1], strict=True):
            np.testing.assert_array_equal(first, second)
        for first, second in zip(weights_by_step[1], weights_by_step[2], strict=True):
            assert np.isfinite(second).all() and np.abs(second - first).max() > 0
    for own, other in zip(answers[0][0][-1], answers[1][0][-1], strict=True):
        np.testing.assert_array_equal(own, other)


def run_three_steps(trainer: Any, dataset: RandomImages, *losses: Any) -> Any:
    """Run the first steps of a trainer, each with its own loss. Returns their epoch."""
    epoch = trainer.schedule.epochs[0]
    batches = map(dataset.decode_batch, trainer.sampler.train_requests(epoch))
    for step, loss in enumerate(losses or [trainer.loss] * 3):
        trainer.loss = loss
        trainer.run_step(epoch, step, batches)
        trainer.step = step + 1
    return epoch


def test_bug_8_run_with_nan_loss_stops(tmp_path: Path) -> None:
    dataset = RandomImages(32)
    trainer = make_trainer(tmp_path, make_recipe(make_phase((0, 1), 8, 1e300)), dataset, linear_classifier())
    epoch = run_three_steps(trainer, dataset)
    with pytest.raises(errors.Diverged, match=r"the loss is nan at step [23] "):
        trainer.sync_metrics(epoch)


def test_bug_8_collapsing_loss_scale_stops(tmp_path: Path) -> None:
    """Each step is left out, the loss stays finite, and nothing is learned."""
    dataset = RandomImages(32)
    trainer = make_trainer(tmp_path, make_recipe(make_phase((0, 9), 8, 0.05)), dataset, linear_classifier())
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-9, growth_interval=3)
    loss = trainer.loss

    def finite_loss_of_infinite_gradient(*arguments: torch.Tensor) -> torch.Tensor:
        losses = loss(*arguments)
        losses.register_hook(lambda gradient: gradient * float("inf"))
        return losses

    epoch = run_three_steps(trainer, dataset, loss, *[finite_loss_of_infinite_gradient] * 2)
    with pytest.raises(errors.Diverged, match=r"the loss scale of float16 has fallen to 0.00049 at step 3 "):
        trainer.sync_metrics(epoch)
