"""The eight bugs of the trainer of 2018 (facts/seeds.md 1.9), each with a test that fails if it comes back."""

import ast
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import ALONE, Array, Pixels, carry_out, linear, recipe, row, trainer, values
from torch import nn

from cluster.agent import watchdog
from cluster.backends.aws import plan as aws_plan
from cluster.jobs import submit
from train.distributed import process_group
from train.distributed.process_group import ProcessGroup
from train.engine import trainer as engine_trainer
from train.engine.launcher import launch_ranks
from train.metrics import accuracy
from train.recipe import Model
from train.recipe.files import RecipeError, read_recipes
from train.tools import checkpoint_io

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path for name in ("cluster", "infra", "recipes", "train") for path in sorted((ROOT / name).rglob("*.py"))]
TINY = Model(name="resnet10_tiny", zero_gamma=False)  # so that the first step moves every tensor


@pytest.fixture(params=["float32", "float16"])
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What the trainer takes this computer's precision for: a CPU's, and that of a GPU of 2018."""
    found: torch.dtype = getattr(torch, request.param)
    monkeypatch.setattr(process_group, "compute_dtype", lambda _: found)
    return found


def test_1_single_precision_trained_every_second_tensor_and_got_half_inputs(
    precision: torch.dtype, tmp_path: Path
) -> None:
    """A generator of parameters was used twice: `zip` paired neighbours, and half of them reached the optimizer."""
    pixels = Pixels(8)
    one = trainer(tmp_path, recipe(row((0, 1), 8, 0.1), model=TINY), pixels, plain=False)
    held = [parameter for group in one.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in one.model.parameters()}
    assert {parameter.dtype for parameter in held} == {torch.float32}, "whatever the sums are computed in"
    assert one.scaler.is_enabled() == (precision == torch.float16)
    assert (
        one.preprocessor.prepare(pixels.make(next(one.sampler.train_requests(one.schedule.epochs[0]))))[0].dtype
        == torch.float32
    )
    before = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    if precision == torch.float32:
        list(carry_out(one, pixels))
    else:  # the gradients of a GPU, as far as a CPU can make them
        one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        one.preprocessor.autocast = contextlib.nullcontext  # type: ignore[method-assign]
        list(carry_out(one, pixels))
    still = [name for name, parameter in one.model.named_parameters() if torch.equal(parameter, before[name])]
    assert still == [] and len(before) > 20


def test_2_a_resumed_run_began_with_fresh_weights_and_only_at_a_phases_start(
    precision: torch.dtype, tmp_path: Path
) -> None:
    """The copies that the optimizer moved were made before the checkpoint was read, and never made again."""
    pixels = Pixels(24)
    what = recipe(row((0, 2), 4, 0.05), row((2, 4), 8, 0.02), model=TINY)

    def made(name: str, scale: float) -> engine_trainer.Trainer:
        one = trainer(tmp_path / name, what, pixels, plain=False)
        if precision == torch.float16:
            one.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            one.preprocessor.autocast = contextlib.nullcontext  # type: ignore[method-assign]
        return one

    def weights(one: engine_trainer.Trainer) -> dict[str, torch.Tensor]:
        return {name: part.detach().clone() for name, part in one.model.named_parameters()}

    whole = made("whole", 512.0)
    steps = carry_out(whole, pixels)
    for _ in range(6 + 6 + 3 + 1):  # in the middle of the second phase's second epoch
        next(steps)
    checkpoint_io.write_checkpoint(tmp_path, 16, checkpoint_io.copy_to_cpu(whole.state()))
    loaded = weights(whole)
    next(steps)

    again = made("again", 64.0)
    for part in again.model.parameters():
        nn.init.normal_(part)
    again.restore(checkpoint_io.load_checkpoint(tmp_path / "step-00000016.pt"))
    assert (again.epoch_index, again.step) == (3, 1)
    assert again.scaler.get_scale() == (512 if precision == torch.float16 else 1)
    assert all(torch.equal(part, loaded[name]) for name, part in weights(again).items())
    next(carry_out(again, pixels))
    assert all(torch.equal(part, weights(whole)[name]) for name, part in weights(again).items())
    assert not all(torch.equal(part, loaded[name]) for name, part in weights(again).items())


def test_3_checkpoints_were_written_when_the_accuracy_was_high_by_every_machine_to_wherever_it_stood(
    tmp_path: Path, in_group: Any
) -> None:
    """Now: after every epoch, whatever its accuracy; by the first process of all; named by the step, in the run."""
    pixels = Pixels(16, 12, classes=12)
    what = recipe(row((0, 2), 4, 0.001), gpus=2)
    (tmp_path / "here").mkdir()

    def work(group: ProcessGroup) -> tuple[list[str], list[float]]:
        os.chdir(tmp_path / "here")
        one = trainer(tmp_path / f"of-rank-{group.rank}", what, pixels, group=group, plain=False)
        one.train(pixels, 0)  # type: ignore[arg-type]
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt")), [
            epoch["top5"] for epoch in one.history
        ]

    (first, accuracies), (_, others) = in_group(2, work)
    assert accuracies == others and len(accuracies) == 2 and max(accuracies) < 93
    folder = "of-rank-0/checkpoints/000001"
    assert first == [f"{folder}/step-00000002.pt", f"{folder}/step-00000004.pt"]
    assert list((tmp_path / "here").iterdir()) == [] and not list(tmp_path.glob("of-rank-1/**/*.pt"))


CRASH = """
import sys, types
stub = types.ModuleType("train.engine.run")
def run_attempt(*_):
    raise {error}
stub.run_attempt = run_attempt
sys.modules["train.engine.run"] = stub
from train.__main__ import main
sys.exit(main(["recipes/quickstart.py", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [("RuntimeError('a bug of ours')", "RuntimeError: a bug of ours"), ("OSError(28, 'full', 'x')", "x: full")],
)
def test_4_a_process_that_crashed_ended_with_0(error: str, reason: str, tmp_path: Path) -> None:
    """`except Exception: log`. Now: exit code 1, and the last words lie where the agent reads them."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "IMGNET_WORK": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", CRASH.format(error=error), str(tmp_path / "out")],
        cwd=ROOT, env={**os.environ, **place}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1 and reason.rpartition(": ")[2] in ran.stderr
    assert json.loads((tmp_path / "failed-0.json").read_text())["reason"] == reason


def test_4_and_the_others_hung(tmp_path: Path) -> None:
    """One of three crashes, two would wait for ever: all end, at once, with its code."""
    code = "import os, sys, time; from pathlib import Path; r = os.environ['RANK']; "
    code += "Path(sys.argv[1], r).write_text(str(os.getpid())); "
    code += "w = lambda: len(list(Path(sys.argv[1]).iterdir())) < 3\nwhile w(): time.sleep(0.01)\n"
    code += "sys.exit(7) if r == '1' else time.sleep(600)"
    before, begun = signal.getsignal(signal.SIGTERM), time.monotonic()
    try:
        assert launch_ranks([sys.executable, "-c", code, str(tmp_path)], 3) == 7
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - begun < 60
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_5_machines_that_were_shut_down_went_on_to_be_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shutdown` stops a machine on EC2, and its disks cost; it had no rights; and only the crashed one asked for it.

    Now: whoever powers off is terminated with its disks; each does so by itself, armed before all else at its boot,
    and from then on through sudo.
    """
    monkeypatch.chdir(ROOT)
    (what,) = submit.load_recipes(str(ROOT / "recipes/resnet50_18min.py"))
    plan = submit.plan(what, backend="aws", rental_options={"offline": True})
    assert plan.rental_plan
    asked = dict(aws_plan.preview_requests(plan.spec, plan.rental_plan))["ec2:RunInstances"]
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert all(disk["Ebs"]["DeleteOnTermination"] for disk in asked["BlockDeviceMappings"])
    assert all(card["DeleteOnTermination"] for card in asked["NetworkInterfaces"])
    spot = asked.get("InstanceMarketOptions", {}).get("SpotOptions", {"InstanceInterruptionBehavior": "terminate"})
    assert spot["InstanceInterruptionBehavior"] == "terminate"
    boot = json.loads(asked["UserData"].partition("\n")[2])["bootcmd"]
    assert boot[0][0] == "systemd-run" and boot[0][-2:] == ["systemctl", "poweroff"]

    calls: list[list[str]] = []
    fake = {"run": lambda words, **_: calls.append(words), "DEVNULL": None}
    monkeypatch.setattr(watchdog, "subprocess", SimpleNamespace(**fake, TimeoutExpired=subprocess.TimeoutExpired))
    ended = watchdog.Watchdog(ROOT / "none", 1.0, 0.0, "", lambda: None, poweroff_grace=60.0)
    ended.stop()
    assert calls == [["sudo", "-n", "imgnet-limit", "600"]]


PICKLES = ("pickle", "dill", "marshal", "shelve", "joblib")
CODE = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load")
LOADERS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def dotted(node: ast.AST) -> str:
    """`a` or `a.b`, "" for anything longer."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def risks(tree: ast.AST) -> list[str]:
    """What in a program runs text or files as code, or words by a shell."""
    found = []
    for node in ast.walk(tree):
        names = [f"{node.module}.{one.name}" for one in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [dotted(node)] if isinstance(node, ast.Attribute) else []
        found += [one for one in names if one.split(".")[0] in PICKLES and one != "pickle.UnpicklingError"]
        if not isinstance(node, ast.Call):
            continue
        name, said = dotted(node.func), {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        word, safe = LOADERS.get(name, (None, None))
        if name in CODE or (word and said.get(word) is not safe):
            found.append(name)
        if said.get("shell", False) is not False:
            found.append("shell=True")
    return found


def test_6_what_came_by_the_command_line_or_from_a_server_was_run_as_code(tmp_path: Path) -> None:
    """`eval(args.phases)`, a base64 pickle among the options, `pickle.load` of a downloaded file."""
    found = {str(path.relative_to(ROOT)): risks(ast.parse(path.read_text())) for path in SOURCES}
    assert {name: what for name, what in found.items() if what} == {}
    sample = "pickle.load(x)\neval(x)\nnp.load(y)\ntorch.load(z, weights_only=False)\nrun(a, shell=True)"
    assert len(risks(ast.parse(sample))) == 5, "else this test sees nothing"

    harm = tmp_path / "harm"
    with pytest.raises(RecipeError):
        read_recipes(f"__import__('os').mkdir({str(harm)!r})")
    phases = f"[__import__('os').mkdir({str(harm)!r})]"
    (tmp_path / "x.json").write_text(json.dumps({"name": "x", "data": {}, "model": {}, "phases": phases}))
    with pytest.raises(RecipeError):
        read_recipes(str(tmp_path / "x.json"))

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(harm),)

    checkpoint_io.write_checkpoint(tmp_path, 1, {"x": Harm()})
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_io.load_checkpoint(tmp_path / "step-00000001.pt")
    assert not harm.exists()


@pytest.mark.parametrize(("images", "classes"), [(1, 3), (7, 4), (64, 5), (65, 40)])
def test_7_the_accuracy_was_computed_by_what_newer_libraries_refuse(images: int, classes: int) -> None:
    """`correct[:k].view(-1)` of a transposed tensor; `collections.Iterable`; `dist.reduce_op`."""
    dice = np.random.default_rng(images)
    numbers, labels = dice.normal(size=(images, classes)), dice.integers(0, classes, images)
    places = (-numbers).argsort(1).argsort(1)[np.arange(images), labels]
    for scores in (torch.from_numpy(numbers), torch.from_numpy(numbers.T.copy()).T):  # contiguous, and not
        top1, top5 = accuracy.count_correct(scores, torch.from_numpy(labels))
        assert (int(top1), int(top5)) == (int((places < 1).sum()), int((places < 5).sum()))
    old = ("collections.Iterable", "collections.Mapping", "collections.Sequence", "dist.reduce_op", ".cpu().item()[0]")
    assert [path for path in SOURCES if any(word in path.read_text() for word in old)] == []


@pytest.mark.parametrize("way", ["sgd", "lars"])
def test_8_an_overflow_on_one_machine_became_everybodys_weights(way: str, tmp_path: Path, in_group: Any) -> None:
    """A static loss scale, no look at the gradients: NaN in epoch 5 (imagenet18_old#19). Now all skip the step."""
    pixels = Pixels(32)
    what = recipe(row((0, 1), 8, 0.05), gpus=2, name=way)

    def work(group: ProcessGroup) -> tuple[list[list[Array]], list[float]]:
        one = trainer(tmp_path, what, pixels, net := linear(), group)
        one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        path, scales, loss = [values(net)], [], one.loss
        for bad in (group.rank == 1, False):
            one.loss = (lambda *given: loss(*given) * float("inf")) if bad else loss
            next(carry_out(one, pixels))
            path.append(values(net))
            scales.append(one.scaler.get_scale())
        assert all(torch.isfinite(part).all() for state in one.optimizer.state.values() for part in state.values())
        return path, scales

    found = in_group(2, work)
    for path, scales in found:
        assert scales == [512.0, 512.0], "halved once, for all"
        for first, second in zip(path[0], path[1], strict=True):
            np.testing.assert_array_equal(first, second)
        assert all(np.abs(second - first).max() > 0 for first, second in zip(path[1], path[2], strict=True))
    for one, other in zip(found[0][0][-1], found[1][0][-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_8_and_a_run_whose_loss_is_no_number_goes_no_further(tmp_path: Path) -> None:
    pixels = Pixels(32)
    one = trainer(tmp_path, recipe(row((0, 1), 8, 1e300)), pixels, linear(), ALONE)
    (epoch,) = one.schedule.epochs
    batches = map(pixels.make, one.sampler.train_requests(epoch))
    for step in range(3):
        one.run_step(epoch, step, batches)
        one.step = step + 1
    with pytest.raises(engine_trainer.Diverged, match=r"the loss is nan at step [23] "):
        one.sync_metrics(epoch)


def test_8_and_half_precision_has_a_scale_that_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for found, scaled in ((torch.float16, True), (torch.bfloat16, False), (torch.float32, False)):
        monkeypatch.setattr(process_group, "compute_dtype", lambda _, found=found: found)
        one = trainer(tmp_path, recipe(row((0, 1), 8, 0.1)), Pixels(8), plain=False)
        assert one.scaler.is_enabled() == scaled
        assert not scaled or one.scaler.get_backoff_factor() < 1
