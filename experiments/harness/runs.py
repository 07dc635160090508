"""One run: what it is, by a hash of everything that decides its outcome, and the row that is kept of it.

The hash is over the data, the seed, the number of GPUs and how the recipe trains; not over names, nor over the code,
whose commit stands in the row. A field that a recipe gains later counts only where it has another value than its
default, so that a new choice in recipes does not make hours of rows worthless. `FORMAT` is raised by hand when the
code trains otherwise than before.
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
from train.tools.filesystem import json_roundtrip, read_json, to_json_bytes, write_atomic

FORMAT = 1
FIELDS_OF_FORMAT_1: dict[type, tuple[str, ...]] = {  # the fields of FORMAT 1, which always count
    Model: ("name", "zero_gamma", "fc_std", "weights", "compile"),
    Optim: (
        *("name", "momentum", "nesterov", "betas", "eps", "trust", "weight_decay", "norm_decay", "bias_decay"),
        *("loss", "label_smoothing", "scaling"),
    ),
    Phase: (
        *("epochs", "size", "batch", "lr", "shape", "min_scale", "copy", "rect_val", "rect_train", "frozen"),
        "validate",
    ),
}
IGNORED_FIELDS = {Phase: ("reached",)}  # says what the recipe's source met


@dataclass(frozen=True)
class ExperimentRun:
    """One arm with one seed on its images."""

    arm: Arm
    seed: int
    images: ImageSet

    @property
    def name(self) -> str:
        """What to call it to a person."""
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
        """The hash of the whole configuration."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:16]


def training_config(recipe: Recipe) -> dict[str, Any]:
    """Return how a recipe trains, without names and places."""
    parts = {"model": relevant_fields(recipe.model), "optim": relevant_fields(recipe.optim)}
    return dict(json_roundtrip(parts | {"phases": [relevant_fields(phase) for phase in recipe.phases]}))


def relevant_fields(recipe_part: Any) -> dict[str, Any]:
    """Return the fields of a part of a recipe that count."""
    kind = type(recipe_part)
    return {
        one.name: getattr(recipe_part, one.name)
        for one in dataclasses.fields(recipe_part)
        if one.name in FIELDS_OF_FORMAT_1[kind]
        or (one.name not in IGNORED_FIELDS.get(kind, ()) and getattr(recipe_part, one.name) != one.default)
    }


# --- rows: one small file for each run ------------------------------------------------------------------------------

ResultRow = dict[str, Any]


def read_row(run: ExperimentRun, results: Path) -> ResultRow | None:
    """Return what is known of a run, None while it was not made."""
    row = read_json(results / f"{run.key}.json")
    return row if isinstance(row, dict) and row.get("config") == run.config else None


def write_row(run: ExperimentRun, results: Path, values: ResultRow) -> ResultRow:
    """Write a run's row, whole or not at all, and return it."""
    results.mkdir(parents=True, exist_ok=True)
    row = {"name": run.name, "seed": run.seed, **values, "config": run.config}
    text = to_json_bytes({**row, "config": None}).decode()
    compact = json.dumps(run.config, sort_keys=True)
    text = text.replace('"config": null', f'"config": {compact}')
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
        "train_top1": [round(one["train_top1"], 2) for one in epochs],
        "steps": result["steps"],
        "images": result["images"],
        "megapixels": sum(one["train_images"] * one["size"] ** 2 for one in epochs) / 1e6,
        "train_seconds": round(sum(one["train_seconds"] for one in epochs), 2),
    }


def diverged_values(reason: str, epochs: list[ResultRow], classes: int) -> ResultRow:
    """Return the numbers of a run whose loss was no number any more, from the rows of the epochs it did end."""
    return {
        "top1": None,
        "top1_square": None,
        "diverged": reason,
        "classes": classes,
        "train_loss": None,
        "train_top1": [round(one["train_top1"], 2) for one in epochs],
        "steps": None,
        "images": None,
        "megapixels": None,
        "train_seconds": None,
    }
