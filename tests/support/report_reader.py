"""Hand-made run folders for the tests of reports, with the files that a job of several machines leaves at home."""

import json
from pathlib import Path
from typing import Any

from PIL import Image
from support.train_records import epoch_line, step_line

from train.data.index.open import load_index
from train.metrics.thumbnails import write_thumbnails

BEGIN = 1_790_000_000.0  # seconds since 1970
TIME_PARTS = {"steps": 8.0, "waits": 1.0, "validation": 1.5, "switches": 0.5, "checkpoints": 0.25, "other": 0.25}


def home(run: Any, path: str, *rows: dict[str, Any]) -> None:
    file = run.run_folder.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step(number: int, at: float, **more: Any) -> dict[str, Any]:
    """Return a row of training metrics: `number` is the step."""
    scalars: dict[str, Any] = {
        "loss/train": 3.0 - 0.01 * number, "sizes/lr": 0.05, "sizes/image": 32, "sizes/batch_total": 8,
        "times/images_per_second": 100.0,
    }  # fmt: skip
    return step_line(number, at, images=8 * number, **scalars, **more)


def epoch(number: int, at: float, **more: Any) -> dict[str, Any]:
    """Return the row of an epoch, as the metrics and the result have it."""
    row = {
        "epoch": number, "val_loss": 2.4, "val_images": 20, "view": "square", "top1": 10.0 * number,
        "top5": 50.0 + number, "top1_square": 10.0 * number, "top5_square": 50.0 + number, "where": TIME_PARTS,
    }  # fmt: skip
    return epoch_line(8 * number, at, images=60 * number, **{**row, **more})


def agent(run: Any, machine: str, *states: tuple[str, float]) -> None:
    """Write the state log of a machine's agent, from pairs of a state and its seconds after BEGIN."""
    home(run, f"logs/agent-{machine}.jsonl", *({"time": BEGIN + at, "state": state} for state, at in states))


def lost(run: Any) -> None:
    """Write the files of a job of two machines that loses machine 1 in attempt 2 and regains it in attempt 3."""
    agent(run, "0", ("setup", 0), ("training", 4), ("failed", 14), ("training", 16), ("saved", 20), ("training", 21),
          ("validating", 30), ("done", 32))  # fmt: skip
    agent(run, "1", ("setup", 0), ("training", 4), ("lost", 13), ("setup", 17), ("training", 21), ("done", 32))
    run.write_attempt(1, "0.a", "1.b", time=BEGIN + 3, reason="start")
    run.write_attempt(2, "0.a", time=BEGIN + 15, reason="machine 1 lost")
    run.write_attempt(3, "0.a", "1.c", time=BEGIN + 20, reason="machine 1 joined")
    home(run, "metrics/000001.jsonl", step(1, BEGIN + 5), step(4, BEGIN + 13))
    home(run, "metrics/000002.jsonl", step(4, BEGIN + 17, attempt=2), step(6, BEGIN + 19, attempt=2))
    rows = step(7, BEGIN + 22, attempt=3), epoch(1, BEGIN + 25), step(12, BEGIN + 28, attempt=3), epoch(2, BEGIN + 32)
    home(run, "metrics/000003.jsonl", *rows)


def done(run: Any, **more: Any) -> None:
    result = {
        "job": "job-1", "recipe": "tiny", "state": "done", "reason": "", "top1": 20.0, "top5": 52.0, "steps": 16,
        "epochs": [epoch(1, 0.0), epoch(2, 0.0)], "images_per_second": 61.0, "goodput": 0.87, "seed": 7,
        "seconds": {"total": 32.0, "training": 20.0, "validation": 3.0}, "attempts": 3, "dollars": 0.0,
        "where": {
            "wall": 23.0, "pauses": 4.0, "gap": None, "start": {"joining": 1.25},
            "parts": {
                part: {"seconds": 2 * seconds, "epoch": 1, "most": seconds} for part, seconds in TIME_PARTS.items()
            },
        },
        "forecast": {"minutes": 0.5, "terms": {}, "phases": [], "start": {}, "source": "presets"},
        "against": [{"term": "steps", "forecast": 15.0, "actual": 16.0, "error": -0.0625},
                    {"term": "all", "forecast": 25.0, "actual": 27.0, "error": -0.074}],
        "versions": {"torch": "2.13.0"}, "device": "cpu", "precision": "float32",
    }  # fmt: skip
    run.run_folder.result_path.write_text(json.dumps({**result, **more}))


def thumbnails(run: Any, data: Path) -> None:
    """Let the job's first attempt have kept thumbnails of a data folder's validation images."""
    write_thumbnails(load_index(data, "val"), run.run_folder.path, 1)


def draw_val(
    root: Path, *names: str, sizes: tuple[tuple[int, int], ...] = ((90, 60), (60, 60), (48, 80)), split: str = "val"
) -> Path:
    for index, name in enumerate(names):
        (root / split / name).mkdir(parents=True)
        for size in sizes:
            color = (40 * index % 256, 90, 160)
            Image.new("RGB", size, color).save(root / split / name / f"{size[0]}x{size[1]}.JPEG")
    return root
