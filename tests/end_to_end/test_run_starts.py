"""The other ways to start a command than `imgnet-cluster run`: from Python, and from a file that holds a `Command`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.sandbox import Sandbox

SCRIPT = """\
import os, sys
names = ["RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "OWN", "TOKEN"]
print(" ".join(f"{name}={os.environ.get(name)}" for name in names), *sys.argv[1:], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] < os.environ.get("FAILURES", "0") or "9" in sys.argv:
    sys.exit("lr too large")
"""
FROM_PYTHON = """\
from cluster import run
from cluster.errors import BadInput

try:
    run(["python", "train.py"], wrong=1)
except BadInput as error:
    print(error)
job = run(
    ["python", "train.py", "--lr", "0.1"],
    **dict(machines=2, procs=2, name="mine", env={"OWN": "a b", "FAILURES": "1"}, secrets=["TOKEN"], retries=1),
)
print(job.name, job.wait(120))
"""
SWEEP = """\
from train.recipe import Command


def recipes():
    for lr in (1, 9, 2):
        yield Command(argv=["python", "train.py", "--lr", str(lr)], name=f"lr{lr}", procs=1)
"""


@pytest.fixture
def project(sandbox: Sandbox) -> Path:
    folder = sandbox.path / "mine"
    folder.mkdir()
    for name, text in (("train", SCRIPT), ("drive", FROM_PYTHON), ("sweep", SWEEP)):
        (folder / f"{name}.py").write_text(text)
    sandbox.env["IMGNET_RUNS"] = str(sandbox.path / "runs")
    return folder


def log(sandbox: Sandbox, job: int, rank: int = 0, attempt: int = 1) -> str:
    return sandbox.job(job).log_path(rank, attempt).read_text()


def test_run_from_python_beside_a_train_py_returns_a_job(sandbox: Sandbox, project: Path) -> None:
    environment = {**sandbox.env, "TOKEN": "hunter2"}
    argv = [sys.executable, "drive.py"]
    completed = subprocess.run(argv, cwd=project, env=environment, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed
    refused, ended = completed.stdout.splitlines()
    assert "wrong" in refused and ended == "job-1 done"
    spec = sandbox.job().spec
    assert (spec.machines, spec.procs, spec.title) == (2, 2, "job-1 mine")
    assert "RANK=3 WORLD_SIZE=4 TORCHELASTIC_RESTART_COUNT=1 OWN=a b TOKEN=hunter2 --lr 0.1" in log(sandbox, 1, 3, 2)
    assert "hunter2" not in sandbox.job().run_folder.spec_path.read_text()


def test_commands_of_a_loop_are_a_sweep(sandbox: Sandbox, project: Path) -> None:
    result = sandbox.cli("launch", "--local", "--parallel", "2", "sweep.py", cwd=project, timeout=240)
    assert result.code == 100, result
    rows = [line.split() for line in result.out.splitlines()]
    assert ["job", "command", "state", "lr", "top-1", "best", "at", "work"] in rows
    assert [row[:4] for row in rows if row and row[0] in ("job-1", "job-2", "job-3") and len(row) == 5] == [
        ["job-1", "lr1", "done", "1"],
        ["job-2", "lr9", "failed", "9"],
        ["job-3", "lr2", "done", "2"],
    ]
    assert "lr too large" in result.out
    listed = json.loads(sandbox.cli("ls", "-o", "json").out)
    assert [(row["work"], row["hparams"]["lr"]) for row in listed] == [("command", 1), ("command", 9), ("command", 2)]
    only = sandbox.cli("launch", "--local", "--only", "lr2", "sweep.py", cwd=project)
    assert only.code == 0 and "--lr 2" in log(sandbox, 4), only
