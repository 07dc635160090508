"""Frozen phases: only the classifier changes; the rest keeps its weights, statistics and momenta.

On any number of processes, and after a kill in the middle.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.data.loading.dataset import open_dataset
from train.data.loading.loader import Batch, BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed.process_group import ProcessGroup
from train.engine import trainer as engine_trainer
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_run_options
from train.models import external, freezing
from train.models.registry import build_model
from train.optim import factory
from train.recipe import Model, Optim, Phase
from train.recipe.schedule import Epoch, Schedule
from train.tools import checkpoint_io, process

CPU = torch.device("cpu")
STEPS_PER_EPOCH = 4  # 50 images in global batches of 16
LAST_NORM = "stages.3.norm2"  # of resnet10_tiny


def make_phases(*frozen: bool | str) -> list[Phase]:
    return [
        Phase(epochs=(n, n + 1), size=32, batch=8, lr=0.05, min_scale=0.35, frozen=is_frozen)
        for n, is_frozen in enumerate(frozen)
    ]


def make_trainer(
    recipe: Any, data: Path, out: Path, world: int = 1, rank: int = 0
) -> tuple[engine_trainer.Trainer, BatchDecoder]:
    options = parse_run_options(["tiny", "--out", str(out)])
    dataset = open_dataset(recipe, data, data)
    sampler = DistributedBatchSampler(Schedule(recipe, len(dataset.train), 2), dataset.indexes, 0, rank, world)
    group = ProcessGroup(rank, rank, world, world, CPU)
    return engine_trainer.Trainer(options, recipe, group, sampler, dataset.train.classes, AgentChannel()), BatchDecoder(
        dataset.indexes, 0
    )


def snapshot(trainer: engine_trainer.Trainer) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for parameter, parameter_state in trainer.optimizer.state.items():
        for key, value in parameter_state.items():
            state[f"{key} of {names[id(parameter)]}"] = torch.as_tensor(value).clone()
    return state


def changed_names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if name not in before or not torch.equal(tensor, before[name])}


@pytest.fixture(scope="module")
def optimizer_imported() -> None:
    """The first optimizer of a process imports torch._dynamo for seconds: do it before the fork, not in each child."""
    factory.build_optimizer(nn.Linear(1, 1), Optim())


@pytest.mark.parametrize(("order", "optimizer"), [((True, False), "sgd"), ((False, True, "fixres"), "lamb")])
@pytest.mark.parametrize("world", [1, 2])
def test_frozen_phase_moves_only_the_last_layers(
    world: int,
    order: tuple[bool | str, ...],
    optimizer: str,
    tiny: Any,
    tiny_data: Path,
    tmp_path: Path,
    in_group: Any,
    optimizer_imported: None,
) -> None:
    recipe = tiny(phases=make_phases(*order), optim=Optim(name=optimizer, weight_decay=0.01))

    def work(group: ProcessGroup) -> Any:
        trainer, decoder = make_trainer(
            recipe, tiny_data, tmp_path / f"{group.world_size}", group.world_size, group.rank
        )
        snapshots = [snapshot(trainer)]
        run_epoch = type(trainer).run_epoch

        def run_epoch_and_snapshot(self: engine_trainer.Trainer, epoch: Epoch, batches: Iterator[Batch]) -> None:
            run_epoch(self, epoch, batches)
            snapshots.append(snapshot(self))

        type(trainer).run_epoch = run_epoch_and_snapshot  # type: ignore[method-assign]
        try:
            trainer.train(decoder, 0)
        finally:
            type(trainer).run_epoch = run_epoch  # type: ignore[method-assign]
        all_require_grad = all(parameter.requires_grad for parameter in trainer.model.parameters())
        head = trainer.model.get_parameter("fc.weight").tolist()
        return (
            [sorted(changed_names(*pair)) for pair in pairwise(snapshots)],
            len(snapshots[-1]),
            all_require_grad,
            head,
        )

    answers = in_group(world, work)
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
    untrained = net[0].bias
    assert untrained is not None
    untrained.requires_grad_(False)
    external.check_scores_and_find_classifier(net, "net", 2, 4)  # records its classifier, as `build_model` does
    freezer = freezing.Freezer(net)
    net(torch.ones(2, 3, 4, 4)).sum().backward()
    freezer.set_frozen(True)
    freezer.set_train_mode()
    assert [item.training for item in net] == [False] * 5 + [True]
    assert all(item.grad is None for item in net.parameters())
    statistics = net[1].state_dict()["running_mean"].clone()
    features = net[:5](torch.ones(2, 3, 4, 4))
    assert not features.requires_grad  # the graph begins at the classifier
    net(torch.ones(2, 3, 4, 4)).sum().backward()
    assert [item.grad is not None for item in net.parameters()] == [False] * 4 + [True] * 2
    assert torch.equal(net[1].state_dict()["running_mean"], statistics)
    freezer.set_frozen(False)
    freezer.set_train_mode()
    assert all(item.training for item in net)
    assert [item.requires_grad for item in net.parameters()] == [True, False, True, True, True, True]


def test_epochs_until_freezing_changes(tiny: Any) -> None:
    epochs = Schedule(tiny(phases=make_phases(True, True, False, False, True)), 50, 2).epochs
    assert [epoch.number for epoch in freezing.epochs_until_freezing_changes(epochs, epochs[0])] == [0, 1]
    assert [epoch.number for epoch in freezing.epochs_until_freezing_changes(epochs, epochs[1])] == [1]
    assert [epoch.number for epoch in freezing.epochs_until_freezing_changes(epochs[3:], epochs[3])] == [3]
    assert [epoch.number for epoch in freezing.epochs_until_freezing_changes(epochs, epochs[4])] == [4]


def test_frozen_epoch_equals_training_a_linear_on_features(tiny: Any, tiny_data: Path, tmp_path: Path) -> None:
    """A frozen epoch equals a Linear trained on the pooled features of the network in eval mode."""
    recipe = tiny(phases=make_phases(True), optim=Optim(momentum=0.9, weight_decay=0.01))
    trainer, decoder = make_trainer(recipe, tiny_data, tmp_path / "one")
    net: Any = build_model(recipe.model, len(trainer.model.get_parameter("fc.bias")), 0).eval()
    optimizer = torch.optim.SGD(net.fc.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    prepared: list[Any] = []
    prepare = trainer.preprocessor.prepare
    trainer.preprocessor.prepare = lambda batch: prepared.append((batch.request, result := prepare(batch))) or result  # type: ignore
    trainer.train(decoder, 0)
    chunks = [(request, decoder, labels) for request, (decoder, labels) in prepared if request.split == "train"]
    assert len(chunks) == 2 * STEPS_PER_EPOCH - 1  # the two images of the last step are one chunk
    for step in range(STEPS_PER_EPOCH):
        step_chunks = chunks[2 * step : 2 * step + 2]
        optimizer.zero_grad()
        count = sum(len(labels) for _, _, labels in step_chunks)
        for _, pixels, labels in step_chunks:
            with torch.no_grad():
                features = net.pool(net.stages(net.stem(pixels))).flatten(1)
            loss = nn.functional.cross_entropy(net.fc(features), labels, reduction="sum")
            (loss / count).backward()
        optimizer.step()
    torch.testing.assert_close(trainer.model.get_parameter("fc.weight"), net.fc.weight)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def recipe(runs: Any, tiny: Any) -> Path:
    """A recipe of a frozen, a free and a frozen phase."""
    path: Path = runs.recipe(tiny(name="frozen", phases=make_phases(True, False, True)))
    return path


def final_state(out: Path) -> dict[str, Any]:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert path is not None and path.stem == f"step-{3 * STEPS_PER_EPOCH:08d}"
    return checkpoint_io.load_checkpoint(path)


def trained_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    momenta = {
        f"momentum {key}": parameter_state["momentum_buffer"]
        for key, parameter_state in state["optimizer"]["state"].items()
    }
    return {**state["model"], **momenta}


@pytest.fixture(scope="session")
def uninterrupted(runs: Any, recipe: Path) -> dict[int, Path]:
    folders = {}
    for world in (1, 2):
        folders[world] = runs.folder / f"frozen-{world}"
        runs.run(folders[world], "--gpus", "2", world=world, recipe=recipe)
    return folders


def test_run_frozen_then_free_same_bits_on_one_and_two_processes(runs: Any, tiny: Any) -> None:
    """With --exact. The last frozen phase uses the running statistics of the free one, as validation does."""
    path = runs.recipe(tiny(name="frozen-exact", phases=make_phases(True, False, True)))
    tensors_by_world = []
    for world in (1, 2):
        out = runs.folder / f"frozen-exact-{world}"
        runs.run(out, "--gpus", "2", "--exact", "--workers", "0", world=world, recipe=path)
        newest = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
        assert newest is not None
        tensors_by_world.append(trained_tensors(checkpoint_io.load_checkpoint(newest)))
    one, two = tensors_by_world
    assert not [name for name in one if not torch.equal(one[name], two[name])]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("step", [2, STEPS_PER_EPOCH + 2, 2 * STEPS_PER_EPOCH + 2])
def test_run_with_frozen_phases_killed_and_resumed_same_bits(
    step: int, world: int, runs: Any, recipe: Path, uninterrupted: dict[int, Path]
) -> None:
    out = runs.folder / f"frozen-killed-{world}-{step}"
    options = ("--gpus", "2", "--save-seconds", "0")
    folder = out / "checkpoints" / "000001"

    def is_saved() -> bool:
        return any(int(path.stem.removeprefix("step-")) >= step for path in folder.glob("step-*.pt"))

    runs.kill_when(out, is_saved, *options, world=world, recipe=recipe)
    output = runs.run(out, *options, world=world, recipe=recipe)
    assert output.count("resumed from") == 1
    tensors, expected = trained_tensors(final_state(out)), trained_tensors(final_state(uninterrupted[world]))
    assert tensors.keys() == expected.keys() and len(tensors) > 50
    assert not [name for name in tensors if not torch.equal(tensors[name], expected[name])]


def test_frozen_run_keeps_the_pretrained_weights(runs: Any, tiny: Any, uninterrupted: dict[int, Path]) -> None:
    """As in the recipe finetune: pretrained weights, then only the classifier is trained."""
    source = checkpoint_io.newest_checkpoint(uninterrupted[1] / "checkpoints" / "000001")
    assert source is not None
    model = Model(name="resnet10_tiny", weights=str(source))
    path = runs.recipe(tiny(name="finetune", model=model, phases=make_phases(True)))
    out = runs.folder / "finetune"
    runs.run(out, "--gpus", "2", world=2, recipe=path)
    newest = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert newest is not None
    weights, pretrained_weights = (
        checkpoint_io.load_checkpoint(newest)["model"],
        checkpoint_io.load_checkpoint(source)["model"],
    )
    assert {name for name in weights if not torch.equal(weights[name], pretrained_weights[name])} == {
        "fc.weight",
        "fc.bias",
    }


def test_run_refuses_weights_that_differ_between_processes(
    runs: Any, tiny: Any, uninterrupted: dict[int, Path]
) -> None:
    """Nothing is copied from rank 0, so different weights would stay different forever."""
    files = [checkpoint_io.newest_checkpoint(uninterrupted[world] / "checkpoints" / "000001") for world in (1, 2)]
    out = runs.folder / "differ"
    recipes = []
    for rank, file in enumerate(files):
        (runs.folder / f"home-{rank}").mkdir()
        (runs.folder / f"home-{rank}" / "weights.pt").symlink_to(file)
        model = Model(name="resnet10_tiny", weights="~/weights.pt")
        path = runs.recipe(tiny(name="differ", model=model, phases=make_phases(True)))
        recipes.append((rank, path))
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.free_port())}
    ranks = [
        runs.start(
            out,
            "--gpus",
            "2",
            recipe=path,
            environment={
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "HOME": str(runs.folder / f"home-{rank}"),
            },
        )
        for rank, path in recipes
    ]
    output = runs.end(out, *ranks, code=1)
    assert "the initial weights of the network differ between the machines" in output
