"""Machines that bring a packed set to their own disks before they train: from a folder, and from S3."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.aws_user import Renter, renter
from support.simcloud.fixture import simcloud

from train.tools.filesystem import read_json_lines

__all__ = ["renter", "simcloud"]  # fixtures

RECIPE = """\
from train.recipe import Data, Model, Phase, Recipe

recipe = Recipe(
    name="fetched",
    data=Data(name="drawn", root="nowhere", train=60, val=20),
    model=Model(name="resnet10_tiny"),
    gpus=1,
    phases=[Phase(epochs=(0, {epochs}), size=32, batch=8, lr=0.05, copy=32)],
)
"""
LOCAL = ("--local", "-d", "--workers", "0", "--no-probe")


def packed(place: Any) -> Path:
    """A packed set with copies of 32 pixels, in several shards."""
    for words in (("pack", place.data, "set"), ("resize", place.data, "set-sz", "--sizes", "32")):
        ran = place.cli("data", *map(str, words), "--shard-mb", "1")
        assert ran.code == 0, ran
    return Path(place.path) / "set"


def recipe(place: Any, epochs: int = 1) -> str:
    path = Path(place.path) / "fetched.py"
    path.write_text(RECIPE.format(epochs=epochs))
    return str(path)


def content(root: Path) -> dict[str, bytes]:
    return {str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*.*") if not one.name.startswith(".")}


def test_a_local_job_fetches_what_its_phases_read_and_trains_on_that(place: Any) -> None:
    root = packed(place)
    said = place.cli("launch", *LOCAL, "--machines", "2", "--data", "set", "--fetch", "disk", recipe(place, 30))
    assert said.code == 0, said
    assert f" kB, index only; each machine fetches it from {root} to {place.path}/disk/set before" in said.out, said
    job = place.job()
    place.wait_for(lambda: job.ended)
    assert job.state == "done" and job.result["epochs"][0]["val_images"] == 20, job.result
    disk = Path(place.path) / "disk"
    assert content(disk / "set-sz/32") == content(root.with_name("set-sz") / "32")
    assert not list((disk / "set").rglob("*.bin")) and (disk / "set/train/index.npy").exists()
    logs = [(job.run / f"logs/setup-{machine}.log").read_text() for machine in (0, 1)]
    assert sum("100 %" in log for log in logs) == 1, "one fetches, the other waits or finds it there"
    assert all(job.result["setup"][machine]["fetch"] > 0 for machine in ("0", "1"))
    assert "fetch" in place.cli("status", "job-1").out


@pytest.mark.parametrize("machines", ["1", "2"])
def test_a_fetch_that_fails_is_one_line_in_status_and_a_resume_goes_on_from_there(place: Any, machines: str) -> None:
    shard = packed(place).with_name("set-sz") / "32/train/shard-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    words = ("--data", "set", "--fetch", "disk", "--machines", machines)
    assert place.cli("launch", *LOCAL, *words, recipe(place)).code == 0
    job = place.job()
    place.wait_for(lambda: job.ended)
    shown = place.cli("status", "job-1", "--exit-code")
    (line,) = [line for line in shown.out.splitlines() if line.startswith("reason")]
    assert shown.code == 100 and f"{shard}: its checksum is not that of the manifest" in line
    shard.write_bytes(whole)
    assert place.cli("resume", "job-1").code == 0 and job.state == "done"
    logs = "".join(one.read_text() for one in (job.run / "logs").glob("setup-*.log"))
    (line,) = [line for line in logs.splitlines() if " fetched in " in line]
    assert ", 0 bytes were there" not in line, "what had come was not fetched again"


def test_a_stop_is_heard_while_it_fetches(place: Any) -> None:
    root = packed(place)
    (root / "train/index.npy").unlink()
    os.mkfifo(root / "train/index.npy")  # whoever opens it waits for ever
    assert place.cli("launch", *LOCAL, "--data", "set", "--fetch", "disk", recipe(place)).code == 0
    job = place.job()
    place.wait_for(lambda: job.status()["doing"].startswith("fetching"))
    assert job.state == "setup"
    assert place.cli("stop", "job-1").code == 0 and job.state == "stopped"
    assert not place.pids("data fetch")


def fetched(job: Any) -> int:
    """How many agents of machine 1 have been through with fetching."""
    states = [row["state"] for row in read_json_lines(job.run / "logs/agent-1.jsonl", "state")]
    return sum(one == "fetching" and after == "warming" for one, after in itertools.pairwise(states))


def test_rented_machines_fetch_from_s3_and_so_does_one_that_comes_later(renter: Renter) -> None:
    place = renter.place
    packed(place)
    renter.ok("up", "--stack", "--bucket", "imgnet-sets")
    there = "s3://imgnet-sets/data/set"
    assert "20 files put there" in renter.ok("data", "put", "set", there, "--sizes", "32,full")
    assert "0 files put there, 20 were there" in renter.ok("data", "put", "set", there, "--sizes", "32,full")
    words = [*renter.words("--data", there, "--save-seconds", "1")[:-1], recipe(place, 4000)]
    said = renter.ok(*words)
    assert f"index only; each machine fetches it from {there} to ~/.imgnet/data/set before" in said
    assert "IAM role" not in said, "it reads data/ of the stack's bucket"
    job = place.job()
    renter.wait(lambda: renter.step(job) > 8, 120)
    disk = renter.cloud.machine(renter.of("1")) / ".imgnet/data"
    assert content(disk / "set-sz/32") == content(Path(place.path) / "set-sz/32")
    assert not list((disk / "set").rglob("*.bin"))
    first = renter.of("1")
    renter.ok("lose", job.name, "--machine", "1")
    renter.wait(lambda: fetched(job) == 2, 180)
    second = renter.of("1")
    assert second != first
    disk = renter.cloud.machine(second) / ".imgnet/data"
    assert content(disk / "set-sz/32") == content(Path(place.path) / "set-sz/32")
    renter.ok("down", job.name)
    assert json.loads((job.run / "job.json").read_text())["source"] == there
