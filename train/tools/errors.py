"""Errors of the trainer that end a run with one line instead of a traceback, and what the texts of errors tell."""

import os
import re

from .agent_protocol import Fault

# What gloo, NCCL and torch's store write when another process is gone. None of it is this process's own fault.
PEER_FAILURE_MARKERS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "TCPStore",
    "recvValue",
    "the agent has ended the attempt",  # AgentChannel.tick
    "the collectives were aborted",  # regroup.abortable
)
# Errors that no program causes: cudaErrorECCUncorrectable and cudaErrorNvlinkUncorrectable (NVIDIA, "CUDA Runtime API",
# error codes 214 and 220), as cudaGetErrorString names them. nvidia-smi still lists such a GPU.
BROKEN_GPU_PATTERN = re.compile(r"uncorrectable (ECC|NVLink) error\b[\w ]*")
# How torch and NCCL begin what CUDA told them. torch adds lines of general advice, which tell nothing about the error.
CUDA_ERROR_PATTERN = re.compile(r"(?:CUDA error:|Cuda failure) [^\n]+")
# NCCL's results that this process or its machine is the cause of (NVIDIA, "NCCL: Types", ncclResult_t). A system error
# may also be the connection to a process that is gone.
OWN_NCCL_PATTERN = re.compile(
    r"ncclUnhandledCudaError|ncclInvalid(?:Usage|Argument)"
    r"|ncclSystemError[\s\S]*(?:shared memory|No space left|Cannot allocate memory|Too many open files)"
)


def find_gpu_failure(text: str, local_rank: int) -> tuple[Fault, str] | None:
    """Return whose fault an error on this process's own GPU is, and one line of it; None for other errors."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpu = visible[local_rank] if local_rank < len(visible) and visible[local_rank] else local_rank
    if match := BROKEN_GPU_PATTERN.search(text):
        return Fault.MACHINE, f"GPU {gpu} is broken: {match[0]}"
    if match := CUDA_ERROR_PATTERN.search(text):
        return Fault.OWN, f"GPU {gpu}: {match[0].strip()}"
    if OWN_NCCL_PATTERN.search(text):
        return Fault.OWN, f"GPU {gpu}: NCCL: {last_line(text)}"
    return None


def last_line(text: str) -> str:
    """Return the last line of an error that is not indented. A loader process sends its traceback as text before it.

    pybind11 appends the stack of a function in Python that torch has called.
    """
    lines = text.strip().partition("\n\nAt:\n")[0].splitlines()
    return next((line for line in reversed(lines) if line[:1].strip()), "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line_error(error: BaseException) -> str:
    """Return the text of an error in one line. The text of an `OSError` begins with its file."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def is_peer_failure(kind: type[BaseException], text: str) -> bool:
    """Return whether an error is what a collective operation raises when another process is gone."""
    is_of_collective = kind.__name__.startswith("Dist") or any(marker in text for marker in PEER_FAILURE_MARKERS)
    return is_of_collective and find_gpu_failure(text, 0) is None


class TrainingError(Exception):
    """The run cannot go on, and the reason needs no traceback: bad data, a loss that diverged, a foreign checkpoint."""


class Diverged(TrainingError):
    """The loss is infinite or not a number."""


class UnreadableCheckpoint(TrainingError):
    """The checkpoint to resume from cannot be read. An attempt with an earlier one may well succeed."""


class MachineTrouble(Exception):
    """Something of this machine is in the way. It needs no traceback, and another attempt or machine may succeed."""


class HandoverFailed(MachineTrouble):
    """The processes cannot go on in place in this attempt. Those that have a state keep it for the next one."""


class WorkerLost(MachineTrouble):
    """A data-loader process was killed."""
