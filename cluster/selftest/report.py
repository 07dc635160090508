"""The report of a self-test: what each step looked at and what it saw, as records, as JSON and as text.

A user may send the report to the project. Account numbers, names, keys and public addresses are left out of it.
"""

import getpass
import json
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from train.tools.files import write_atomic
from train.tools.records import encode

REPORT_NAME = "selftest-report"  # of two files: .json and .txt
PRIVATE_PATTERNS = {
    r"\barn:aws[\w-]*:[^\s\"',;)]+": "<arn>",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b": "<key>",
    r"(?<![\w-])\d{12}(?!\w)": "<account>",
    r"(?<![\w.])(?!(?:10|127)\.)\d{1,3}(?:\.\d{1,3}){3}(?![\w.])": "<address>",
}
MIN_NAME_CHARACTERS = 3  # of a user or host name that is left out: "a" is a word


class StepState(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # it needs a step that failed
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Observation:
    """What must be so, whether it is, and what was seen."""

    what: str
    is_right: bool
    seen: str


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step saw. `dollars` are those of its jobs."""

    title: str
    state: StepState
    seconds: float
    dollars: float
    observations: tuple[Observation, ...]


@dataclass(frozen=True, kw_only=True)
class SelftestReport:
    """What a self-test saw. `started` is in UTC, `commit` that of the program, None outside git."""

    cloud: str
    region: str
    started: str
    commit: str | None
    seconds: float
    dollars: float
    max_dollars: float
    steps: tuple[StepResult, ...]

    @property
    def states(self) -> set[StepState]:
        """How the steps ended."""
        return {step.state for step in self.steps}


def remove_private(text: str, names: Sequence[str] = ()) -> str:
    """Return a text without account numbers, ARNs, keys, public addresses and these names."""
    for pattern, replacement in PRIVATE_PATTERNS.items():
        text = re.sub(pattern, replacement, text)
    for name in sorted(names, key=len, reverse=True):
        if len(name) >= MIN_NAME_CHARACTERS:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<private>", text)
    return text


def write_report(folder: Path, report: SelftestReport) -> str:
    """Write a report as JSON and as text, without what is private, and return the text. Raises `OSError`."""
    names = [str(Path.home()), getpass.getuser(), socket.gethostname()]
    text = remove_private("".join(f"{line}\n" for line in _lines(report)), names)
    data = remove_private(json.dumps(encode(report), indent=1), names)
    write_atomic(folder / f"{REPORT_NAME}.json", data.encode())
    write_atomic(folder / f"{REPORT_NAME}.txt", text.encode())
    return text


def _lines(report: SelftestReport) -> Iterator[str]:
    yield f"self-test on {report.cloud}, {report.region}, {report.started}, commit {report.commit or 'unknown'}"
    for number, step in enumerate(report.steps, 1):
        yield f"{number} {step.title}: {step.state} after {step.seconds / 60:.1f} minutes, ${step.dollars:.2f}"
        for observation in step.observations:
            yield f"  {'ok' if observation.is_right else 'WRONG':6} {observation.what}: {observation.seen}"
    spent = f"machines and data transfer cost ${report.dollars:.2f} of ${report.max_dollars:.2f}"
    yield f"{spent} in {report.seconds / 60:.1f} minutes; the stack's storage is not counted"
