"""One run of an experiment: its key, a hash of everything that decides its outcome, and the row that is kept of it.

The hash covers the data, the seed, the number of GPUs and how the recipe trains. It does not cover names, nor the
code, whose commit is in the row. A field that recipes gain later counts only where its value is not the default, so
that a new option of recipes does not make hours of rows worthless. `FORMAT` is increased by hand when the code trains
differently than before.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.claims import Arm
from experiments.harness.images import ImageSet
from train.recipe import Model, Optim, Phase, Recipe
from train.tools.files import write_atomic
from train.tools.text_files import json_roundtrip, read_json, to_json_bytes

FORMAT = 1
FIELDS_OF_FORMAT_1: dict[type, tuple[str, ...]] = {  # the fields that existed in FORMAT 1, which always count
    Model: ("name", "zero_gamma", "fc_std", "weights", "compile"),
    Optim: (
        *("name", "momentum", "nesterov", "betas", "eps", "trust", "weight_decay", "norm_decay", "bias_decay", "loss"),
        *("label_smoothing", "scaling"),
    ),
    Phase: (
        *("epochs", "size", "batch", "lr", "shape", "min_scale", "copy", "rect_val", "rect_train", "frozen"),
        "validate",
    ),
}
IGNORED_FIELDS = {Phase: ("reached",)}  # the accuracy that the recipe's source reached: no influence on training


@dataclass(frozen=True)
class ExperimentRun:
    """One arm with one seed and its images."""

    arm: Arm
    seed: int
    images: ImageSet

    @property
    def name(self) -> str:
        """The name for people."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def config(self) -> dict[str, Any]:
        """Everything that decides the outcome, as plain data."""
        recipe = self.arm.recipe
        return {
            "format": FORMAT,
            "data": self.images.fingerprint,
            "seed": self.seed,
            "gpus": self.arm.gpus,
            "nominal_gpus": recipe.nominal_gpus,
            **training_config(recipe),
        }

    @property
    def key(self) -> str:
        """The hash of the configuration, as 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:16]


def training_config(recipe: Recipe) -> dict[str, Any]:
    """Return how a recipe trains, as plain data without names and paths."""
    config = {
        "model": relevant_fields(recipe.model),
        "optim": relevant_fields(recipe.optim),
        "phases": [relevant_fields(phase) for phase in recipe.phases],
    }
    return dict(json_roundtrip(config))


def relevant_fields(recipe_part: Any) -> dict[str, Any]:
    """Return the fields of a part of a recipe that count, with their values."""
    part_type = type(recipe_part)
    relevant = {}
    for field in dataclasses.fields(recipe_part):
        value = getattr(recipe_part, field.name)
        is_new = field.name not in FIELDS_OF_FORMAT_1[part_type]
        is_ignored = field.name in IGNORED_FIELDS.get(part_type, ())
        if not is_new or (not is_ignored and value != field.default):
            relevant[field.name] = value
    return relevant


# --- rows: one small file for each run ------------------------------------------------------------------------------

ResultRow = dict[str, Any]


def read_row(run: ExperimentRun, results: Path) -> ResultRow | None:
    """Return the row of a run, or None when the run was not made yet."""
    row = read_json(results / f"{run.key}.json")
    return row if isinstance(row, dict) and row.get("config") == run.config else None


def write_row(run: ExperimentRun, results: Path, values: ResultRow) -> ResultRow:
    """Write the row of a run, completely or not at all, and return it."""
    results.mkdir(parents=True, exist_ok=True)
    row = {"name": run.name, "seed": run.seed, **values, "config": run.config}
    text = to_json_bytes({**row, "config": None}).decode()
    config_on_one_line = json.dumps(run.config, sort_keys=True)
    text = text.replace('"config": null', f'"config": {config_on_one_line}')
    write_atomic(results / f"{run.key}.json", text.encode())
    return row


def result_values(result: ResultRow, classes: int) -> ResultRow:
    """Return the numbers of a run that ended, from its result.json."""
    epochs = result["epochs"]
    return {
        "top1": result["top1"],
        "top1_square": result["top1_square"],
        "diverged": None,
        "classes": classes,
        "train_loss": epochs[-1]["train_loss"],
        "train_top1": [round(epoch["train_top1"], 2) for epoch in epochs],
        "steps": result["steps"],
        "images": result["images"],
        "megapixels": sum(epoch["train_images"] * epoch["size"] ** 2 for epoch in epochs) / 1e6,
        "train_seconds": round(sum(epoch["train_seconds"] for epoch in epochs), 2),
    }


def diverged_values(reason: str, epochs: list[ResultRow], classes: int) -> ResultRow:
    """Return the numbers of a run whose loss became NaN or infinite, from the rows of the epochs that it completed."""
    return {
        **dict.fromkeys(("top1", "top1_square", "train_loss", "steps", "images", "megapixels", "train_seconds")),
        "diverged": reason,
        "classes": classes,
        "train_top1": [round(epoch["train_top1"], 2) for epoch in epochs],
    }
