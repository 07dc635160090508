"""Real trainers go on in place after the loss of one at a chosen place, and end with the bits of an undisturbed run."""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.forked_ranks import run_ranks
from support.run_outputs import final_state
from support.waiting import wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.distributed import process_group, regroup
from train.engine import run, trainer
from train.engine.agent_channel import AgentChannel
from train.engine.main import choose_recipe
from train.engine.options import parse_run_options
from train.recipe import Phase
from train.tools import process
from train.tools.agent_protocol import (
    ABORT_REQUEST_FILE,
    EVENTS_FOLDER,
    KeptStateReport,
    StandbyRequest,
    attempt_name,
    kept_state_file,
)
from train.tools.records import read_record

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Grad strides")]
RANKS = 3
REGROUPS = 20
RECOVERY_SCALARS = ("attempt", "in_place", "steps_lost", "pause")
OPTIONS = ("--gpus", "2", "--exact", "--workers", "0", "--keep", "last")
PLACES: dict[str, tuple[Any, str]] = {
    "join": (process_group, "join_process_group"),
    "phase": (trainer.Trainer, "begin_phase"),
    "validation": (trainer, "run_validation"),
    "saving": (trainer.Trainer, "save"),
}


class Loss(NamedTuple):
    """A process is killed, or freezes: in an attempt, when it has come to a place so often, at the next collectives."""

    place: str
    visit: int
    collective: int  # 0: at the place itself
    rank: int
    attempt: int = 1
    freezes: bool = False


def is_ahead(loss: Loss | None) -> bool:
    """Whether a process that never joins had finished one more step than the others: nobody gets it."""
    return loss is not None and (loss.attempt, loss.collective) == (2, 0)


class Lost(BaseException):
    """The process has ended: its connections are closed, and it does nothing more."""


def own_attempt() -> int:
    return int(Path(os.environ["IMGNET_WORK"]).name)


def lose(loss: Loss, folder: Path) -> None:
    """End this process. Of a frozen one, and of one that has not joined, only the agents can tell the others."""
    if not loss.freezes:
        regroup.shut_down_connections()
    if loss.freezes or (loss.place, loss.collective) == ("join", 0):
        time.sleep(0.3)
        works = [folder / f"work-{other}" / attempt_name(loss.attempt) for other in range(RANKS) if other != loss.rank]
        for work in works:
            (work / ABORT_REQUEST_FILE).touch()
        wait_for(lambda: all(any(work.glob("kept-*")) for work in works))
    raise Lost


def prepare_loss(loss: Loss, folder: Path) -> None:
    """Make this process end as the loss says."""
    visits, collectives = itertools.count(1), itertools.count(1)
    module, name = PLACES[loss.place]
    place, has_come = getattr(module, name), False

    def visit(*arguments: Any, **options: Any) -> Any:
        nonlocal has_come
        has_come = has_come or (own_attempt() == loss.attempt and next(visits) == loss.visit)
        if has_come and not loss.collective:
            if loss.place == "saving":  # the thread has begun to write
                place(*arguments, **options)
            lose(loss, folder)
        return place(*arguments, **options)

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if has_come and next(collectives) == loss.collective:
                lose(loss, folder)
            return collective(*arguments, **options)

        return run

    setattr(module, name, visit)
    for kind in ("all_reduce", "all_gather", "broadcast"):
        setattr(torch.distributed, kind, counted(getattr(torch.distributed, kind)))


def end_connections_in_each_attempt(rank: int, last: int) -> None:
    """End this process's connections in the second step of each third attempt, up to the last one."""
    run_step, steps = trainer.Trainer.run_step, Counter[int]()

    def run(self: Any, *arguments: Any) -> None:
        attempt = self.options.attempt
        steps[attempt] += 1
        if steps[attempt] == 2 and attempt <= last and rank == attempt % RANKS:
            regroup.shut_down_connections()
        run_step(self, *arguments)

    trainer.Trainer.run_step = run  # type: ignore[assignment, method-assign]


def count_resources() -> dict[str, Any]:
    """Return what this process uses: handles, threads, its loader's workers, and the megabytes of its memory."""
    own = Path("/proc/self")
    handles, threads = (len(list((own / kind).iterdir())) for kind in ("fd", "task"))
    memory = int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return {"handles": handles, "threads": threads, "workers": process.descendant_pids(os.getpid()), "memory": memory}


def train_on(
    rank: int, loss: Loss | None, words: list[str], folder: Path, ports: list[int]
) -> tuple[int, list[dict[str, Any]]]:
    """Train in an attempt, and after each loss in another one, for which this function is the agent.

    In the attempts before the loss, or in `REGROUPS`, connections end, but no process. Returns the exit code, -1 for
    the process that is lost, and what the process used before each further attempt.
    """
    used: list[dict[str, Any]] = []

    def members(attempt: int) -> list[int]:
        return [other for other in range(RANKS) if not loss or other != loss.rank or attempt <= loss.attempt]

    def request(attempt: int, ranks: list[int], *more: str) -> StandbyRequest:
        work = folder / f"work-{rank}" / attempt_name(attempt)
        work.mkdir(parents=True)
        (environment,) = process.rank_environments(1, ranks.index(rank), len(ranks), "127.0.0.1", ports[attempt])
        environment |= {"IMGNET_WORK": str(work), "IMGNET_IN_PLACE": "1", "IMGNET_TOKEN": str(attempt)}
        argv = (*words, "--attempt", str(attempt), "--local", str(work.parent), "--resume", "none", *more)
        return StandbyRequest(argv=argv, environment=environment, log=str(folder / f"log-{rank}"))

    class Channel(AgentChannel):
        def read_next_request(self) -> StandbyRequest | None:
            attempt = own_attempt()
            following = members(attempt + 1)
            paths = [
                folder / f"work-{other}" / attempt_name(attempt) / kept_state_file(members(attempt).index(other))
                for other in following
            ]
            reports = [report for path in paths if (report := read_record(path, KeptStateReport))]
            if len(reports) < len(following):
                return None
            used.append(count_resources())
            live_step = max(report.step for report in reports) + (attempt == 1 and is_ahead(loss))
            return request(attempt + 1, following, "--live-step", str(live_step))

    first = request(1, members(1))
    os.environ.update(first.environment)
    process_group.exit_process = lambda group: None
    end_connections_in_each_attempt(rank, loss.attempt - 1 if loss else REGROUPS)
    if loss and rank == loss.rank:
        prepare_loss(loss, folder)
    options = parse_run_options(first.argv)
    try:
        return run.run_attempt(options, choose_recipe(options), Channel()), used
    except Lost:
        return -1, used


@pytest.fixture(scope="module")
def recipe(runs: Any, tiny: Any) -> Path:
    """The second phase has another batch, the third one trains other layers, the fourth again all, in another size."""
    sizes: tuple[dict[str, Any], ...] = ({}, {"batch": 16}, {"frozen": True}, {"size": 64, "rect_val": True})
    phases = [
        Phase(**{"epochs": (number, number + 1), "size": 32, "batch": 8, "lr": 0.02, "min_scale": 0.35, **changes})
        for number, changes in enumerate(sizes)
    ]
    path: Path = runs.recipe(tiny(name="in-place", phases=phases))
    return path


@pytest.fixture(scope="module")
def undisturbed(runs: Any, recipe: Path) -> dict[str, Any]:
    runs.run(runs.folder / "alone-exact", *OPTIONS, recipe=recipe)
    return final_state(runs.folder / "alone-exact")


LOSSES = [
    *(Loss("validation", 1, number, number % 3, freezes=number % 2 == 1) for number in range(5)),
    Loss("saving", 1, 0, 0), Loss("saving", 1, 0, 1, freezes=True),
    Loss("phase", 3, 0, 0), Loss("phase", 3, 1, 1), Loss("phase", 4, 1, 2),
    # The sums of one step: statistics, two buckets of gradients, metrics.
    *(Loss("join", 1, number, number % 3, freezes=freezes) for number in range(23, 27) for freezes in (False, True)),
    # While the survivors of a loss form their group: connections, ten comparisons, transport, position and digest,
    # size and content of what is sent, the step, two buckets of the first pass.
    *(Loss("join", 1, number, number % 3, 2, number % 2 == 0) for number in (0, 1, *range(11, 18))),
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss)))
def test_a_loss_in_place_changes_no_bit(
    loss: Loss, runs: Any, recipe: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = runs.words(tmp_path / "out", OPTIONS, recipe)
    ports = [0, *(process.free_port() for _ in range(3))]
    outcomes = run_ranks(RANKS, lambda rank, _: train_on(rank, loss, words, tmp_path, ports))
    assert [code for code, _ in outcomes] == [-1 if rank == loss.rank else 0 for rank in range(RANKS)]
    check_equal(final_state(tmp_path / "out", loss.attempt + 1), undisturbed)
    events = EventAccumulator(str(tmp_path / f"work-{int(loss.rank == 0)}" / EVENTS_FOLDER))
    events.Reload()
    *shown, pause = (events.Scalars(f"recovery/{name}")[-1].value for name in RECOVERY_SCALARS)
    assert shown == [loss.attempt + 1, 1.0, is_ahead(loss)] and pause > 0


def check_equal(state: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert (state["epoch"], state["step"]) == (undisturbed["epoch"], undisturbed["step"])
    assert [row["val_loss"] for row in state["history"]] == [row["val_loss"] for row in undisturbed["history"]]
    assert not [name for name, value in undisturbed["model"].items() if not torch.equal(value, state["model"][name])]


def test_many_regroups_in_one_process_change_no_bit_and_use_no_more_of_anything(
    runs: Any, tiny: Any, tmp_path: Path
) -> None:
    """The workers of the loader are the same all the time. The first regroups still allocate memory that stays."""
    epochs = REGROUPS // 2 + 2
    recipe = runs.recipe(tiny(name="long", phases=[Phase(epochs=(0, epochs), size=32, batch=8, lr=(0.01, 0.02))]))
    runs.run(tmp_path / "alone", *OPTIONS, recipe=recipe)
    words = runs.words(tmp_path / "out", (*OPTIONS, "--workers", "1"), recipe)
    ports = [0, *(process.free_port() for _ in range(REGROUPS + 1))]
    outcomes = run_ranks(RANKS, lambda rank, _: train_on(rank, None, words, tmp_path, ports), seconds=200)
    check_equal(final_state(tmp_path / "out", REGROUPS + 1), final_state(tmp_path / "alone"))
    for code, used in outcomes:
        early, last = used[REGROUPS // 4], used[-1]
        assert code == 0 and len(used) == REGROUPS and len({*used[0]["workers"]} & {*last["workers"]}) == 1, used
        assert last["handles"] <= early["handles"] + 2 and last["threads"] <= early["threads"] + 2, used
        assert last["memory"] < early["memory"] + 20, used
