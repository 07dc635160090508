"""A launch on rented machines killed at any of its calls to the cloud: whatever is typed next, nobody pays twice."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.aws_user import NEVER, Renter
from support.simcloud.fixture import Simcloud

AGAIN = ("launch", "down", "gc", "ls")
LOOKS = ("Describe", "Get", "List")  # killed before one is killed after it
LANES = 3


class Lane(Renter):
    """One of several who launch at the same time, each on a cloud and in a place of his own.

    Nobody can log in there.
    """

    def __init__(self, place: Any, cloud: Simcloud) -> None:
        super().__init__(place, cloud)
        cloud.begin()
        cloud.post("machines", ssh_late=NEVER)
        self.asked = self.words()
        self.elsewhere = self.path / "elsewhere"
        self.elsewhere.mkdir()

    def calls(self) -> list[str]:
        """The calls since they were last forgotten."""
        return [name for _, name in self.cloud.post("calls")["calls"]]

    def undisturbed(self, folder: str) -> list[str]:
        """Launch in a folder until the machines are there, and end it. Returns the calls until then."""
        self.cloud.post("forget_calls")
        job = self.start(folder)
        self.wait(lambda: self.granted(job))
        calls = self.calls()
        self.ok("down", "--all", "-y", cwd=self.path / folder)
        return calls

    def start(self, folder: str) -> Any:
        """Launch in a folder, whatever becomes of it; its first job."""
        (self.path / folder).mkdir(exist_ok=True)
        self.cli(*self.asked, cwd=self.path / folder)
        return type(self.place.job())(self.path / folder / "runs/job-1")

    def killed_at(self, number: int, when: str, again: str) -> None:
        """Kill who makes a call, do something again, and see that there is one gang or nothing; then end it."""
        folder = f"{number}-{when}"
        before, killed = set(self.ever()), len(self.cloud.post("calls")["killed"])
        self.cloud.post("forget_calls")
        self.cloud.post("kill_caller", at=number, when=when)
        job = self.start(folder)
        self.wait(lambda: self.granted(job) or len(self.cloud.post("calls")["killed"]) > killed)
        self.wait(lambda: self.granted(job) or not self.place.pids("-m cluster.jobs.supervisor"))
        if not job.run.exists() and number % 6:  # the command itself, before there was a job: nothing to go on with
            assert self.ever() == sorted(before, key=self.ever().index) and self.calls()[number:] == []
            return
        where = self.elsewhere if again == "gc" else self.path / folder
        more = {
            "launch": self.asked,
            "down": ("down", "--all", "-y"),
            "gc": ("gc", "--yes", "--unknown"),
            "ls": ("ls",),
        }
        self.ok(*more[again], cwd=where)
        if again == "launch" or (again == "ls" and job.folders.spec.exists()):
            self.wait(lambda: self.granted(job))
            assert len(self.alive()) == 2 and len(self.place.programs("-m cluster.jobs.supervisor")) == 1
            self.ok("down", "--all", "-y", cwd=where)
        assert self.alive() == [] == self.groups()
        self.wait(lambda: not self.place.pids("-m cluster.jobs.supervisor"), 20)
        came = [one for one in self.cloud.instances() if one["id"] not in before]
        assert len(came) in (0, 2) and len({one["tags"]["imgnet:launch"] for one in came}) < 2, came


@pytest.fixture
def lanes(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lane]]:
    from conftest import Place

    made = [Lane(Place(tmp_path / f"place{number}", images), Simcloud()) for number in range(LANES)]
    yield made
    left = [line for one in made for line in one.place.close()]
    try:
        for one in made:
            one.cloud.check()
    finally:
        for one in made:
            one.cloud.close()
    assert not left


def test_killed_at_any_call_of_a_launch_whatever_is_typed_next_there_is_one_gang_or_nothing(lanes: list[Lane]) -> None:
    first, *others = lanes
    making = first.undisturbed("empty")
    calls = first.undisturbed("made")
    assert calls[-1] == "DescribeInstances" and calls.count("RunInstances") == 1 and len(calls) > 30, calls
    cases: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
    kills = [
        (number, when)
        for number, name in reversed([*enumerate(calls, 1)])  # `down` waits a minute for an answer that was lost
        for when in (("before",) if name.startswith(LOOKS) else ("before", "after"))
    ]
    for place, (number, when) in enumerate(kills):
        cases.put((number, when, AGAIN[place % len(AGAIN)]))
    failed: list[str] = []

    def work(lane: Lane, case: tuple[int, str, str] | None) -> None:
        while True:
            try:
                case = case or cases.get_nowait()
                lane.killed_at(*case)
            except queue.Empty:
                return
            except BaseException as error:  # a failure of pytest's is no Exception
                failed.append(f"killed {case}, {calls[case[0] - 1] if case else ''}: {error}")
                return
            case = None

    with ThreadPoolExecutor() as pool:  # the others have no stack yet: killed in the middle of making it
        pool.submit(work, first, None)
        for lane, name in zip(others, ("CreateVpc", "CreateFileSystem"), strict=True):
            pool.submit(work, lane, (making.index(name) + 1, "after", "launch"))
    assert not failed, "\n\n".join(failed)
    assert cases.empty()
