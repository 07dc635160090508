"""Real trainers go on in place after the loss of one at a chosen place, and end with the bits of an undisturbed run."""

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked_ranks import run_ranks
from support.run_outputs import final_state
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.distributed import process_group, regroup
from train.engine import run, trainer
from train.engine.agent_channel import AgentChannel
from train.engine.main import choose_recipe
from train.engine.options import parse_run_options
from train.recipe import Phase
from train.tools import process
from train.tools.agent_protocol import EVENTS_FOLDER, KeptStateReport, StandbyRequest, attempt_name, kept_state_file
from train.tools.records import read_record

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Grad strides")]
RANKS = 3
REGROUPS = 20
RECOVERY_SCALARS = ("attempt", "in_place", "steps_lost", "pause")
OPTIONS = ("--gpus", "2", "--exact", "--workers", "0", "--keep", "last")


class Lost(BaseException):
    """The process has ended: its connections are closed, and it does nothing more."""


def lose_at(place: str) -> None:
    """Make this process end at a place, or at the collective of this number."""
    begin_phase, begin_save = trainer.Trainer.begin_phase, trainer.Trainer.save
    all_reduce, calls = torch.distributed.all_reduce, itertools.count(1)

    def lose(*_: Any, **__: Any) -> Any:
        regroup.shut_down_connections()
        raise Lost

    def save(self: Any, **options: Any) -> None:
        begin_save(self, **options)
        lose()

    def begin(self: Any, epoch: Any, is_first: bool = False) -> None:
        begin_phase(self, epoch, is_first) if epoch.number < 3 else lose()

    def count(*arguments: Any, **options: Any) -> Any:
        return lose() if str(next(calls)) == place else all_reduce(*arguments, **options)

    trainer.Trainer.begin_phase = begin if place == "change of size" else begin_phase  # type: ignore[method-assign]
    trainer.run_validation = lose if place == "validation" else trainer.run_validation  # type: ignore[attr-defined]
    trainer.Trainer.save = save if place == "saving" else begin_save  # type: ignore[assignment, method-assign]
    torch.distributed.all_reduce = count


def end_connections_in_each_attempt(rank: int) -> None:
    """End this process's connections in the second step of each third attempt, up to the last but one."""
    run_step, steps = trainer.Trainer.run_step, Counter[int]()

    def run(self: Any, *arguments: Any) -> None:
        attempt = self.options.attempt
        steps[attempt] += 1
        if steps[attempt] == 2 and attempt <= REGROUPS and rank == attempt % RANKS:
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
    rank: int, victim: int | None, place: str, words: list[str], folder: Path, ports: list[int]
) -> tuple[int, list[dict[str, Any]]]:
    """Train in an attempt, and after each loss in another one, for which this function is the agent.

    Returns the exit code, -1 for the victim, and what the process used before each further attempt.
    """
    attempts, used = itertools.count(1), []
    attempt = next(attempts)

    def request(attempt: int, ranks: list[int], *more: str) -> StandbyRequest:
        work = folder / f"work-{rank}" / attempt_name(attempt)
        work.mkdir(parents=True)
        (environment,) = process.rank_environments(1, ranks.index(rank), len(ranks), "127.0.0.1", ports[attempt])
        environment |= {"IMGNET_WORK": str(work), "IMGNET_IN_PLACE": "1", "IMGNET_TOKEN": str(attempt)}
        argv = (*words, "--attempt", str(attempt), "--local", str(work.parent), "--resume", "none", *more)
        return StandbyRequest(argv=argv, environment=environment, log=str(folder / f"log-{rank}"))

    class Channel(AgentChannel):
        def read_next_request(self) -> StandbyRequest | None:
            nonlocal attempt
            survivors = [other for other in range(RANKS) if other != victim]
            ranks = range(len(survivors)) if attempt > 1 else survivors
            paths = [
                folder / f"work-{other}" / attempt_name(attempt) / kept_state_file(number)
                for number, other in zip(ranks, survivors, strict=True)
            ]
            reports = [report for path in paths if (report := read_record(path, KeptStateReport))]
            if len(reports) < len(survivors):
                return None
            used.append(count_resources())
            attempt = next(attempts)
            return request(attempt, survivors, "--live-step", str(max(report.step for report in reports)))

    first = request(1, list(range(RANKS)))
    os.environ.update(first.environment)
    process_group.exit_process = lambda group: None
    if rank == victim:
        lose_at(place)
    elif victim is None:
        end_connections_in_each_attempt(rank)
    options = parse_run_options(first.argv)
    try:
        return run.run_attempt(options, choose_recipe(options), Channel()), used
    except Lost:
        return -1, used


@pytest.fixture(scope="module")
def undisturbed(runs: Any) -> dict[str, Any]:
    runs.run(runs.folder / "alone-exact", *OPTIONS)
    return final_state(runs.folder / "alone-exact")


# The 23rd to the 26th collective sum in one step: statistics, two buckets of gradients, metrics.
@pytest.mark.parametrize(("place", "victim"), [
    ("validation", 0), ("validation", 1), ("saving", 0), ("change of size", 0), ("change of size", 2),
    *((str(number), number % 3) for number in range(23, 27)),
])  # fmt: skip
def test_a_loss_in_place_changes_no_bit(
    place: str, victim: int, runs: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = runs.words(tmp_path / "out", OPTIONS, None)
    ports = [0, process.free_port(), process.free_port()]
    outcomes = run_ranks(RANKS, lambda rank, _: train_on(rank, victim, place, words, tmp_path, ports))
    assert [code for code, _ in outcomes] == [-1 if rank == victim else 0 for rank in range(RANKS)]
    check_equal(final_state(tmp_path / "out", 2), undisturbed)
    events = EventAccumulator(str(tmp_path / f"work-{int(victim == 0)}" / EVENTS_FOLDER))
    events.Reload()
    shown = {name: [event.value for event in events.Scalars(f"recovery/{name}")] for name in RECOVERY_SCALARS}
    assert [*shown.values()][:3] == [[2.0], [1.0], [0.0]] and shown["pause"][0] > 0


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
    outcomes = run_ranks(RANKS, lambda rank, _: train_on(rank, None, "", words, tmp_path, ports), seconds=200)
    check_equal(final_state(tmp_path / "out", REGROUPS + 1), final_state(tmp_path / "alone"))
    for code, used in outcomes:
        early, last = used[REGROUPS // 4], used[-1]
        assert code == 0 and len(used) == REGROUPS and len({*used[0]["workers"]} & {*last["workers"]}) == 1, used
        assert last["handles"] <= early["handles"] + 2 and last["threads"] <= early["threads"] + 2, used
        assert last["memory"] < early["memory"] + 20, used
