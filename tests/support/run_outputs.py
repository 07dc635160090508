"""What a run of the trainer has written until now."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.tools import checkpoint_io
from train.tools.agent_protocol import checkpoint_folder, newest_intact_checkpoint


def final_state(out: Path, attempt: int = 1) -> dict[str, Any]:
    path = newest_intact_checkpoint(checkpoint_folder(out, attempt))
    assert path is not None
    return checkpoint_io.load_checkpoint(path)


def read_result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def has_step(out: Path, least: int) -> Callable[[], bool]:
    """Return a function that says whether attempt 1 has a checkpoint of a step or of a later one."""
    folder = checkpoint_folder(out, 1)
    return lambda: any(int(path.stem.removeprefix("step-")) >= least for path in folder.glob("step-*.pt"))


def damage_pixels(path: Path) -> None:
    """Overwrite bytes in the middle of a JPEG file, behind its header, by what ends the data of its pixels."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\xff\xd9" * 100 + data[len(data) // 2 + 200 :])
