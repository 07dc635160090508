"""Errors of the trainer that end a run with one line instead of a traceback."""

# What gloo, NCCL and torch's store write when another process is gone. None of it is this process's own fault.
PEER_FAILURE_MARKERS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "TCPStore",
    "recvValue",
)


def is_peer_failure(kind: type[BaseException], text: str) -> bool:
    """Return whether an error is what a collective operation raises when another process is gone."""
    return kind.__name__.startswith("Dist") or any(marker in text for marker in PEER_FAILURE_MARKERS)


class TrainingError(Exception):
    """The run cannot go on, and the reason needs no traceback: bad data, a loss that diverged, a foreign checkpoint."""


class UnreadableCheckpoint(TrainingError):
    """The checkpoint to resume from cannot be read. An attempt with an earlier one may well succeed."""


class WorkerLost(Exception):
    """A data-loader process was killed. It needs no traceback, and another attempt may well succeed."""
