"""Real trainers go on in place after the loss of one at a chosen place, and end with the bits of an undisturbed run."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked_ranks import run_ranks
from support.run_outputs import final_state

from train.distributed import process_group, regroup
from train.engine import run, trainer
from train.engine.agent_channel import AgentChannel
from train.engine.main import choose_recipe
from train.engine.options import parse_run_options
from train.tools import process
from train.tools.agent_protocol import KeptStateReport, StandbyRequest, kept_state_file
from train.tools.records import read_record

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Grad strides")]
RANKS = 3
OPTIONS = ("--gpus", "2", "--exact", "--workers", "0", "--keep", "last")


class Lost(BaseException):
    """The process has ended: its connections are closed, and it does nothing more."""


def lose_at(place: str) -> None:
    """Make this process end at a place, or at the collective of this number."""
    begin_phase, all_reduce, calls = trainer.Trainer.begin_phase, torch.distributed.all_reduce, itertools.count(1)

    def lose(*_: Any, **__: Any) -> Any:
        regroup.shut_down_connections()
        raise Lost

    def begin(self: Any, epoch: Any, is_first: bool = False) -> None:
        begin_phase(self, epoch, is_first) if epoch.number < 3 else lose()

    def count(*arguments: Any, **options: Any) -> Any:
        return lose() if str(next(calls)) == place else all_reduce(*arguments, **options)

    trainer.Trainer.begin_phase = begin if place == "change of size" else begin_phase  # type: ignore[method-assign]
    trainer.run_validation = lose if place == "validation" else trainer.run_validation  # type: ignore[attr-defined]
    torch.distributed.all_reduce = count


def train_on(rank: int, victim: int, place: str, words: list[str], folder: Path, ports: list[int]) -> int:
    """Train in an attempt, and after the loss in another one, for which this function is the agent."""

    def request(attempt: int, ranks: list[int], *more: str) -> StandbyRequest:
        work = folder / f"work-{rank}" / f"00000{attempt}"
        work.mkdir(parents=True)
        (environment,) = process.rank_environments(1, ranks.index(rank), len(ranks), "127.0.0.1", ports[attempt])
        environment |= {"IMGNET_WORK": str(work), "IMGNET_IN_PLACE": "1", "IMGNET_TOKEN": str(attempt)}
        argv = (*words, "--attempt", str(attempt), "--local", str(work.parent), "--resume", "none", *more)
        return StandbyRequest(argv=argv, environment=environment, log=str(folder / f"log-{rank}"))

    class Channel(AgentChannel):
        def read_next_request(self) -> StandbyRequest | None:
            survivors = [other for other in range(RANKS) if other != victim]
            paths = [folder / f"work-{other}" / "000001" / kept_state_file(other) for other in survivors]
            reports = [report for path in paths if (report := read_record(path, KeptStateReport))]
            step = str(max((report.step for report in reports), default=0))
            return request(2, survivors, "--live-step", step) if len(reports) == len(survivors) else None

    first = request(1, list(range(RANKS)))
    os.environ.update(first.environment)
    process_group.exit_process = lambda group: None
    if rank == victim:
        lose_at(place)
    options = parse_run_options(first.argv)
    try:
        return run.run_attempt(options, choose_recipe(options), Channel())
    except Lost:
        return -1


@pytest.fixture(scope="module")
def undisturbed(runs: Any) -> dict[str, Any]:
    runs.run(runs.folder / "alone-exact", *OPTIONS)
    return final_state(runs.folder / "alone-exact")


# The 23rd to the 26th collective sum in one step: statistics, two buckets of gradients, metrics.
@pytest.mark.parametrize(("place", "victim"), [
    ("validation", 0), ("validation", 1), ("change of size", 0), ("change of size", 2),
    *((str(number), number % 3) for number in range(23, 27)),
])  # fmt: skip
def test_a_loss_in_place_changes_no_bit(
    place: str, victim: int, runs: Any, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = runs.words(tmp_path / "out", OPTIONS, None)
    ports = [0, process.free_port(), process.free_port()]
    codes = run_ranks(RANKS, lambda rank, _: train_on(rank, victim, place, words, tmp_path, ports))
    assert codes == [-1 if rank == victim else 0 for rank in range(RANKS)]
    state = final_state(tmp_path / "out", 2)
    assert (state["epoch"], state["step"]) == (undisturbed["epoch"], undisturbed["step"])
    assert [row["val_loss"] for row in state["history"]] == [row["val_loss"] for row in undisturbed["history"]]
    assert not [name for name, value in undisturbed["model"].items() if not torch.equal(value, state["model"][name])]
