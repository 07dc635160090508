"""Frozen phases: only the classifier changes; the rest keeps its weights, statistics and momenta.

Their resume is tested in tests/train/rules/test_resume.py.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_in_process import open_trainer
from torch import nn

from train.data.loading.loader import Batch
from train.distributed.process_group import ProcessGroup
from train.engine import trainer as engine_trainer
from train.models import external, freezing
from train.models.registry import build_model
from train.recipe import Model, Optim, Phase
from train.recipe.schedule import Epoch
from train.tools import process

LAST_NORM = "layer4.0.bn2"  # of resnet10_tiny


def make_phases(*frozen: bool | str) -> list[Phase]:
    return [
        Phase(epochs=(n, n + 1), size=32, batch=8, lr=0.05, min_scale=0.35, frozen=is_frozen)
        for n, is_frozen in enumerate(frozen)
    ]


def snapshot(trainer: engine_trainer.Trainer) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for parameter, parameter_state in trainer.optimizer.state.items():
        for key, value in parameter_state.items():
            state[f"{key} of {names[id(parameter)]}"] = torch.as_tensor(value).clone()
    return state


def changed_names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if name not in before or not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(("order", "optimizer"), [((True, False), "sgd"), ((False, True, "fixres"), "lamb")])
def test_frozen_phase_moves_only_the_last_layers(
    order: tuple[bool | str, ...], optimizer: str, tiny: Any, tiny_data: Path, tmp_path: Path, in_group: Any
) -> None:
    recipe = tiny(phases=make_phases(*order), optim=Optim(name=optimizer, weight_decay=0.01))

    def work(group: ProcessGroup) -> Any:
        trainer, decoder = open_trainer(recipe, tiny_data, tmp_path, group)
        snapshots = [snapshot(trainer)]
        run_epoch = trainer.run_epoch

        def run_epoch_and_snapshot(epoch: Epoch, batches: Iterator[Batch]) -> None:
            run_epoch(epoch, batches)
            snapshots.append(snapshot(trainer))

        trainer.run_epoch = run_epoch_and_snapshot  # type: ignore[method-assign]
        trainer.train(decoder, 0)
        all_require_grad = all(parameter.requires_grad for parameter in trainer.model.parameters())
        head = trainer.model.get_parameter("fc.weight").tolist()
        changes = [sorted(changed_names(*pair)) for pair in pairwise(snapshots)]
        return changes, len(snapshots[-1]), all_require_grad, head

    answers = in_group(2, work)
    for changes, tensor_count, all_require_grad, head in answers:
        assert len(changes) == len(order) and all_require_grad is (not order[-1])
        for frozen, names in zip(order, changes, strict=True):
            if frozen:
                layers = {name.split()[-1].rpartition(".")[0] for name in names}
                assert layers == ({"fc", LAST_NORM} if frozen == "fixres" else {"fc"})
                assert {"fc.weight", "fc.bias"} <= set(names)
                assert (f"{LAST_NORM}.running_var" in names) is (frozen == "fixres")
            else:
                assert len(names) > 0.9 * tensor_count
        assert head == answers[0][3]  # equal on all processes


def test_freezer_frozen_layers_get_no_gradient_and_eval_mode() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(4, 2))
    untrained = net[0].bias  # by the user's own choice
    assert untrained is not None
    untrained.requires_grad_(False)
    external.check_scores_and_find_classifier(net, "net", 2, 4)  # records its classifier, as `build_model` does
    freezer = freezing.Freezer(net)
    net(torch.ones(2, 3, 4, 4)).sum().backward()
    freezer.set_frozen(True)
    freezer.set_train_mode()
    assert [item.training for item in net] == [False] * 5 + [True]
    net(torch.ones(2, 3, 4, 4)).sum().backward()
    assert [item.grad is not None for item in net.parameters()] == [False] * 4 + [True] * 2
    freezer.set_frozen(False)
    freezer.set_train_mode()
    assert all(item.training for item in net)
    assert [item.requires_grad for item in net.parameters()] == [True, False, True, True, True, True]


def test_run_refuses_weights_that_differ_between_processes(runs: Any, tiny: Any, tmp_path: Path) -> None:
    """Nothing is copied from rank 0, so different weights would stay different forever."""
    model = Model(name="resnet10_tiny", weights="~/weights.pt")
    recipe = runs.recipe(tiny(name="differ", model=model, phases=make_phases(True)))
    ranks = []
    for rank, variables in enumerate(process.rank_environments(2, 0, 2, "127.0.0.1", process.free_port())):
        home = tmp_path / f"home-{rank}"
        home.mkdir()
        torch.save(build_model(Model(name="resnet10_tiny"), 10, seed=rank).state_dict(), home / "weights.pt")
        environment = {**variables, "HOME": str(home)}
        ranks.append(runs.start(tmp_path / "differ", "--gpus", "2", recipe=recipe, environment=environment))
    output = runs.end(tmp_path / "differ", *ranks, code=1)
    assert "the initial weights of the network differ between the machines" in output
