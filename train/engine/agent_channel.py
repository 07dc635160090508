"""The trainer's side of the protocol with the agent on its machine (train/tools/agent_protocol.py).

A failure's fault is "own", "peer": another process disappeared, or "final": every further attempt would fail too.
Without IMGNET_WORK (torchrun by hand) nothing is written. This module does not import torch.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from train.tools import agent_protocol
from train.tools.errors import TrainingError, is_peer_failure
from train.tools.filesystem import to_json_bytes, write_atomic
from train.tools.host import unix_time
from train.tools.records import encode
from train.tools.trainer_reports import Fault, TrainerFailure, TrainerProgress, TrainerState

THROTTLE_SECONDS = 0.5  # a throttled report is dropped when the last write is younger than this


class AgentChannel:
    """This process's reports to the agent, and the agent's request to stop."""

    def __init__(self) -> None:
        work = os.environ.get(agent_protocol.WORK_VARIABLE)
        self.folder = Path(work) if work else None
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.last_report: TrainerProgress | None = None
        self.last_write_time = 0.0
        self.finished_state_seconds: dict[str, float] = {}  # seconds spent in each earlier state
        self.state_start = time.perf_counter()
        self.sigterm_received = False
        self.ticks = 0

    def install_signal_handlers(self) -> None:
        """Make SIGTERM a request to save and exit, and SIGUSR1 print the stacks of all threads."""
        signal.signal(signal.SIGTERM, self._record_sigterm)
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def _record_sigterm(self, *_: object) -> None:
        self.sigterm_received = True

    def stop_requested(self) -> bool:
        """Whether this process has been asked to save and exit."""
        return self.sigterm_received or (
            self.folder is not None and (self.folder / agent_protocol.STOP_REQUEST_FILE).exists()
        )

    def report_state(self, state: TrainerState, throttled: bool = False, **numbers: Any) -> None:  # Any: for `replace`
        """Report a state and update numbers (fields of `TrainingNumbers`); earlier numbers stay.

        A `throttled` report is not written when the last one is fresh. Its numbers are part of the next report.
        """
        if self.last_report is None or state != self.last_report.state:
            self.finished_state_seconds = self.seconds_by_state()
            self.state_start = time.perf_counter()
        self.last_report = replace(self.last_report or TrainerProgress(state=state), state=state, **numbers)
        now = time.monotonic()
        if self.folder is None or self.local_rank:
            return
        if throttled and now - self.last_write_time < THROTTLE_SECONDS:
            return
        self.last_write_time = now
        write_atomic(self.folder / agent_protocol.PROGRESS_FILE, to_json_bytes(encode(self.last_report)), durable=False)

    def seconds_by_state(self) -> dict[str, float]:
        """Return the seconds spent in each state until now."""
        if self.last_report is None:
            return {}
        state = str(self.last_report.state)  # a plain text, because checkpoints store it
        seconds = self.finished_state_seconds.get(state, 0.0) + time.perf_counter() - self.state_start
        return {**self.finished_state_seconds, state: seconds}

    def tick(self) -> None:
        """Show progress where there is nothing else to report: the agent takes a silent trainer for a hung one."""
        self.ticks += 1
        if self.last_report:
            self.report_state(self.last_report.state, throttled=True, ticks=self.ticks)

    def report_failure(self, reason: str, fault: Fault = Fault.OWN) -> None:
        """Write why this process fails."""
        if self.folder is None:
            return
        failure = TrainerFailure(rank=self.rank, reason=reason, fault=fault, time=unix_time())
        write_atomic(
            self.folder / agent_protocol.failure_file(self.rank), to_json_bytes(encode(failure)), durable=False
        )

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback, report the failure, and exit at once: a regular exit with torch takes a second.

        To be installed as `sys.excepthook`.
        """
        # Not to sys.stderr: once init_process_group has run, torch calls this hook with a buffer in its place, and
        # prints that buffer only after the hook returns, which it never does.
        formatted = "".join(traceback.format_exception(kind, error, trace))
        print(formatted, end="", file=sys.__stderr__, flush=True)
        text = str(error).strip()
        # A loader process sends its traceback as text. Its last line that is not indented is the error.
        reason = next((line for line in reversed(text.splitlines()) if line[:1].strip()), kind.__name__)
        try:
            if isinstance(error, TrainingError):
                self.report_failure(reason, Fault.FINAL)
            else:
                fault = Fault.PEER if is_peer_failure(kind, text) else Fault.OWN
                self.report_failure(f"{kind.__name__}: {reason}", fault)
        finally:
            os._exit(1)
