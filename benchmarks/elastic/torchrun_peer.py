"""The peer of recovery.py: the same trainer and images under torchrun's elastic launch, four agents on this computer.

torchrun is measured with its defaults and tuned. Both get `--max-restarts`: without it the survivors end together with
the lost agent. Tuned means: the store runs in a process of its own, so that the head may die; keep-alives and last call
are short; and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without that variable (torch 2.13) the next group meets at the
store of the previous group, and its members are refused by processes that have ended, or wait for them (PyTorch issue
135712). The trainer's option --local cannot be used: torchrun takes it for an abbreviation of its own --local-addr.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.waiting import wait_for

from train.tools import process

MACHINES = 4
WAIT_SECONDS = 240.0  # limit of every wait
# torchrun's defaults: 3 x 5 s until an agent counts as lost, 30 s of last call for further agents.
TUNED_RENDEZVOUS = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
STORE_SCRIPT = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False, multi_tenant=True)
while True:
    time.sleep(60)
"""


class TorchrunElastic:
    """A training run under torchrun elastic; a context manager that ends all of its processes."""

    def __init__(self, folder: Path, trainer_arguments: list[str], environment: dict[str, str], is_tuned: bool) -> None:
        self.folder, self.is_tuned = folder, is_tuned
        self.output_folder = folder / "out"
        self.port = process.free_port()
        resume_options = ["--out", str(self.output_folder), "--resume", "auto", "--attempt", "1"]
        self.trainer_arguments = [*trainer_arguments, *resume_options]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_tuned else {}
        self.environment = {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **own}
        self.agents: list[subprocess.Popen[bytes]] = []
        self.store_processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "TorchrunElastic":
        self.folder.mkdir(parents=True)
        tuning = ["--rdzv-conf", TUNED_RENDEZVOUS, "--monitor-interval", "0.1"] if self.is_tuned else []
        if self.is_tuned:
            self.store_processes.append(self.start([sys.executable, "-c", STORE_SCRIPT, str(self.port)], "store"))
        for number in range(MACHINES):
            argv = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes=2:{MACHINES}", "--nproc-per-node=1", "--max-restarts=1000"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=recovery"),
                *("--local-addr=127.0.0.1", *tuning),
                *("-m", "train", *self.trainer_arguments),
            ]
            self.agents.append(self.start(argv, f"agent-{number}"))
            if number == 0 and not self.is_tuned:
                # The first agent must be the store's host.
                wait_for(self.has_store, WAIT_SECONDS, lambda: self.folder)
        return self

    def start(self, argv: list[str], name: str) -> "subprocess.Popen[bytes]":
        """Start a process that dies with this one; its output goes to <name>.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=process.die_with_parent,
            )

    def has_store(self) -> bool:
        """Return whether a process accepts connections at the store's port."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def training_lines(self) -> list[tuple[int, float]]:
        """Return (step, time) of each "train" line of the run's metrics."""
        return read_train_lines(self.output_folder / "metrics" / "000001.jsonl")

    def wait_until_training(self) -> None:
        """Wait until the run has made steps and saved a checkpoint. Raises `TimeoutError`."""
        checkpoints = self.output_folder / "checkpoints"
        wait_for(
            lambda: self.training_lines() and any(checkpoints.glob("*/step-*.pt")), WAIT_SECONDS, lambda: self.folder
        )

    def find_trainer(self, agent_index: int) -> tuple[int, int]:
        """Return process id and rank of an agent's trainer. Raises `TimeoutError` if it has none."""
        for pid in process.descendant_pids(self.agents[agent_index].pid):
            with contextlib.suppress(OSError):
                for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        return pid, int(variable[5:])
        raise TimeoutError(f"agent {agent_index} has no trainer")

    def kill_agent(self, kill_head: bool) -> float | str:
        """Kill an agent with its trainer. Return the seconds to the next step, or a text why there is none."""
        ranks = [self.find_trainer(index)[1] for index in range(MACHINES)]
        # With torchrun's defaults the head is the first agent, which hosts the store. Tuned, it is rank 0.
        head = ranks.index(0) if self.is_tuned else 0
        if kill_head:
            victim = head
        else:
            victim = next(index for index in reversed(range(MACHINES)) if index not in (0, ranks.index(0)))
        trainer_pid, _ = self.find_trainer(victim)
        kill_time = time.time()
        for pid in (self.agents[victim].pid, trainer_pid):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            # A step after the kill needs a new group, which takes longer than half a second.
            step_times = [step_time for _, step_time in self.training_lines() if step_time > kill_time + 0.5]
            if step_times:
                return step_times[0] - kill_time
            if all(agent.poll() is not None for agent in self.agents):
                return "the job ends"
            time.sleep(0.05)
        return f"no step in {WAIT_SECONDS:.0f} s"

    def __exit__(self, *_: object) -> None:
        children = [*self.agents, *self.store_processes]
        descendant_pids = [pid for child in children for pid in process.descendant_pids(child.pid)]
        process.kill_process_groups(children, 20)
        for pid in descendant_pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def read_train_lines(path: Path) -> list[tuple[int, float]]:
    """Return (step, time) of each "train" line of a metrics file; an attempt writes the first after its first step."""
    steps_and_times = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError):  # the last line may be incomplete
            row = json.loads(line)
            if row["kind"] == "train":
                steps_and_times.append((int(row["step"]), float(row["time"])))
    return steps_and_times
