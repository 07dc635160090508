"""Somebody who rents machines with the installed command: a place of his own, and a simulated cloud that is his AWS."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.fixture import Simcloud

TYPE = "c7i.2xlarge"
OPTIONS = ("-y", "--type", TYPE, "--procs", "1", "--workers", "0", "--no-probe")
NEVER = 1e6  # seconds until sshd of a machine answers: so it never gets ready
GONE = ("shutting-down", "terminated")


class Renter:
    """A place and a cloud: nothing but the environment tells the command that the cloud is AWS."""

    def __init__(self, place: Any, cloud: Simcloud) -> None:
        self.place, self.cloud, self.path = place, cloud, Path(place.path)
        place.env |= cloud.env

    # --- commands --------------------------------------------------------------------------------------------------

    def cli(self, *words: str, **more: Any) -> Any:
        """Run the installed command to its end."""
        return self.place.cli(*words, **more)

    def ok(self, *words: str, **more: Any) -> str:
        """Run it, see that it did not fail, and return what it printed."""
        ran = self.cli(*words, **more)
        assert ran.code == 0, f"{words}: {ran}\n{self.tell()}"
        return str(ran.out)

    def json(self, *words: str, **more: Any) -> Any:
        """What it prints as JSON."""
        return json.loads(self.ok(*words, "-o", "json", **more))

    def words(self, *more: str, machines: int = 2, epochs: int = 3) -> tuple[str, ...]:
        """The words of a launch that is not followed."""
        return "launch", "-d", *OPTIONS, "--machines", str(machines), *more, self.place.recipe(epochs)

    def launch(self, *more: str, machines: int = 2, epochs: int = 3) -> Any:
        """Launch a job and return it; its supervisor has only just begun."""
        said = self.ok(*self.words(*more, machines=machines, epochs=epochs))
        return self.place.job(int(re.findall(r"job-(\d+) launched", said)[0]))

    # --- what there is -----------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Return what the condition gave as soon as it is true; fail at the deadline, and say how things stand."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not true after {seconds:g} s: {condition}\n{self.tell()}")
            time.sleep(0.1)
        return found

    def tell(self) -> str:
        """What jobs, supervisors and the cloud say, for a failure."""
        lines = [str([(one["id"], one["state"], one["reason"]) for one in self.cloud.instances()])]
        for run in sorted((self.path / "runs").glob("job-*")):
            for name in ("cloud.log", "supervisor.log", "result.json", "cloud.json"):
                with contextlib.suppress(OSError):
                    lines.append(f"--- {run.name}/{name}\n{(run / name).read_text()[-1500:]}")
        return "\n".join(lines)

    def lines(self, job: Any, *what: str) -> list[dict[str, Any]]:
        """What the job's journal says."""
        from infra.aws.journal import Journal

        return Journal(job.run / "cloud.jsonl").lines(*what)

    def granted(self, job: Any) -> list[list[str]]:
        """The machines that came, by asking."""
        return [[one["id"] for one in line["machines"]] for line in self.lines(job, "granted")]

    def alive(self) -> list[str]:
        """Our instances that cost something."""
        return [one["id"] for one in self.cloud.instances() if one["state"] not in GONE]

    def ever(self) -> list[str]:
        """All instances of ours that ever were."""
        return [one["id"] for one in self.cloud.instances()]

    def of(self, name: str) -> str:
        """The id of the living machine of this name."""
        found = [one for one in self.cloud.instances() if one["state"] not in GONE]
        (id,) = [one["id"] for one in found if _name(one) == name]
        return str(id)

    def groups(self) -> list[str]:
        """Placement groups of our jobs."""
        left = self.cloud.post("leftovers")
        return [one["id"] for one in left if one["kind"] == "placement-group" and "imgnet:job" in one.get("tags", {})]

    def supervisor(self) -> int:
        """The process of the one supervisor."""
        return int(self.wait(lambda: self.place.programs("-m cluster.jobs.supervisor"), 20)[0])

    def kill_supervisor(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(pid := self.supervisor(), signal.SIGKILL)
        self.wait(lambda: pid not in self.place.pids("-m cluster.jobs.supervisor"), 10)

    def step(self, job: Any) -> int:
        """The step that is trained, 0 while none is."""
        known = job.status()
        return int(known["step"] or 0) if known["doing"] in ("training", "validating") else 0

    def nothing_left(self) -> None:
        """Nothing bills, nothing clutters, and gc says so too."""
        assert self.alive() == [] == self.groups(), self.tell()
        said = self.cli("gc")
        assert said.code == 0 and said.out.strip() == "nothing to remove in us-east-1", said


def _name(one: dict[str, Any]) -> str:
    first = str(one["tags"]["imgnet:machine"]).partition("-")[0]
    return str(int(first) + int(one["index"]))


@pytest.fixture
def renter(simcloud: Simcloud, place: Any) -> Iterator[Renter]:
    """Somebody with an empty cloud, which must be as free of costs at the end."""
    yield Renter(place, simcloud)
