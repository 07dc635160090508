"""Frozen phases: only the classifier moves; the rest keeps weights, statistics and momentum; on any number of
processes, and after a kill in the middle.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.data.loading.dataset import open_dataset
from train.data.loading.loader import BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed.process_group import ProcessGroup
from train.engine import trainer as engine_trainer
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_train_options
from train.models import external, freezing
from train.models.registry import build_model
from train.optim import factory
from train.recipe import Model, Optim, Phase
from train.recipe.schedule import Schedule
from train.tools import checkpoint_io, process

CPU = torch.device("cpu")
EPOCH = 4  # steps: 50 images by 16


def rows(*frozen: bool) -> list[Phase]:
    return [
        Phase(epochs=(n, n + 1), size=32, batch=8, lr=0.05, min_scale=0.35, frozen=one) for n, one in enumerate(frozen)
    ]


def trainer(
    recipe: Any, data: Path, out: Path, world: int = 1, rank: int = 0
) -> tuple[engine_trainer.Trainer, BatchDecoder]:
    options = parse_train_options(["tiny", "--out", str(out)])
    found = open_dataset(recipe, data, data)
    feed = DistributedBatchSampler(Schedule(recipe, len(found.train), 2), found.indexes, 0, rank, world)
    group = ProcessGroup(rank, rank, world, world, CPU)
    return engine_trainer.Trainer(options, recipe, group, feed, len(found.train.classes), AgentChannel()), BatchDecoder(
        found.indexes, 0
    )


def snapshot(one: engine_trainer.Trainer) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in one.model.state_dict().items()}
    names = {id(parameter): name for name, parameter in one.model.named_parameters()}
    for parameter, kept in one.optimizer.state.items():
        for key, value in kept.items():
            state[f"{key} of {names[id(parameter)]}"] = torch.as_tensor(value).clone()
    return state


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, one in after.items() if name not in before or not torch.equal(one, before[name])}


@pytest.fixture(scope="module")
def imported() -> None:
    """What the first optimizer of a process imports takes seconds: before the fork, not in each child."""
    factory.build_optimizer(nn.Linear(1, 1), Optim())


@pytest.mark.parametrize(("order", "optimizer"), [((True, False), "sgd"), ((False, True, False), "lamb")])
@pytest.mark.parametrize("world", [1, 2])
def test_in_a_frozen_phase_the_classifier_moves_and_nothing_else(
    world: int, order: tuple[bool, ...], optimizer: str, tiny: Any, tiny_data: Path, tmp_path: Path, in_group: Any,
    imported: None,
) -> None:  # fmt: skip
    recipe = tiny(phases=rows(*order), optim=Optim(name=optimizer, weight_decay=0.01))

    def work(group: ProcessGroup) -> Any:
        one, images = trainer(recipe, tiny_data, tmp_path / f"{group.world_size}", group.world_size, group.rank)
        seen = [snapshot(one)]
        first = type(one).run_epoch

        def epoch(self: engine_trainer.Trainer, *words: Any) -> None:
            first(self, *words)
            seen.append(snapshot(self))

        type(one).run_epoch = epoch  # type: ignore[method-assign]
        try:
            one.train(images, 0)
        finally:
            type(one).run_epoch = first  # type: ignore[method-assign]
        wants = all(parameter.requires_grad for parameter in one.model.parameters())
        head = one.model.fc.weight.tolist()
        return [sorted(moved(*pair)) for pair in pairwise(seen)], len(seen[-1]), wants, head

    answers = in_group(world, work)
    for found, every, wants, head in answers:
        assert len(found) == len(order) and wants is not order[-1]
        for frozen, names in zip(order, found, strict=True):
            if frozen:
                assert names and all(
                    name.removesuffix(".weight").removesuffix(".bias").endswith("fc") for name in names
                )
                assert {"fc.weight", "fc.bias"} <= set(names)
            else:
                assert len(names) > 0.9 * every
        assert head == answers[0][3]  # on all processes the same


def test_what_is_frozen_is_neither_computed_nor_in_training() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(4, 2))
    never = net[0].bias
    assert never is not None
    never.requires_grad_(False)
    external.check_scores_and_find_classifier(net, "net", 2, 4)  # finds its classifier, as where it was made
    freezer = freezing.Freezer(net)
    net(torch.ones(2, 3, 4, 4)).sum().backward()
    freezer.set_frozen(True)
    freezer.set_train_mode()
    assert [one.training for one in net] == [False] * 5 + [True]
    assert all(one.grad is None for one in net.parameters())
    statistics = net[1].state_dict()["running_mean"].clone()  # type: ignore[union-attr]
    deep = net[:5](torch.ones(2, 3, 4, 4))
    assert not deep.requires_grad  # the graph begins at the classifier
    net(torch.ones(2, 3, 4, 4)).sum().backward()
    assert [one.grad is not None for one in net.parameters()] == [False] * 4 + [True] * 2
    assert torch.equal(net[1].state_dict()["running_mean"], statistics)  # type: ignore[union-attr]
    freezer.set_frozen(False)
    freezer.set_train_mode()
    assert all(one.training for one in net)
    assert [one.requires_grad for one in net.parameters()] == [True, False, True, True, True, True]


def test_epochs_are_cut_where_what_is_trained_changes(tiny: Any) -> None:
    epochs = Schedule(tiny(phases=rows(True, True, False, False, True)), 50, 2).epochs
    assert [one.number for one in freezing.epochs_until_freezing_changes(epochs, epochs[0])] == [0, 1]
    assert [one.number for one in freezing.epochs_until_freezing_changes(epochs, epochs[1])] == [1]
    assert [one.number for one in freezing.epochs_until_freezing_changes(epochs[3:], epochs[3])] == [3]
    assert [one.number for one in freezing.epochs_until_freezing_changes(epochs, epochs[4])] == [4]


def test_a_classifier_alone_learns_from_the_same_start_what_a_separate_linear_would(
    tiny: Any, tiny_data: Path, tmp_path: Path
) -> None:
    """One frozen epoch is a Linear trained on the pooled features of a network in eval mode."""
    recipe = tiny(phases=rows(True), optim=Optim(momentum=0.9, weight_decay=0.01))
    one, images = trainer(recipe, tiny_data, tmp_path / "one")
    net = build_model(recipe.model, one.model.fc.out_features, 0).eval()  # type: ignore[operator, union-attr]
    made = torch.optim.SGD(net.fc.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)  # type: ignore[union-attr]
    kept: list[Any] = []
    prepare = one.preprocessor.prepare
    one.preprocessor.prepare = lambda batch: kept.append((batch.request, out := prepare(batch))) or out  # type: ignore
    one.train(images, 0)
    chunks = [(work, images, labels) for work, (images, labels) in kept if work.split == "train"]
    assert len(chunks) == 2 * EPOCH - 1  # the last step's two images are one chunk
    for step in range(EPOCH):
        mine = chunks[2 * step : 2 * step + 2]
        made.zero_grad()
        count = sum(len(labels) for _, _, labels in mine)
        for _, pixels, labels in mine:
            with torch.no_grad():
                deep = net.pool(net.stages(net.stem(pixels))).flatten(1)  # type: ignore[operator]
            loss = nn.functional.cross_entropy(net.fc(deep), labels, reduction="sum")  # type: ignore[operator]
            (loss / count).backward()
        made.step()
    torch.testing.assert_close(one.model.fc.weight, net.fc.weight)  # type: ignore[union-attr]


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def recipe(runs: Any, tiny: Any) -> Path:
    """Frozen, free, frozen: a run may be killed in each, and goes over each border."""
    path: Path = runs.recipe(tiny(name="frozen", phases=rows(True, False, True)))
    return path


def final(out: Path) -> dict[str, Any]:
    path = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert path is not None and path.stem == f"step-{3 * EPOCH:08d}"
    return checkpoint_io.load_checkpoint(path)


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    momenta = {f"momentum {key}": one["momentum_buffer"] for key, one in state["optimizer"]["state"].items()}
    return {**state["model"], **momenta, "statistics": state["statistics"]}


@pytest.fixture(scope="session")
def undisturbed(runs: Any, recipe: Path) -> dict[int, Path]:
    found = {}
    for world in (1, 2):
        found[world] = runs.folder / f"frozen-{world}"
        runs.run(found[world], "--gpus", "2", world=world, recipe=recipe)
    return found


def test_one_process_and_two_make_the_same_bits_of_a_frozen_and_a_free_phase(runs: Any, tiny: Any) -> None:
    """In the exact mode. A frozen phase behind a free one sees the mean of all processes' statistics, as validation
    does, and these depend on how many there are.
    """
    path = runs.recipe(tiny(name="frozen-exact", phases=rows(True, False)))
    found = []
    for world in (1, 2):
        out = runs.folder / f"frozen-exact-{world}"
        runs.run(out, "--gpus", "2", "--exact", "--workers", "0", world=world, recipe=path)
        newest = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
        assert newest is not None
        found.append(tensors(checkpoint_io.load_checkpoint(newest)))
    own = ("running_mean", "running_var", "num_batches_tracked", "statistics")
    assert not [
        name for name, one in found[0].items() if not name.endswith(own) and not torch.equal(one, found[1][name])
    ]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("step", [2, EPOCH + 2, 2 * EPOCH + 2])
def test_a_run_that_is_killed_in_a_phase_of_any_kind_ends_with_the_same_bits(
    step: int, world: int, runs: Any, recipe: Path, undisturbed: dict[int, Path]
) -> None:
    out = runs.folder / f"frozen-killed-{world}-{step}"
    argv = ("--gpus", "2", "--save-seconds", "0")
    folder = out / "checkpoints" / "000001"

    def saved() -> bool:
        return any(int(path.stem.removeprefix("step-")) >= step for path in folder.glob("step-*.pt"))

    runs.kill_when(out, saved, *argv, world=world, recipe=recipe)
    said = runs.run(out, *argv, world=world, recipe=recipe)
    assert said.count("resumed from") == 1
    mine, theirs = tensors(final(out)), tensors(final(undisturbed[world]))
    assert mine.keys() == theirs.keys() and len(mine) > 50
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def test_a_frozen_run_starts_from_a_file_of_weights_and_keeps_them(
    runs: Any, tiny: Any, undisturbed: dict[int, Path]
) -> None:
    """What finetune does: pretrained weights, then the classifier alone; the same file on both processes."""
    source = checkpoint_io.newest_checkpoint(undisturbed[1] / "checkpoints" / "000001")
    assert source is not None
    model = Model(name="resnet10_tiny", weights=str(source))
    path = runs.recipe(tiny(name="finetune", model=model, phases=rows(True)))
    out = runs.folder / "finetune"
    runs.run(out, "--gpus", "2", world=2, recipe=path)
    newest = checkpoint_io.newest_checkpoint(out / "checkpoints" / "000001")
    assert newest is not None
    mine, start = checkpoint_io.load_checkpoint(newest)["model"], checkpoint_io.load_checkpoint(source)["model"]
    assert {name for name in mine if not torch.equal(mine[name], start[name])} == {"fc.weight", "fc.bias"}


def test_files_that_differ_between_processes_are_refused(runs: Any, tiny: Any, undisturbed: dict[int, Path]) -> None:
    """Nothing is copied from rank 0: other weights there would stay others for ever."""
    files = [checkpoint_io.newest_checkpoint(undisturbed[world] / "checkpoints" / "000001") for world in (1, 2)]
    out = runs.folder / "differ"
    started = []
    for rank, file in enumerate(files):
        (runs.folder / f"home-{rank}").mkdir()
        (runs.folder / f"home-{rank}" / "weights.pt").symlink_to(file)
        model = Model(name="resnet10_tiny", weights="~/weights.pt")
        path = runs.recipe(tiny(name="differ", model=model, phases=rows(True)))
        started.append((rank, path))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process.free_port())}
    ranks = [
        runs.start(
            out,
            "--gpus",
            "2",
            recipe=path,
            environment={
                **place,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "HOME": str(runs.folder / f"home-{rank}"),
            },
        )
        for rank, path in started
    ]
    said = runs.end(out, *ranks, code=1)
    assert "the initial weights of the network differ between the machines" in said
