"""Starts the trainer's processes on this machine, one per GPU, and waits for them."""

import os
import secrets
import signal
import time
from pathlib import Path

from train.tools import process
from train.tools.agent_protocol import TOKEN_VARIABLE

PROJECT_ROOT = str(Path(__file__).resolve().parents[2])
POLL_SECONDS = 0.05


def gpu_count() -> int:
    """Return the number of GPUs that torch sees on this machine."""
    import torch  # takes seconds to import; a parent that was given --procs does not need it

    return torch.cuda.device_count()


def launch_ranks(argv: list[str], procs: int) -> int:
    """Start `procs` processes of a command as ranks of one run, and wait until all have ended.

    In these processes, this project's packages precede all of PYTHONPATH.

    When one fails, the others are killed. Returns the first non-zero exit code, 130 after Ctrl-C, else 0. SIGTERM is
    passed on to the processes, so that they write a checkpoint; killed together with their parent they could not.
    """
    search_path = os.pathsep.join(filter(None, [PROJECT_ROOT, os.environ.get("PYTHONPATH", "")]))
    environment = {"PYTHONPATH": search_path, TOKEN_VARIABLE: secrets.token_hex(16)}
    ranks = process.spawn_ranks(argv, procs, master_port=process.free_port(), environment=environment)

    def forward_signal(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    signal.signal(signal.SIGTERM, forward_signal)
    try:
        while True:
            exit_codes = [rank.poll() for rank in ranks]
            failures = [code for code in exit_codes if code]
            if failures:
                return abs(failures[0])
            if None not in exit_codes:
                return 0
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return 130
    finally:
        process.kill_process_groups(ranks)
