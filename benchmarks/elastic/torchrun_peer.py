"""The peer of recovery.py: the same trainer and images under torchrun's elastic launch, four agents on this computer.

`--max-restarts` is given in both ways of starting it, for without it the survivors end with their lost peer. Tuned: the
store in a process of its own, so that the head may die; short keep-alives and last call; and
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without it (torch 2.13) the next group meets at the store of the one before: its
members are refused by processes that are gone, or wait for them (pytorch issue 135712). The trainer's --local cannot be
given: torchrun takes it for a short form of its own --local-addr.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from train.tools import process

MACHINES = 4
WAIT_SECONDS = 240.0  # seconds for whatever is waited for
# torchrun's defaults: 3 x 5 s until a lost agent is given up, 30 s for a last call to others.
TUNED_RENDEZVOUS = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
STORE_SCRIPT = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False, multi_tenant=True)
while True:
    time.sleep(60)
"""


class TorchrunElastic:
    """One run; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path, trainer_arguments: list[str], environment: dict[str, str], is_tuned: bool) -> None:
        self.folder, self.is_tuned = folder, is_tuned
        self.output_folder, self.port = folder / "out", process.free_port()
        self.trainer_arguments = [
            *trainer_arguments,
            "--out",
            str(self.output_folder),
            "--resume",
            "auto",
            "--attempt",
            "1",
        ]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_tuned else {}
        self.environment = {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **own}
        self.agents: list[subprocess.Popen[bytes]] = []
        self.store_processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "TorchrunElastic":
        self.folder.mkdir(parents=True)
        conf = ["--rdzv-conf", TUNED_RENDEZVOUS, "--monitor-interval", "0.1"] if self.is_tuned else []
        if self.is_tuned:
            self.store_processes.append(self.start([sys.executable, "-c", STORE_SCRIPT, str(self.port)], "store"))
        for number in range(MACHINES):
            argv = [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes=2:{MACHINES}", "--nproc-per-node=1",
                "--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}",
                "--rdzv-id=recovery", "--local-addr=127.0.0.1", *conf, "-m", "train", *self.trainer_arguments,
            ]  # fmt: skip
            self.agents.append(self.start(argv, f"agent-{number}"))
            if number == 0 and not self.is_tuned:
                self.wait_for_store()
        return self

    def start(self, argv: list[str], name: str) -> "subprocess.Popen[bytes]":
        """Start a process that dies with us."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=self.folder,
                start_new_session=True, preexec_fn=process.die_with_parent,
            )  # fmt: skip

    def wait_for_store(self) -> None:
        """Let the first agent be the store's host, as on a first machine."""
        import socket

        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.1)
        raise TimeoutError("the first agent opens no store")

    def training_lines(self) -> list[tuple[int, float]]:
        """Return (step, time) of what the trainers noted."""
        return read_train_lines(self.output_folder / "metrics" / "000001.jsonl")

    def wait_until_training(self) -> None:
        """Wait until steps are made and a checkpoint is there. Raises `TimeoutError`."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (self.training_lines() and any((self.output_folder / "checkpoints").glob("*/step-*.pt"))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"torchrun does not train: {self.folder}")
            time.sleep(0.1)

    def find_trainer(self, agent_index: int) -> tuple[int, int]:
        """Return an agent's trainer: process and rank."""
        for pid in process.descendant_pids(self.agents[agent_index].pid):
            with contextlib.suppress(OSError):
                for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if one.startswith(b"RANK="):
                        return pid, int(one[5:])
        raise TimeoutError(f"agent {agent_index} has no trainer")

    def kill_agent(self, kill_head: bool) -> float | str:
        """Kill an agent with its trainer. Returns the seconds to the next step, or why there is none."""
        ranks = [self.find_trainer(number)[1] for number in range(MACHINES)]
        # With the defaults the head is the first agent, which has the store.
        first = ranks.index(0) if self.is_tuned else 0
        chosen = (
            first if kill_head else next(one for one in reversed(range(MACHINES)) if one not in (0, ranks.index(0)))
        )
        trainer, _ = self.find_trainer(chosen)
        at = time.time()
        for pid in (self.agents[chosen].pid, trainer):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            # A step after the kill needs a new group, which takes longer than half a second.
            later = [seen for _, seen in self.training_lines() if seen > at + 0.5]
            if later:
                return later[0] - at
            if all(one.poll() is not None for one in self.agents):
                return "the job ends"
            time.sleep(0.05)
        return f"no step in {WAIT_SECONDS:.0f} s"

    def __exit__(self, *_: object) -> None:
        doomed = [pid for one in (*self.agents, *self.store_processes) for pid in process.descendant_pids(one.pid)]
        process.kill_process_groups([*self.agents, *self.store_processes], 20)
        for pid in doomed:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def read_train_lines(path: Path) -> list[tuple[int, float]]:
    """Return (step, time) of each "train" line of a metrics file; the first comes after the attempt's first step."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError):  # half a line, so far
            row = json.loads(line)
            if row["kind"] == "train":
                found.append((int(row["step"]), float(row["time"])))
    return found
