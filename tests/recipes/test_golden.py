"""The rate of every step of every recipe: by the paper's formula, written out here, and by a table that is stored.

    PYTHONPATH=. python tests/recipes/test_golden.py        # writes golden/, where the formulas agree with the recipes

A stored table has each phase's steps, batch and first and last rate, every thousandth rate, and a checksum of them all
as float64; where a cosine is in it there is none, for its last bit is the C library's affair.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from train.recipe import Phase, Recipe
from train.recipe.files import read_recipes
from train.recipe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
FILES = sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))
Rates = NDArray[np.float64]
IMAGENET, EVERY = 1_281_167, 1000


# --- the formulas, in float64 ------------------------------------------------------------------------------------


def steps(epochs: int, batch: int, images: int = IMAGENET) -> int:
    return epochs * math.ceil(images / batch)


def lines(*rows: tuple[int, int, float, float], images: int = IMAGENET) -> Rates:
    """Straight lines over (epochs, images a step, first rate, last rate)."""
    return np.concatenate([np.linspace(a, b, steps(epochs, batch, images)) for epochs, batch, a, b in rows])


def imagenet18(data: Sequence[tuple[int, int]], rates: Sequence[tuple[int, int, float, float]], machines: int) -> Rates:
    """As its lists are: (first epoch, images a GPU), and apart from them (first epoch, end, rate, rate at the end)."""

    def batch(epoch: int) -> int:
        return 8 * machines * next(size for first, size in reversed(data) if first <= epoch)

    counts = [sum(steps(1, batch(epoch)) for epoch in range(a, b)) for a, b, _, _ in rates]
    return np.concatenate([np.linspace(r, s, n) for n, (_, _, r, s) in zip(counts, rates, strict=True)])


def three_hours(epochs: int = 45, rate: float = 0.4) -> Rates:
    """imagenet-fast, main.py: shares of all epochs, rounded; four steps of a warm-up."""
    ends = [int(epochs * share + 0.5) for share in (0.47, 0.78, 0.95)]
    each = [rate / (4 - e) if e < 4 else rate / 10 ** sum(e >= end for end in ends) for e in range(epochs)]
    return np.repeat(each, steps(1, 1024))


def goyal(batch: int, warmup: str = "") -> Rates:
    """eta = 0.1 k n / 256; a tenth at 30, 60 and 80; gradual: from eta / k, a constant more in each step."""
    each, eta = steps(1, batch), 0.1 * batch / 256
    t = np.arange(90 * each)
    rate = eta * 0.1 ** np.searchsorted([30, 60, 80], t // each, side="right")
    first = 5 * each
    if warmup == "gradual":
        rate[:first] = 0.1 + (eta - 0.1) / (first - 1) * t[:first]
    elif warmup == "constant":
        rate[:first] = 0.1
    return np.asarray(rate)


def mxnet(batch: int, rate: float, drops: Sequence[int]) -> Rates:
    """A factor of 0.1 at some epochs of 120."""
    epoch = np.arange(steps(120, batch)) // steps(1, batch)
    return rate * 0.1 ** np.searchsorted(drops, epoch, side="right").astype(float)


def poly(first: float, peak: float, batch: int, warmup: int, epochs: int) -> Rates:
    """You et al. 2017: a linear warm-up, then peak (1 - t / T)^2."""
    up, down = steps(warmup, batch), steps(epochs - warmup, batch)
    rise = first + (peak - first) * np.arange(up) / (up - 1)
    return np.concatenate([rise, peak * (1 - np.arange(down) / (down - 1)) ** 2])


def one_cycle(peak: float, count: int) -> Rates:
    """Smith and Topin 2017 as torch has it: peak / 25, the peak after 0.3, peak / 250,000; half cosines."""
    t = np.arange(count) / (count - 1)
    up = peak / 25 + (peak - peak / 25) * (1 - np.cos(np.pi * t / 0.3)) / 2
    down = peak / 250_000 + (peak - peak / 250_000) * (1 + np.cos(np.pi * (t - 0.3) / 0.7)) / 2
    return np.where(t < 0.3, up, down)


def ours_2026(batch: int, peak: float, *knots: float) -> Rates:
    """Epochs 5, 12, 18, 21 and 23 of a line; the warm-up from the rate of 256 images; half a batch at the end."""
    a, b, c, d, e = knots
    rows = ((5, batch, peak * 256 / batch, peak), (7, batch, peak, a), (6, batch, a, b), (3, batch, b, c))
    return lines(*rows, (2, batch // 2, d, e))


def cifar(*rows: tuple[int, int, float, float]) -> Rates:
    return lines(*rows, images=50_000)


def swept(peak: float = 0.2, warmup: int = 2, batch: int = 128) -> Rates:
    up = [(warmup, batch, peak / 10, peak)] if warmup else []
    return cifar(*up, (10 - warmup, batch, peak, 0.0))


HOURS = {"": goyal(8192, "gradual"), "_constant": goyal(8192, "constant"), "_cold": goyal(8192), "_256": goyal(256)}
REFERENCE: dict[str, dict[str, Rates]] = {
    "quickstart": {"quickstart, 1": lines(
        (2, 32, 0.005, 0.05), (4, 64, 0.1, 0.05), (3, 64, 0.05, 0.0), images=4000)},
    "cifar10": {"cifar10, 1": cifar((2, 64, 0.02, 0.2), (5, 128, 0.2, 0.08), (3, 128, 0.08, 0.0))},
    "resnet50_18min": {
        "resnet50_18min, 1": imagenet18(
            [(0, 512), (13, 224), (25, 128)],
            [(0, 7, 1.0, 2.0), (7, 13, 2.0, 0.25), (13, 22, 0.4375, 0.04375), (22, 25, 0.04375, 0.004375),
             (25, 28, 0.0025, 0.00025)], 1),
        "resnet50_18min, 2": imagenet18(
            [(0, 256), (6, 512), (13, 224), (28, 128)],
            [(0, 6, 1.5, 3.0), (6, 11, 3.0, 3.0), (11, 13, 3.0, 1.5), (13, 16, 1.3125, 1.3125),
             (16, 23, 1.3125, 0.13125), (23, 28, 0.13125, 0.013125), (28, 30, 0.0075, 0.00075)], 2),
        "resnet50_18min, 4": imagenet18(
            [(0, 256), (6, 512), (13, 224), (28, 128)],
            [(0, 6, 2.0, 4.0), (6, 11, 4.0, 4.0), (11, 13, 4.0, 2.0), (13, 16, 1.75, 1.75), (16, 24, 1.75, 0.175),
             (24, 28, 0.175, 0.0175), (28, 30, 0.01, 0.001)], 4),
        "resnet50_18min, 8": imagenet18(
            [(0, 128), (6, 256), (14, 128), (17, 224), (29, 128)],
            [(0, 6, 1.92, 3.84), (6, 11, 3.84, 3.84), (11, 14, 3.84, 1.92), (14, 17, 1.92, 1.92),
             (17, 23, 1.92, 0.336), (23, 29, 0.336, 0.0336), (29, 36, 0.0192, 0.00192)], 8),
        "resnet50_18min, 16": imagenet18(
            [(0, 64), (6, 128), (16, 64), (19, 192), (37, 128)],
            [(0, 6, 1.88, 3.76), (6, 16, 3.76, 3.76), (16, 19, 1.88, 1.88), (19, 31, 0.564, 0.564),
             (31, 37, 0.0564, 0.0564), (37, 38, 0.0376, 0.0376), (38, 50, 0.00376, 0.00376)], 16),
    },
    "resnet50_3hours": {"resnet50_3hours, 1": three_hours()},
    "resnet50_1hour": {
        "resnet50_1hour, 32": HOURS[""], "resnet50_1hour_constant, 32": HOURS["_constant"],
        "resnet50_1hour_cold, 32": HOURS["_cold"], "resnet50_1hour_plain, 32": HOURS[""],
        "resnet50_1hour_256, 1": HOURS["_256"], "resnet101_1hour, 32": HOURS[""], "resnet101_1hour_256, 1":
        HOURS["_256"],
    },
    "resnet152_mxnet": {
        "resnet152_mxnet_256, 1": mxnet(256, 0.1, (30, 60, 90)),
        "resnet152_mxnet_2560, 10": mxnet(2560, 0.5, (30, 60, 90)),
        "resnet152_mxnet_5120, 20": mxnet(5120, 1.0, (40, 70, 100)),
    },
    "resnet50_lars": {
        "resnet50_lars_32k, 128": poly(0, 34, 32_768, 12, 90), "resnet50_lars_64k, 256": poly(0, 41, 65_536, 16, 90),
        "alexnet_lars_32k, 128": poly(1, 32, 32_768, 10, 100), "alexnet_lars_64k, 128": poly(1, 45.25, 65_536, 10, 95),
    },
    "resnet50_2026": {
        "resnet50_2026, 1": ours_2026(2048, 1.2, 0.7334, 0.3334, 0.1334, 0.0667, 0.00005),
        "resnet50_2026, 2": ours_2026(4096, 2.4, 1.4667, 0.6668, 0.2668, 0.1334, 0.0001),
        "resnet50_2026, 4": ours_2026(8192, 4.0, 2.4446, 1.1114, 0.4447, 0.2224, 0.00017),
        "resnet50_2026, 8": ours_2026(8192, 4.0, 2.4446, 1.1114, 0.4447, 0.2224, 0.00017),
        "resnet50_2026_lars, 16": lines(
            (13, 32_768, 0.0, 23.2143), (1, 32_768, 23.2143, 25.0), (10, 32_768, 25.0, 7.2857),
            (3, 32_768, 7.2857, 1.9714), (1, 16_384, 0.9857, 0.1)),
    },
    "finetune": {"finetune, 1": np.concatenate([
        one_cycle(0.05, steps(2, 64, 5000)), one_cycle(0.01, steps(6, 64, 5000))])},
    "sweeps": {
        **{f"rate_{peak}, 1": swept(peak) for peak in (0.05, 0.1, 0.2, 0.4, 0.8)},
        **{f"warmup_{warmup}, 1": swept(0.8, warmup) for warmup in (0, 1, 2, 4)},
        **{f"trust_{trust}, 1": swept(10.0, 2, 1024) for trust in (0.0005, 0.001, 0.002, 0.004)},
        **{f"batch_{batch}, 1": swept(0.2 * batch / 128, 2, batch) for batch in (64, 128, 256, 512)},
    },
}  # fmt: skip


# --- the recipes -------------------------------------------------------------------------------------------------


@cache
def planned(file: str) -> dict[str, Schedule]:
    """The schedules of all recipes of a file, at each number of machines that has a table, on the nominal GPUs."""
    found = {}
    for recipe in read_recipes(str(ROOT / "recipes" / f"{file}.py")):
        for machines in recipe.tables or (recipe.machines,):
            one = recipe.for_machines(machines)
            found[f"{recipe.name}, {machines}"] = Schedule(one, one.data.train, one.nominal_gpus)
    return found


def key(schedule: Schedule) -> Any:
    return schedule.recipe.phases, schedule.gpus, schedule.images


_KNOWN: dict[Any, Rates] = {}  # several recipes share a schedule


def rates(schedule: Schedule) -> Rates:
    """The rate of every step, by going through them all."""
    if key(schedule) not in _KNOWN:
        found = [epoch.lr_at(step) for epoch in schedule.epochs for step in range(epoch.steps)]
        _KNOWN[key(schedule)] = np.array(found)
    return _KNOWN[key(schedule)]


def golden(schedule: Schedule) -> dict[str, Any]:
    """What is stored of a schedule."""
    every, rows = rates(schedule), schedule.scheduled_phases
    exact = not any(phase.shape in ("cosine", "one_cycle") for phase in schedule.recipe.phases)
    packed = struct.pack(f"<{len(every)}d", *every.tolist())
    return {
        "images": schedule.images,
        "gpus": schedule.gpus,
        "steps": schedule.steps,
        "phases": [[*row.phase.epochs, row.steps, row.global_batch, *row.scaled_lr_endpoints] for row in rows],
        "every": every[::EVERY].tolist(),
        "sha256": hashlib.sha256(packed).hexdigest() if exact else None,
    }


def stored(file: str) -> dict[str, Any]:
    """The tables of a file's recipes."""
    found: dict[str, Any] = json.loads((GOLDEN / f"{file}.json").read_text())
    return found


def same(one: Any, other: Any) -> bool:
    """Whether lists of numbers are the same to twelve digits."""
    return bool(np.allclose(np.hstack(one), np.hstack(other), rtol=1e-12, atol=1e-15))


TABLES = [(file, name) for file in FILES for name in REFERENCE.get(file, {})]


def test_every_recipe_has_its_formula_and_its_table() -> None:
    for file in FILES:
        assert planned(file).keys() == REFERENCE[file].keys() == stored(file).keys()
    assert sorted(path.stem for path in GOLDEN.iterdir()) == FILES


def agrees(schedule: Schedule, reference: Rates) -> bool:
    """Whether the rates of all steps are those of the formula, to twelve digits."""
    mine = rates(schedule)
    return mine.shape == reference.shape and bool(np.allclose(mine, reference, rtol=1e-12, atol=1e-15))


@pytest.mark.parametrize(("file", "name"), TABLES, ids=[name for _, name in TABLES])
def test_the_rate_of_every_step_is_that_of_the_papers_formula(file: str, name: str) -> None:
    assert agrees(planned(file)[name], REFERENCE[file][name])


@pytest.mark.parametrize(("file", "name"), TABLES, ids=[name for _, name in TABLES])
def test_the_rate_of_every_step_is_that_of_the_stored_table(file: str, name: str) -> None:
    found, kept = golden(planned(file)[name]), stored(file)[name]
    for part in ("phases", "every") if kept["sha256"] is None else ():
        assert same(found.pop(part), kept.pop(part))
    assert found == kept


def changed(recipe: Recipe, row: int) -> Schedule:
    """The schedule with one rate of a row a millionth larger."""
    phase = recipe.phases[row]
    first, last = phase.lr_endpoints
    rate: Any = last * 1.000001 if isinstance(phase.lr, float | int) else (first * 1.000001, last * 1.000001)
    phases: list[Phase] = [*recipe.phases]
    phases[row] = replace(phase, lr=rate)
    one = replace(recipe, phases=phases, tables={})
    return Schedule(one, one.data.train, one.nominal_gpus)


@pytest.mark.parametrize("file", ["resnet50_3hours", "resnet50_lars", "resnet50_2026", "finetune", "quickstart"])
def test_a_rate_that_is_changed_by_a_millionth_is_found_by_both(file: str) -> None:
    name, schedule = next(iter(planned(file).items()))
    kept = stored(file)[name]
    for row in range(len(schedule.recipe.phases)):
        other = changed(schedule.recipe, row)
        assert not agrees(other, REFERENCE[file][name])
        found = golden(other)
        assert found["sha256"] != kept["sha256"] or not same(found["phases"], kept["phases"])


def write() -> None:
    """Store the tables of all recipes. Raises `SystemExit` where a formula says otherwise."""
    GOLDEN.mkdir(exist_ok=True)
    for file in FILES:
        for name, schedule in planned(file).items():
            if not agrees(schedule, REFERENCE[file][name]):
                raise SystemExit(f"{name}: the recipe and the formula differ")
        tables = {name: golden(schedule) for name, schedule in planned(file).items()}
        (GOLDEN / f"{file}.json").write_text(json.dumps(tables, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write()
