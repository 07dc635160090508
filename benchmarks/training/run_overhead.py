"""Compares `imgnet-cluster run --local` with torchrun: steps per second of one script, and the time to its first line.

    .venv/bin/python benchmarks/training/run_overhead.py             # seven minutes; writes its section of RESULTS.md
    .venv/bin/python benchmarks/training/run_overhead.py --rounds 1 --steps 50 --print

The script trains a small network with DDP over Gloo in two processes of one thread each. Both programs start it in
turn, so whatever else the computer does slows both. The agent's start, which torchrun does not have, is the time from
the job's description (job.json) to the first attempt: tmux starts the agent, which imports its modules.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.launch.local import COMMAND, LaunchHost
from benchmarks.measure import describe_machine, goal_verdict, median_with_range, ratios, write_section

PROCESSES = 2
STEP_RATE_GOAL = 0.98
FIRST_LINE_GOAL = 1.2  # of torchrun's seconds, beside the agent's start
TIMEOUT_SECONDS = 300
SCRIPT = """
import json, os, sys, time

first_line = time.time()
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.randn(128, 512), torch.randint(10, (128,))
for step in range(steps + 10):
    if step == 10:  # the first steps allocate and connect
        start = time.perf_counter()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
rate = steps / (time.perf_counter() - start)
if dist.get_rank() == 0:
    with open(path, "w") as file:
        json.dump({"first_line": first_line, "steps_per_second": rate}, file)
dist.destroy_process_group()
os._exit(0)  # Gloo's threads may abort a Python that ends: pytorch issue 190489
"""


@dataclass(frozen=True)
class Run:
    """One run of the script. `first_line_seconds` counts from the start of the command to the script's first line."""

    steps_per_second: float
    first_line_seconds: float
    agent_seconds: float = 0.0


class Workplace(LaunchHost):
    """A project with the script, and a home and a tmux server of its own."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder)
        self.steps = steps
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        self.env["OMP_NUM_THREADS"] = "1"

    def torchrun(self) -> Run:
        """Run the script by torchrun. Raises `CalledProcessError`."""
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
        return self._measure([*program, "train.py"])

    def imgnet_cluster(self) -> Run:
        """Run the script by `imgnet-cluster run --local`, to the end of the job. Raises `CalledProcessError`."""
        command = [COMMAND, "run", "--local", "--procs", str(PROCESSES), "--", sys.executable, "train.py"]
        run = self._measure(command)
        newest = max((self.project / "runs").glob("job-*"), key=lambda path: int(path.name.removeprefix("job-")))
        described_at = (newest / "job.json").stat().st_mtime
        (first_attempt,) = newest.glob("machine/shared/attempts/000001.json")
        return Run(run.steps_per_second, run.first_line_seconds, first_attempt.stat().st_mtime - described_at)

    def _measure(self, command: list[str]) -> Run:
        result_path = self.folder / "result.json"
        result_path.unlink(missing_ok=True)
        started_at = time.time()
        subprocess.run(
            [*command, str(self.steps), str(result_path)],
            check=True,
            cwd=self.project,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
        result = json.loads(result_path.read_text())
        return Run(result["steps_per_second"], result["first_line"] - started_at)


def measure(rounds: int, steps: int) -> tuple[list[Run], list[Run]]:
    """Return the runs of imgnet-cluster and those of torchrun. Each round runs both; the first round is discarded."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Workplace(Path(folder), steps)) as workplace:
        pairs = [(workplace.imgnet_cluster(), workplace.torchrun()) for _ in range(rounds + 1)][1:]
    ours, theirs = zip(*pairs, strict=True)
    return list(ours), list(theirs)


def section_lines(ours: list[Run], theirs: list[Run], loads: tuple[float, float]) -> list[str]:
    """Return the section of RESULTS.md."""
    our_seconds, their_seconds = ([run.first_line_seconds for run in runs] for runs in (ours, theirs))
    agent_seconds = [run.agent_seconds for run in ours]
    our_rates, their_rates = ([run.steps_per_second for run in runs] for runs in (ours, theirs))
    rate_ratios = ratios(our_rates, their_rates)
    rate_ratio = statistics.median(rate_ratios)
    allowed = FIRST_LINE_GOAL * statistics.median(their_seconds) + statistics.median(agent_seconds)
    start_verdict = goal_verdict(statistics.median(our_seconds), allowed, at_most=True)
    return [
        "## A script under `run` compared with torchrun",
        "",
        f"{describe_machine()}; load {loads[0]:.1f} before, {loads[1]:.1f} after. A small network, DDP over Gloo, "
        f"{PROCESSES} processes on this computer; both in turn, n = {len(ours)}, median (min-max).",
        "",
        "| | `imgnet-cluster run --local` | torchrun | |",
        "|---|---|---|---|",
        f"| steps/s | {median_with_range(our_rates, 1)} | "
        f"{median_with_range(their_rates, 1)} | ratio {median_with_range(rate_ratios, 3)}, "
        f"goal {STEP_RATE_GOAL}: {goal_verdict(rate_ratio, STEP_RATE_GOAL)} |",
        f"| seconds from the command to the script's first line | {median_with_range(our_seconds, 2)} | "
        f"{median_with_range(their_seconds, 2)} | goal {FIRST_LINE_GOAL} x torchrun plus the agent's start, "
        f"{allowed:.2f}: {start_verdict} |",
        f"| of that, the agent's start | {median_with_range(agent_seconds, 2)} | | |",
    ]


def main() -> None:
    """Measure, print the section and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted runs of each program (default 7)")
    parser.add_argument("--steps", type=int, default=1500, help="counted steps of each run (default 1500)")
    parser.add_argument("--print", action="store_true", help="only print the section, do not write it to RESULTS.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    ours, theirs = measure(options.rounds, options.steps)
    lines = section_lines(ours, theirs, (load_before, os.getloadavg()[0]))
    print("\n".join(lines))
    if not options.print:
        write_section("training/run_overhead.py", lines)


if __name__ == "__main__":
    main()
