"""The protocol between the trainer processes of a machine and its agent: names and records that both of them use.

The agent starts a trainer with the variable `WORK_VARIABLE`, which names a folder of this attempt on this machine:

    progress.json     written by the first trainer of a machine: state, step, numbers; replaced about once a second
    failed-3.json     written by rank 3 before it exits with an error: the reason, and whose fault it was
    ask               created by the agent: write a checkpoint at an agreed step and exit; SIGTERM asks the same
    nccl.log          NCCL's own log

`TOKEN_VARIABLE` is the secret that the ranks of an attempt share (train/distributed/rendezvous.py).

Below the shared folder, the trainers write checkpoints/000007/step-00000123.pt and in the end result.json. On its own
disk each machine has folders whose files only grow (`LOG_FOLDERS`); the agent copies them to the shared folder. A
trainer's exit code is 0 after the result, `EXIT_SAVED` after a requested save, and another one after a failure.
"""

from dataclasses import dataclass
from pathlib import Path

WORK_VARIABLE = "IMGNET_WORK"
TOKEN_VARIABLE = "IMGNET_TOKEN"
EXIT_SAVED = 3  # exit code of a process that was asked to stop and has written a checkpoint

PROGRESS_FILE = "progress.json"
FAILURE_FILE_PATTERN = "failed-*.json"
STOP_REQUEST_FILE = "ask"
NCCL_LOG_FILE = "nccl.log"

CHECKPOINTS_FOLDER = "checkpoints"
EVENTS_FOLDER = "events"  # of TensorBoard
METRICS_FOLDER = "metrics"
LOGS_FOLDER = "logs"
USAGE_FOLDER = "ids"  # which images each step used
# Over a slow link the first ones come first.
LOG_FOLDERS = (METRICS_FOLDER, EVENTS_FOLDER, LOGS_FOLDER, USAGE_FOLDER)

RESULT_FILE = "result.json"
CHECKPOINT_PATTERN = "step-*.pt"
RESUME_PATTERN = "resume-*.pt"  # links to checkpoints of earlier attempts


@dataclass(frozen=True, kw_only=True)
class StandbyRequest:
    """The line of JSON by which the agent turns a standby process into a trainer: all that an attempt adds."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    log: str


def failure_file(rank: int) -> str:
    """Return the name of the file in which a rank reports its failure."""
    return FAILURE_FILE_PATTERN.replace("*", str(rank))


def attempt_name(number: int) -> str:
    """Return an attempt's number as folders and files have it: 000007."""
    return f"{number:06d}"


def checkpoint_folder(shared: Path, attempt: int) -> Path:
    """Return the folder of the checkpoints of an attempt, given the folder that all machines share."""
    return shared / CHECKPOINTS_FOLDER / attempt_name(attempt)


def checkpoint_folders(shared: Path) -> list[Path]:
    """Return the existing folders of checkpoints, that of the oldest attempt first."""
    return sorted((shared / CHECKPOINTS_FOLDER).glob("[0-9]*"))


def checkpoint_file(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return CHECKPOINT_PATTERN.replace("*", f"{step:08d}")


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint by its name: step-00000123.pt or resume-00000123-1a2b3c4d.pt."""
    return int(path.stem.split("-")[1])


def metrics_file(folder: Path, attempt: int) -> Path:
    """Return the file of an attempt's metrics, in the folder of one machine's logs."""
    return folder / METRICS_FOLDER / f"{attempt_name(attempt)}.jsonl"


def metrics_files(folder: Path) -> list[Path]:
    """Return the existing files of metrics, that of the first attempt first."""
    return sorted((folder / METRICS_FOLDER).glob("*.jsonl"))


def rank_log_file(folder: Path, attempt: int, rank: int) -> Path:
    """Return the file of what a rank prints in an attempt, in the folder of one machine's logs."""
    return folder / LOGS_FOLDER / attempt_name(attempt) / f"rank-{rank}.log"
