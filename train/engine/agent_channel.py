"""The trainer's side of the protocol with the agent on its machine (train/tools/agent_protocol.py).

Whose fault a failure was is a `Fault` (train/tools/agent_protocol.py).
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
from train.tools.agent_protocol import (
    Fault,
    KeptStateReport,
    StandbyRequest,
    TrainerFailure,
    TrainerProgress,
    TrainerState,
)
from train.tools.errors import TrainingError, find_gpu_failure, is_peer_failure, last_line
from train.tools.files import open_regular, write_atomic
from train.tools.host import unix_time
from train.tools.records import encode, read_record
from train.tools.text_files import to_json_bytes

MAX_CAUSE_CHARACTERS = 160
THROTTLE_SECONDS = 0.5  # a throttled report is dropped when the last write is younger than this


def adopt_request(request: StandbyRequest) -> None:
    """Take the environment of a request, and write from now on to its log."""
    os.environ.update(request.environment)
    sys.stdout.flush()
    with open_regular(Path(request.log), "ab") as log:
        for stdout_or_stderr in (1, 2):
            os.dup2(log.fileno(), stdout_or_stderr)


class StopRequested(Exception):
    """The agent or a SIGTERM asked the run to end, and its checkpoint has been written."""


class AgentChannel:
    """This process's reports to the agent, and the agent's requests to save and to stop."""

    def __init__(self) -> None:
        self.ticks = 0
        self.sigterm_received = False
        self.steps_time: float | None = None  # when steps were last reported, perhaps in an earlier attempt
        self.furthest_step = 0  # from which an attempt of this process was to go on in place
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Take part in the attempt that the environment describes."""
        work = os.environ.get(agent_protocol.WORK_VARIABLE)
        self.folder = Path(work) if work else None
        self.may_keep_state = self.folder is not None and agent_protocol.IN_PLACE_VARIABLE in os.environ
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.last_report: TrainerProgress | None = None
        self.last_write_time = 0.0
        self.finished_state_seconds: dict[str, float] = {}  # seconds spent in each earlier state
        self.state_start = time.perf_counter()
        self.not_in_place = agent_protocol.NOT_TRAINING_YET  # part of all later reports

    def install_signal_handlers(self) -> None:
        """Make SIGTERM a request to save and exit, and SIGUSR1 print the stacks of all threads."""
        signal.signal(signal.SIGTERM, self._record_sigterm)
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def _record_sigterm(self, *_: object) -> None:
        self.sigterm_received = True

    def stop_requested(self) -> bool:
        """Whether this process has been asked to save and exit."""
        return self.sigterm_received or self._has_request(agent_protocol.STOP_REQUEST_FILE)

    def save_requested(self) -> bool:
        """Whether the agent has asked in this attempt for a checkpoint soon, because its machine may be taken away."""
        return self._has_request(agent_protocol.SAVE_REQUEST_FILE)

    def abort_requested(self) -> bool:
        """Whether the agent wants the collectives of this attempt to end."""
        return self._has_request(agent_protocol.ABORT_REQUEST_FILE)

    def _has_request(self, name: str) -> bool:
        return self.folder is not None and (self.folder / name).exists()

    def _write(self, name: str, record: object) -> None:
        if self.folder is not None:
            write_atomic(self.folder / name, to_json_bytes(encode(record)), durable=False)

    def report_kept_state(self, step: int, has_saved: bool, reason: str) -> None:
        """Tell the agent that this process keeps the state of a step, and waits for the next attempt."""
        report = KeptStateReport(step=step, has_saved=has_saved, reason=reason)
        self._write(agent_protocol.kept_state_file(self.rank), report)

    def refuse_to_keep_state(self, reason: str) -> None:
        """Tell the agent, and the log, why this process keeps no state, though it has one."""
        print(f"keeps no state: {reason}", flush=True)
        self.report_obstacle(reason)

    def report_obstacle(self, reason: str) -> None:
        """Tell the agent why this process could keep no state if another one were lost now; "" when it could."""
        self.not_in_place = reason
        if self.last_report:
            self.report_state(self.last_report.state)

    def read_next_request(self) -> StandbyRequest | None:
        """Return the agent's request to go on in the next attempt, None as long as there is none."""
        if self.folder is None:
            return None
        return read_record(self.folder / agent_protocol.next_request_file(self.local_rank), StandbyRequest)

    def report_state(self, state: TrainerState, throttled: bool = False, **numbers: Any) -> None:  # Any: for `replace`
        """Report a state and update numbers (fields of `TrainingNumbers`); earlier numbers stay.

        A `throttled` report is not written when the last one is fresh. Its numbers are part of the next report.
        """
        if self.last_report is None or state != self.last_report.state:
            self.finished_state_seconds = self.seconds_by_state()
            self.state_start = time.perf_counter()
        earlier = self.last_report or TrainerProgress(state=state)
        self.last_report = replace(earlier, state=state, not_in_place=self.not_in_place, **numbers)
        now = time.monotonic()
        if self.local_rank or (throttled and now - self.last_write_time < THROTTLE_SECONDS):
            return
        self.last_write_time = now
        self._write(agent_protocol.PROGRESS_FILE, self.last_report)

    def seconds_by_state(self) -> dict[str, float]:
        """Return the seconds spent in each state until now."""
        if self.last_report is None:
            return {}
        state = str(self.last_report.state)  # a plain text, because checkpoints store it
        seconds = self.finished_state_seconds.get(state, 0.0) + time.perf_counter() - self.state_start
        return {**self.finished_state_seconds, state: seconds}

    def tick(self) -> None:
        """Show progress where there is nothing else to report: the agent takes a silent trainer for a hung one.

        Raises `RuntimeError` when the agent wants the attempt to end: no collective may say so for long.
        """
        self.ticks += 1
        if self.last_report:
            self.report_state(self.last_report.state, throttled=True, ticks=self.ticks)
        if self.abort_requested():
            raise RuntimeError("the agent has ended the attempt")

    def report_failure(self, reason: str, fault: Fault = Fault.OWN) -> None:
        """Write why this process fails."""
        failure = TrainerFailure(rank=self.rank, reason=reason, fault=fault, time=unix_time())
        self._write(agent_protocol.FAILURE_FILE_PATTERN.replace("*", str(self.rank)), failure)

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback, report the failure, and exit at once: a regular exit with torch takes a second.

        When another process is gone, which the agents handle, the traceback goes to a file, and one line is printed.
        To be installed as `sys.excepthook`.
        """
        formatted = "".join(traceback.format_exception(kind, error, trace))
        text = str(error).strip()
        reason = last_line(text) or kind.__name__
        fault, description = Fault.OWN, f"{kind.__name__}: {reason}"
        if isinstance(error, TrainingError):
            fault, description = Fault.INPUT, reason
        elif gpu_failure := find_gpu_failure(text, self.local_rank):
            fault, description = gpu_failure
        elif is_peer_failure(kind, text):
            fault = Fault.PEER
            formatted = self.move_stack_to_file(formatted, reason)
        # Not to sys.stderr: once init_process_group has run, torch calls this hook with a buffer in its place, and
        # prints that buffer only after the hook returns, which it never does.
        print(formatted, end="", file=sys.__stderr__, flush=True)
        try:
            self.report_failure(description, fault)
        finally:
            os._exit(1)

    def move_stack_to_file(self, formatted: str, reason: str) -> str:
        """Write a traceback to a file beside the log, and return the line that the log gets instead.

        Returns the traceback itself when there is no agent, or when the file cannot be written.
        """
        if self.folder is None:
            return formatted
        path = self.folder.parent / agent_protocol.LOGS_FOLDER / self.folder.name / f"stack-{self.rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(formatted.encode(errors="backslashreplace"))
        except OSError:
            return formatted
        cause = reason[:MAX_CAUSE_CHARACTERS]
        return f"another process is gone ({cause}); the stack is in {path.name}; the next attempt begins\n"
