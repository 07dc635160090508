"""A log of the images that each step used (`--log-ids`), and the check that every image was used once per epoch.

    ids/000002-rank-3.jsonl     one line for each step of attempt 2: {"step": 17, "epoch": 1, "ids": [...]}

A rank writes its line before it takes part in the step's all-reduce. So a step that completes on any rank is in the
logs of all ranks. But the last lines of a machine that is lost may be lost with it. If the other machines go on without
repeating these steps, their ranks compute from the run's order which images each rank used, and log them in lines with
a field "rank". Such a line counts only if that rank's own line is missing and another rank has logged the step.
"""

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from train.tools.agent_protocol import USAGE_FOLDER, attempt_name
from train.tools.records import DamagedRecord, decode_line, encode
from train.tools.text_files import read_lines

_NO_LATER_ATTEMPT = 1 << 62  # a step that no run reaches
_FILE_NAME = re.compile(r"([0-9]{6,9})-rank-([0-9]+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """The image IDs of a step; steps and epochs count from 0. `rank` trained on them, None: the writer of the log."""

    step: int
    epoch: int
    ids: tuple[int, ...]
    rank: int | None = None


class UsageLog:
    """The log file of one rank in one attempt."""

    def __init__(self, log_dir: Path, attempt: int, rank: int) -> None:
        (log_dir / USAGE_FOLDER).mkdir(parents=True, exist_ok=True)
        self.file = (log_dir / USAGE_FOLDER / f"{attempt_name(attempt)}-rank-{rank}.jsonl").open("a", buffering=1)

    def record_step(self, step: int, epoch: int, ids: Iterable[int]) -> None:
        """Append the image IDs of a step. Steps and epochs count from 0."""
        self._write(UsageRow(step=step, epoch=epoch, ids=tuple(sorted(ids))))

    def record_plan(self, rows: Iterable[UsageRow]) -> None:
        """Append what all ranks had to use, as `DistributedBatchSampler.planned_usage` says."""
        for row in rows:
            self._write(row)

    def _write(self, row: UsageRow) -> None:
        self.file.write(json.dumps(encode(row)) + "\n")


def find_usage_errors(
    folder: Path,
    first_steps: Mapping[int, int],
    images_per_epoch: int | Mapping[int, int],
    steps_per_epoch: Mapping[int, int],
) -> list[str]:
    """Return what is wrong in a run's logs; [] when every image was used exactly once in every epoch.

    `first_steps` is the first step of each attempt: steps that an earlier attempt did beyond it were repeated, and do
    not count. `images_per_epoch` is one number, or that of each epoch from 0 in a shortened run. `steps_per_epoch` is
    the number of steps of each epoch from 0. Machines write the logs: other files, and damaged lines, are left out.
    """
    ids_by_step: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by epoch, then step
    attempts = sorted(first_steps)
    end_steps = {
        attempt: min((first_steps[later] for later in attempts if later > attempt), default=_NO_LATER_ATTEMPT)
        for attempt in attempts
    }
    logging_ranks: dict[tuple[int, int], set[int]] = defaultdict(set)  # by attempt and step
    planned: dict[tuple[int, int, int], UsageRow] = {}  # by attempt, step and rank
    for path in sorted(folder.glob("*.jsonl")):
        name = _FILE_NAME.fullmatch(path.name)
        end_step = end_steps.get(int(name[1])) if name else None
        if name is None or end_step is None:
            continue
        attempt = int(name[1])
        for line in read_lines(path):
            with contextlib.suppress(DamagedRecord):
                row = decode_line(UsageRow, line)
                if row.step >= end_step:
                    continue
                if row.rank is not None:
                    planned[attempt, row.step, row.rank] = row
                    continue
                logging_ranks[attempt, row.step].add(int(name[2]))
                ids_by_step[row.epoch][row.step] += row.ids
    for (attempt, step, rank), row in planned.items():
        ranks = logging_ranks[attempt, step]
        if ranks and rank not in ranks:
            ids_by_step[row.epoch][step] += row.ids
    errors = []
    for epoch, steps in steps_per_epoch.items():
        logged_steps = ids_by_step[epoch]
        uses = Counter(image_id for ids in logged_steps.values() for image_id in ids)
        if len(logged_steps) != steps:
            errors.append(f"epoch {epoch + 1}: {len(logged_steps)} of {steps} steps are in the logs")
        repeated = sum(count > 1 for count in uses.values())
        images = images_per_epoch if isinstance(images_per_epoch, int) else images_per_epoch[epoch]
        missing = images - len(uses)
        if repeated or missing:
            errors.append(f"epoch {epoch + 1}: {repeated} images used more than once, {missing} not used")
    return errors
