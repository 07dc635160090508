"""Starts and ends the tracker process of an attempt. Training never waits for it, but for some seconds at its end."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from train.tools.agent_protocol import TOKEN_VARIABLE, metrics_file
from train.tools.files import create_once, read_file
from train.tools.process import kill_process_groups, project_search_path
from train.tools.records import encode
from train.tools.text_files import to_json_bytes

RUN_ID_FILE = "tracker_id"  # in the folder that all attempts share
JOB_VARIABLE = "IMGNET_JOB"  # the unique name of the job whose agent started the trainer
FINISH_SECONDS = 15.0  # for the last rows of a finished run
INTERRUPT_SECONDS = 5.0  # of an attempt that was asked to stop: a later one goes on with the run
# The library must not take the tracker process for a rank, and the trainer's GPUs are not its business.
HIDDEN_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", TOKEN_VARIABLE),
)


@dataclass(frozen=True, kw_only=True)
class TrackerRequest:
    """What a tracker process logs: the rows of a file of metrics, to the run of this id, which is its name too.

    A later attempt goes on with the same run. `folder` is for what the library writes itself.
    """

    tracker: str
    run_id: str
    folder: str
    metrics: str
    settings: dict[str, int | float | str] = field(default_factory=dict)


def run_id(out: Path) -> str:
    """Return the id of the run that is trained in a folder, equal for all attempts and machines. Raises `OSError`."""
    if job := os.environ.get(JOB_VARIABLE):
        return job
    path = out / RUN_ID_FILE
    create_once(path, f"run-{uuid4().hex[:8]}".encode())
    return read_file(path).decode()


class TrackerProcess:
    """The tracker process of one attempt."""

    def __init__(self, request: TrackerRequest) -> None:
        self.tracker = request.tracker
        self.is_complete = False
        environment = {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "train.trackers"],
            stdin=subprocess.PIPE,
            env={**environment, "PYTHONPATH": project_search_path()},
            start_new_session=True,
        )
        self._tell(to_json_bytes(encode(request)).replace(b"\n", b" "))

    def end(self, is_complete: bool) -> None:
        """Ask the process to log the last rows and to end. Does not wait for it."""
        self.is_complete = is_complete
        self._tell(b"done" if is_complete else b"interrupted")

    def wait(self) -> None:
        """Wait until the process has ended. One that hangs is killed."""
        seconds = FINISH_SECONDS if self.is_complete else INTERRUPT_SECONDS
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"{self.tracker}: it did not end in {seconds:g} s; the last values may be missing there", flush=True)
        kill_process_groups([self.process])  # also what the library has started

    def _tell(self, line: bytes) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it has ended
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()


def start_tracker(
    tracker: str, out: Path, log_dir: Path, attempt: int, settings: dict[str, int | float | str]
) -> TrackerProcess | None:
    """Start an attempt's tracker process, in the main thread; None, with a line on stdout, where that is impossible."""
    if find_spec(tracker) is None:
        print(f"--log {tracker}: it is not installed here; training goes on without it: pip install {tracker}")
        return None
    try:
        request = TrackerRequest(
            tracker=tracker,
            run_id=run_id(out),
            folder=str(log_dir.absolute()),
            metrics=str(metrics_file(log_dir, attempt).absolute()),
            settings=settings,
        )
        return TrackerProcess(request)
    except (OSError, ValueError) as error:
        print(f"--log {tracker}: {error}; training goes on without it", flush=True)
        return None
