"""What a launch would do, worked out without starting anything."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.recipe import SAMPLE, Recipe
from train.recipe_file import RecipeError, load
from train.schedule import Schedule

from .errors import BadInput
from .hosts_file import Hosts, read_hosts
from .machine import gpu_count
from .spec import Spec

if TYPE_CHECKING:
    from .backends.aws.planning import Renting


@dataclass(frozen=True)
class Plan:
    """What a launch would do: the Spec but for its name, the schedule, and the lines that a person should read."""

    spec: Spec
    schedule: Schedule
    notes: tuple[str, ...]
    renting: "Renting | None" = None  # what it would rent


def plan(
    recipe: Recipe,
    *,
    recipe_file: str = "",
    backend: str = "local",
    machines: int | None = None,
    procs: int | None = None,
    data: str | Path | None = None,
    copies: str | Path | None = None,
    keep_batch: bool = False,
    max_steps: int | None = None,
    max_hours: float | None = None,
    scale: float = 1.0,
    save_seconds: float = 30.0,
    skip_bad: bool = False,
    workers: int | None = None,
    seed: int | None = None,
    spares: int = 0,
    min_machines: int = 1,
    lost_seconds: float = 5.0,
    stall_seconds: float = 120.0,
    standby: bool | None = None,
    hosts: str | Path | None = None,
    probe: bool = True,
    log_ids: bool = False,
    exact: bool = False,
    rent: Mapping[str, Any] | None = None,
) -> Plan:
    """Work a launch out without starting anything; `hosts` is the file of the machines to take, `rent` what to ask of
    AWS (planning.Asked). Raises `BadInput`, `ClusterError`.
    """
    found = read_hosts(Path(hosts).expanduser()) if hosts else None
    if found:
        backend = "hosts"
        machines = machines or max(1, len(found.machines) - spares)
    recipe = recipe.at(machines or 1) if backend == "local" else recipe.at(machines or recipe.machines)
    draw = str(data) == "sample" or (data is None and recipe.data == SAMPLE)
    try:
        recipe = recipe if seed is None else replace(recipe, seed=seed)
        if draw:
            recipe = replace(recipe, data=SAMPLE)
        elif data is not None:
            name = Path(data).absolute().name or "data"
            recipe = replace(recipe, data=replace(recipe.data, name=name, root=str(data)))
    except ValueError as error:
        raise BadInput(str(error)) from error
    given = Path(recipe.data.root if data is None or draw else data)
    kind: Any = None
    if backend == "aws":
        from .backends.aws import planning

        asked = planning.Asked(**(rent or {}))
        types, gone, kind = planning.first_type(recipe.types, asked)
        root, procs = planning.data_root(given), procs or max(1, kind.gpus)
        max_hours = planning.MAX_HOURS if max_hours is None else max_hours
    else:
        root = given.expanduser().absolute() if not found else _there(given, draw, found)
    beside = Path(copies).expanduser().absolute() if copies else root.with_name(root.name + "-sz")
    machines = machines or (1 if backend == "local" else recipe.machines)
    if min_machines > machines:
        raise BadInput(f"--min-machines {min_machines} is more than the {machines} machines of the job")
    procs = procs or (max(1, gpu_count() // (machines + spares)) if backend == "local" else recipe.gpus)
    gpus = recipe.nominal_gpus if keep_batch else machines * procs
    there = 0 if draw else count_images(root / "train")  # the built-in set may just be being drawn
    images = max(1, -int(-(there or recipe.data.train) * scale // 1))
    try:
        schedule = Schedule(recipe, images, gpus, max_steps)
    except ValueError as error:
        raise BadInput(str(error)) from error
    spec = Spec(
        name="", recipe=recipe, recipe_file=recipe_file, data=str(root), copies=str(beside), draw=draw, backend=backend,
        machines=machines, procs=procs, gpus=gpus, max_steps=max_steps, max_hours=max_hours, scale=scale,
        save_seconds=save_seconds, skip_bad=skip_bad, workers=workers, spares=spares, min_machines=min_machines,
        lost_seconds=lost_seconds, stall_seconds=stall_seconds, log_ids=log_ids, exact=exact, probe=probe,
        hosts=found.to_json() if found else None,
        standby=machines + spares > 1 if standby is None else standby,
    )  # fmt: skip
    notes = [schedule.note] if schedule.note else []
    largest = max(row.global_batch for row in schedule.rows)
    if largest > images:
        notes.append(f"a step takes all {images} images there are, not the global batch of {largest}")
    if gpus != machines * procs:
        notes.append(f"{machines * procs} processes share the work of {gpus} GPUs: gradients are accumulated")
    if kind is None:
        return Plan(spec, schedule, tuple(notes))
    renting = planning.rent(spec, schedule, types, gone, kind, asked)
    return Plan(planning.with_wish(spec, renting), schedule, (*notes, *renting.notes), renting)


def _there(given: Path, draw: bool, hosts: Hosts) -> Path:
    """Return the folder of the images on machines elsewhere. Raises `BadInput` when it is relative: to what?"""
    if draw and hosts.shared:
        return Path(hosts.shared) / given
    if draw:
        return Path("~/.imgnet") / given
    if not given.is_absolute() and given.parts[0] != "~":
        raise BadInput(
            f"{given}: the images are on the machines; say where, as an absolute path: --data /data/imagenet"
        )
    return given


def count_images(folder: Path) -> int:
    """Return the number of files in the class folders, 0 when the folder is not there."""
    with contextlib.suppress(OSError):
        return sum(
            1 for one in os.scandir(folder) if one.is_dir() for file in os.scandir(one) if not file.name.startswith(".")
        )
    return 0


def load_recipes(name: str) -> list[Recipe]:
    """Return the recipes of a file. Raises `BadInput` with one line."""
    try:
        return load(name)
    except RecipeError as error:
        raise BadInput(str(error)) from error
