"""Machines that fetch a packed data set to their own disks before they train: from a folder, and from S3."""

import itertools
import json
import os
from pathlib import Path

import pytest
from support.aws_user import Renter
from support.packed_sets import content
from support.sandbox import Sandbox

from cluster.jobs.job import Job
from train.tools.text_files import read_json_lines

LOCAL_OPTIONS = ("--local", "-d", "--workers", "0", "--no-standby")


def pack_images(sandbox: Sandbox) -> Path:
    """Pack the sandbox's images into several shards, with copies of 32 pixels. Returns the folder of the set."""
    for arguments in (("pack", sandbox.data, "set"), ("resize", sandbox.data, "set-sz", "--sizes", "32")):
        result = sandbox.cli("data", *arguments, "--shard-mb", "1")
        assert result.code == 0, result
    return sandbox.path / "set"


def write_recipe(sandbox: Sandbox, epochs: int = 1) -> Path:
    recipe = Path(sandbox.write_recipe(epochs))
    recipe.write_text(recipe.read_text().replace("size=32,", "size=32, copy=32,"))
    return recipe


def test_local_job_fetches_what_its_phases_read(sandbox: Sandbox) -> None:
    root = pack_images(sandbox)
    recipe = write_recipe(sandbox, 30)
    launched = sandbox.cli("launch", *LOCAL_OPTIONS, "--machines", "2", "--data", "set", "--fetch", "disk", recipe)
    assert launched.code == 0, launched
    disk = sandbox.path / "disk"
    assert f" kB, index only; each machine fetches it from {root} to {disk}/set before" in launched.out, launched
    job = sandbox.job()
    sandbox.wait_for(lambda: job.has_ended)
    assert job.result and job.state == "done" and job.result.epochs[0].val_images == 20, job.result
    assert content(disk / "set-sz/32") == content(root.with_name("set-sz") / "32")
    assert not list((disk / "set").rglob("*.bin")) and (disk / "set/train/index.npy").exists()
    logs = [(job.path / f"logs/setup-{machine}.log").read_text() for machine in (0, 1)]
    assert sum("100 %" in log for log in logs) == 1, "one machine fetches; the other shares its disk and need not"
    assert all(job.result.setup[machine]["fetching"] > 0 for machine in ("0", "1"))
    assert "fetch" in sandbox.cli("status", "job-1").out


@pytest.mark.parametrize("machines", ["1", "2"])
def test_failed_fetch_is_one_line_in_status_and_resume_continues_it(sandbox: Sandbox, machines: str) -> None:
    shard = pack_images(sandbox).with_name("set-sz") / "32/train/shard-00000.bin"
    intact_bytes = shard.read_bytes()
    shard.write_bytes(intact_bytes[:100] + bytes([intact_bytes[100] ^ 1]) + intact_bytes[101:])
    options = ("--data", "set", "--fetch", "disk", "--machines", machines)
    assert sandbox.cli("launch", *LOCAL_OPTIONS, *options, write_recipe(sandbox)).code == 0
    job = sandbox.job()
    sandbox.wait_for(lambda: job.has_ended)
    status = sandbox.cli("status", "job-1", "--exit-code")
    (reason_line,) = [line for line in status.out.splitlines() if line.startswith("reason")]
    assert status.code == 100 and f"{shard}: its checksum is not that of the manifest" in reason_line
    shard.write_bytes(intact_bytes)
    assert sandbox.cli("resume", "job-1").code == 0 and job.state == "done"
    logs = "".join(path.read_text() for path in (job.path / "logs").glob("setup-*.log"))
    (fetch_line,) = [line for line in logs.splitlines() if " fetched in " in line]
    assert ", 0 bytes already present" not in fetch_line, "what had been fetched was fetched again"


def test_stop_interrupts_a_fetch(sandbox: Sandbox) -> None:
    index = pack_images(sandbox) / "train/index.npy"
    index.unlink()
    os.mkfifo(index)  # opening it blocks for ever
    launched = sandbox.cli("launch", *LOCAL_OPTIONS, "--data", "set", "--fetch", "disk", write_recipe(sandbox))
    assert launched.code == 0
    job = sandbox.job()
    sandbox.wait_for(lambda: job.status().doing.startswith("fetching"))
    assert job.state == "setup"
    assert sandbox.cli("stop", "job-1").code == 0 and job.state == "stopped"
    assert not sandbox.pids("data fetch-for-job")


def completed_fetches(job: Job) -> int:
    states = [row["state"] for row in read_json_lines(job.path / "logs/agent-1.jsonl", "state")]
    return sum(before == "fetching" and after == "waiting" for before, after in itertools.pairwise(states))


def test_rented_machines_and_a_later_replacement_fetch_from_s3(renter: Renter) -> None:
    sandbox = renter.sandbox
    pack_images(sandbox)
    renter.run("up", "--stack", "--bucket", "imgnet-sets")
    url = "s3://imgnet-sets/data/set"
    assert "20 files uploaded" in renter.run("data", "put", "set", url, "--sizes", "32,full")
    assert "0 files uploaded, 20 already present" in renter.run("data", "put", "set", url, "--sizes", "32,full")
    options = renter.launch_arguments("--data", url, "--save-seconds", "1")[:-1]
    output = renter.run(*options, write_recipe(sandbox, 4000))
    assert f"index only; each machine fetches it from {url} to ~/.imgnet/data/set before" in output
    assert "IAM role" not in output, "the role may read data/ of the stack's bucket"
    job = sandbox.job()
    renter.wait_for(lambda: renter.training_step(job) > 8, 120)

    def assert_fetched(instance_id: str) -> None:
        disk = renter.cloud.machine_home(instance_id) / ".imgnet/data"
        assert content(disk / "set-sz/32") == content(sandbox.path / "set-sz/32")
        assert not list((disk / "set").rglob("*.bin"))

    first_id = renter.instance_id("1")
    assert_fetched(first_id)
    renter.run("rehearse-loss", job.name, "--machine", "1")
    renter.wait_for(lambda: completed_fetches(job) == 2, 180)
    second_id = renter.instance_id("1")
    assert second_id != first_id
    assert_fetched(second_id)
    renter.run("down", "-y", job.name)
    assert json.loads((job.path / "job.json").read_text())["data_source"] == url
