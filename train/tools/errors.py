"""Errors of the trainer that end a run with one line instead of a traceback."""

# What gloo, NCCL and the store say of a process that is gone; none of it is this process's own fault.
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
    """Whether an error is what a collective raises when another process is gone."""
    return kind.__name__.startswith("Dist") or any(word in text for word in PEER_FAILURE_MARKERS)


class TrainingError(Exception):
    """An end with a reason that needs no trace: bad data, a rate that diverged, a checkpoint of another recipe."""


class WorkerLost(Exception):
    """An end that needs no trace either, but that another try may not meet again: a loader process was killed."""
