"""Which images each step used, written down (`--log-ids`) and checked. Imports no torch.

    ids/000002-rank-3.jsonl     one line for each step of attempt 2: {"step": 17, "epoch": 1, "ids": [...]}

A line is written before the step's gradients are given away: a step that ends anywhere is written down everywhere.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from train.tools.filesystem import read_json_lines

USAGE_FOLDER = "ids"


class UsageLog:
    """The lines of one process."""

    def __init__(self, log_dir: Path, attempt: int, rank: int) -> None:
        (log_dir / USAGE_FOLDER).mkdir(parents=True, exist_ok=True)
        self.file = (log_dir / USAGE_FOLDER / f"{attempt:06d}-rank-{rank}.jsonl").open("a", buffering=1)

    def record_step(self, step: int, epoch: int, ids: Iterable[int]) -> None:
        """Append a step; steps and epochs count from 0."""
        self.file.write(json.dumps({"step": step, "epoch": epoch, "ids": sorted(ids)}) + "\n")


def find_usage_errors(
    folder: Path,
    first_steps: Mapping[int, int],
    images_per_epoch: int | Mapping[int, int],
    steps_per_epoch: Mapping[int, int],
) -> list[str]:
    """Return what is wrong with a run's lines, [] when every image was used exactly once in every epoch.

    `images` is their number, or the number of each epoch from 0: a shortened run takes a part.

    `first_steps` says at which step each attempt began: what an earlier one did beyond that was done again, and does
    not count. `steps_of_epoch` is the number of steps of each epoch from 0.
    """
    used: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # epoch, step: ids
    attempts = sorted(first_steps)
    ends = {one: min((first_steps[later] for later in attempts if later > one), default=1 << 62) for one in attempts}
    for path in sorted(folder.glob("*.jsonl")):
        attempt = int(path.name.partition("-")[0])
        for row in read_json_lines(path, "step", "epoch", "ids"):
            if attempt in ends and row["step"] < ends[attempt]:
                used[row["epoch"]][row["step"]] += row["ids"]
    wrong = []
    for epoch, steps in steps_per_epoch.items():
        counted = Counter(one for ids in used[epoch].values() for one in ids)
        if len(used[epoch]) != steps:
            wrong.append(f"epoch {epoch + 1}: {len(used[epoch])} of {steps} steps are written down")
        twice = [one for one, count in counted.items() if count > 1]
        missing = (images_per_epoch if isinstance(images_per_epoch, int) else images_per_epoch[epoch]) - len(counted)
        if twice or missing:
            wrong.append(f"epoch {epoch + 1}: {len(twice)} images twice or more, {missing} not at all")
    return wrong
