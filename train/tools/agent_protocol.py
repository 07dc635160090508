"""The protocol between the trainer processes of a machine and its agent: names and records that both of them use.

The agent starts a trainer with the variable `WORK_VARIABLE`, which names a folder of this attempt on this machine:

    progress.json     written by the first trainer of a machine: state, step, numbers; replaced about once a second
    failed-3.json     written by rank 3 before it exits with an error: the reason, and whose fault it was
    ask               created by the agent: write a checkpoint at an agreed step and exit; SIGTERM asks the same
    save              created by the agent: write a checkpoint soon and go on
    abort             created by the agent: end all collectives, keep the state and wait for the next attempt
    kept-3.json       written by rank 3 when it has left its process group: the step whose state it keeps
    next-0.json       written by the agent for the first trainer of the machine: the attempt to go on with
    nccl.log          NCCL's own log

`TOKEN_VARIABLE` is the secret that the ranks of an attempt share (train/distributed/rendezvous.py), and
`PEERS_VARIABLE` the addresses of its machines, separated by commas (train/distributed/peer_filter.py).
`MODULE_FOLDERS_VARIABLE` has the folders of the user's modules (train/tools/user_code.py).

Below the shared folder, the trainers write checkpoints/000007/step-00000123.pt, and in the end the network (files of
`NETWORK_FOLDER`) and result.json. On its own disk each machine has folders whose files only grow (`LOG_FOLDERS`); the
agent copies them to the shared folder. A trainer's exit code is 0 after the result, `EXIT_SAVED` after a save.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from .sealed_files import is_intact

WORK_VARIABLE = "IMGNET_WORK"
TOKEN_VARIABLE = "IMGNET_TOKEN"
MODULE_FOLDERS_VARIABLE = "IMGNET_MODULE_FOLDERS"  # written as in PATH
PEERS_VARIABLE = "IMGNET_PEERS"
EXIT_SAVED = 3  # exit code of a process that was asked to stop and has written a checkpoint

PROGRESS_FILE = "progress.json"
FAILURE_FILE_PATTERN = "failed-*.json"  # each rank reports its failure in one
IN_PLACE_VARIABLE = "IMGNET_IN_PLACE"  # set when trainers keep their state for the next attempt; "auto": on CPUs only
NEEDS_GPU_VARIABLE = "IMGNET_NEEDS_GPU"  # set where trainers may not take the CPU for a GPU that torch cannot use
STOP_REQUEST_FILE = "ask"
SAVE_REQUEST_FILE = "save"
ABORT_REQUEST_FILE = "abort"
NOT_TRAINING_YET = "training had not begun"  # why a trainer keeps no state
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
BEST_PATTERN = "best-*.safetensors"  # beside an attempt's checkpoints: weights of the best validation, by their step

# In the shared folder of a finished run, and in the run folder of its job (train/weights/network_description.py).
NETWORK_FOLDER = "network"
MODEL_FILE = "model.safetensors"  # the weights after the last epoch
BEST_MODEL_FILE = "model-best.safetensors"  # those of the best validation, unless that was the last
CLASSES_FILE = "classes.json"
CONFUSION_FILE = "confusion.json"
NETWORK_FILES = (CLASSES_FILE, CONFUSION_FILE, MODEL_FILE, BEST_MODEL_FILE)


def module_folders_variable(folders: Iterable[str]) -> dict[str, str]:
    """Return the environment variable by which a process finds the user's modules in these folders."""
    return {MODULE_FOLDERS_VARIABLE: os.pathsep.join(folders)}


@dataclass(frozen=True, kw_only=True)
class StandbyRequest:
    """The JSON by which the agent makes a standby process, or a trainer that waits, take part in an attempt."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    log: str


def kept_state_file(rank: int) -> str:
    """Return the name of the file in which a rank reports that it keeps its state for the next attempt."""
    return f"kept-{rank}.json"


def next_request_file(local_rank: int) -> str:
    """Return the name of the file with the `StandbyRequest` for a trainer that has kept its state."""
    return f"next-{local_rank}.json"


def attempt_name(number: int) -> str:
    """Return an attempt's number as folders and files have it: 000007."""
    return f"{number:06d}"


def checkpoint_folder(shared: Path, attempt: int) -> Path:
    """Return the folder of the checkpoints of an attempt, given the folder that all machines share."""
    return shared / CHECKPOINTS_FOLDER / attempt_name(attempt)


def checkpoint_folders(shared: Path) -> list[Path]:
    """Return the existing folders of checkpoints, that of the oldest attempt first."""
    return sorted(path for path in (shared / CHECKPOINTS_FOLDER).glob("[0-9]*") if path.name.isdecimal())


def checkpoint_file(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return CHECKPOINT_PATTERN.replace("*", f"{step:08d}")


def best_weights_file(step: int) -> str:
    """Return the name of the weights of the best validation, which followed a step."""
    return BEST_PATTERN.replace("*", f"{step:08d}")


_STEP_NAME = re.compile(r"(?:(?:step|best|save)-([0-9]{1,18})|resume-([0-9]{1,18})-\w+)(?:\.pt|\.safetensors)?")


def known_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint, as `checkpoint_step` does; None for another name."""
    name = _STEP_NAME.fullmatch(path.name)
    return int(name[1] or name[2]) if name else None


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint, such as step-00000123.pt. Raises `ValueError` for another name."""
    step = known_step(path)
    if step is None:
        raise ValueError(f"{path}: its name has no step")
    return step


def checkpoint_files(folder: Path, pattern: str) -> list[Path]:
    """Return what has a pattern and a step in its name, by ascending step: not a user's copy step-old.pt."""
    found = [(step, path) for path in folder.glob(pattern) if (step := known_step(path)) is not None]
    return [path for _, path in sorted(found)]


def newest_intact_checkpoint(folder: Path, pattern: str = CHECKPOINT_PATTERN) -> Path | None:
    """Return the checkpoint of the latest step that is intact, None when there is none. Damaged files are skipped."""
    return next(filter(is_intact, reversed(checkpoint_files(folder, pattern))), None)


def metrics_file(folder: Path, attempt: int) -> Path:
    """Return the file of an attempt's metrics, in the folder of one machine's logs."""
    return folder / METRICS_FOLDER / f"{attempt_name(attempt)}.jsonl"


def metrics_files(folder: Path) -> list[Path]:
    """Return the existing files of metrics, that of the first attempt first."""
    return sorted(path for path in (folder / METRICS_FOLDER).glob("[0-9]*.jsonl") if path.stem.isdecimal())


def rank_log_file(folder: Path, attempt: int, rank: int) -> Path:
    """Return the file of what a rank prints in an attempt, in the folder of one machine's logs."""
    return folder / LOGS_FOLDER / attempt_name(attempt) / f"rank-{rank}.log"


class TrainerState(StrEnum):
    """What a trainer does at the moment."""

    STARTING = "starting"
    INDEXING = "indexing"
    JOINING = "joining"
    WARMING = "warming"
    TRAINING = "training"
    VALIDATING = "validating"
    SAVED = "saved"
    DONE = "done"


class Fault(StrEnum):
    """The cause of a failure."""

    NONE = ""  # nothing failed, or another machine was the cause
    OWN = "own"  # the trainer itself
    PEER = "peer"  # another process disappeared
    CHECKPOINT = "checkpoint"  # the checkpoint to resume from cannot be read
    FINAL = "final"  # the trainer itself, and every further attempt would fail too
    INPUT = "input"  # the recipe, the options or the images: until they are changed, every attempt fails
    MACHINE = "machine"  # the machine: its driver hangs or a GPU is lost, so only another machine can go on


@dataclass(frozen=True, kw_only=True)
class TrainingNumbers:
    """How far training is, as a trainer reports it. None: not known yet.

    `busy` has the share of the last seconds' steps in which each rank of the machine did not wait for other ranks.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    images_per_second: float | None = None
    lr: float | None = None
    loss: float | None = None
    top1: float | None = None
    top5: float | None = None
    busy: tuple[float | None, ...] | None = None
    where: dict[str, Any] | None = None  # Any: the breakdown of train.metrics.time_breakdown, passed on as it is


@dataclass(frozen=True, kw_only=True)
class TrainerProgress(TrainingNumbers):
    """The content of progress.json. `ticks` changes while there is nothing else to report.

    `not_in_place` is why the trainer could not keep its state if another process were lost now; "": it could.
    """

    state: TrainerState
    ticks: int = 0
    not_in_place: str = NOT_TRAINING_YET


@dataclass(frozen=True, kw_only=True)
class KeptStateReport:
    """The content of kept-3.json: the finished steps of a trainer that waits for the next attempt.

    `has_saved` says whether it waits because it was asked to save; else another process is gone, as `reason` says.
    """

    step: int
    has_saved: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainerFailure:
    """The content of failed-3.json. `time` is in seconds since 1970."""

    rank: int
    reason: str
    fault: Fault = Fault.OWN
    time: float
