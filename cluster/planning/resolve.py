"""Turns a recipe and the launch options into a plan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.connectors.local import PROJECT_ROOT, visible_gpu_count
from cluster.errors import BadInput
from cluster.machines import requirements
from cluster.state.spec import JobSpec
from train.forecast import Constants
from train.recipe.components import SAMPLE
from train.recipe.files import RecipeError, read_recipes
from train.recipe.schedule import Schedule, scaled_image_count
from train.recipe.schema import Recipe
from train.recipe.target import Target

from . import data_fetch
from .data_fetch import count_splits
from .local_forecast import forecast_local

if TYPE_CHECKING:
    pass
from .plan import Plan


def plan(
    recipe: Recipe,
    *,
    recipe_file: str = "",
    backend: str = "local",
    machines: int | None = None,
    procs: int | None = None,
    data: str | Path | None = None,
    copies: str | Path | None = None,
    fetch: str | Path | None = None,
    keep_batch: bool = False,
    max_steps: int | None = None,
    max_hours: float | None = None,
    scale: float = 1.0,
    target: str | None = None,
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
    rental_options: Mapping[str, Any] | None = None,
    constants: Constants | None = None,
) -> Plan:
    """Work a launch out without starting anything; `hosts` is the file of the machines to take, `rent` what to ask of
    AWS (planning.Asked), `target` where training ends, such as top5=93, `fetch` the folder to which each machine brings
    a packed set first, `constants` what another job measured here, for the forecast.

    Raises `BadInput`, `ClusterError`.
    """
    found = read_hosts(Path(hosts).expanduser()) if hosts else None
    if found:
        backend = "ssh"
        machines = machines or max(1, len(found.machines) - spares)
    recipe = (
        recipe.for_machines(machines or 1) if backend == "local" else recipe.for_machines(machines or recipe.machines)
    )
    draw = str(data) == "sample" or (data is None and recipe.data == SAMPLE)
    try:
        recipe = recipe if seed is None else replace(recipe, seed=seed)
        goal = None if target is None else Target.parse(target)
        if draw:
            recipe = replace(recipe, data=SAMPLE)
        elif data is not None:
            name = Path(data).absolute().name or "data"
            recipe = replace(recipe, data=replace(recipe.data, name=name, root=str(data)))
    except ValueError as error:
        raise BadInput(str(error)) from error
    given, s3 = (
        Path(recipe.data.root if data is None or draw else data),
        not draw and data_fetch.is_s3(recipe.data.root),
    )
    kind: Any = None
    if backend == "aws":
        from cluster.backends.aws import plan as aws_plan

        asked = aws_plan.RentalOptions(**(rental_options or {}))
        types, gone, kind = aws_plan.choose_instance_types(recipe.types, asked)
        root, procs = aws_plan.data_root(given), procs or max(1, kind.gpus)
        max_hours = aws_plan.DEFAULT_MAX_HOURS if max_hours is None else max_hours
    else:
        root = given.expanduser().absolute() if not found or s3 else _remote_data_root(given, draw, found)
    beside = Path(copies).expanduser().absolute() if copies and not s3 else root.with_name(root.name + "-sz")
    away = None
    if s3 or fetch:
        if draw:
            raise BadInput("--fetch: the built-in set is drawn where it is read; there is nothing to fetch")
        where, offline = recipe.data.root if s3 else str(root), bool((rental_options or {}).get("offline"))
        away = data_fetch.RemoteDataset.resolve(where, recipe, str(copies or ""), str(fetch or ""), backend, offline)
        root, beside = away.target, away.target.with_name(away.target.name + "-sz")
    machines = machines or (1 if backend == "local" else recipe.machines)
    if min_machines > machines:
        raise BadInput(f"--min-machines {min_machines} is more than the {machines} machines of the job")
    procs = procs or (max(1, visible_gpu_count() // (machines + spares)) if backend == "local" else recipe.gpus)
    gpus = recipe.nominal_gpus if keep_batch else machines * procs
    there, val = away.image_counts if away else (0, 0) if draw else count_splits(root)  # it may just be being drawn
    counts = replace(recipe.data, train=there or recipe.data.train, val=val or recipe.data.val)
    recipe = replace(recipe, data=counts)
    images = scaled_image_count(recipe.data.train, scale)
    try:
        schedule = Schedule(recipe, images, gpus, max_steps)
    except ValueError as error:
        raise BadInput(str(error)) from error
    spec = JobSpec(
        name="", recipe=recipe, recipe_file=recipe_file, data=str(root), copies=str(beside), generate_data=draw, backend=backend,
        data_source=away.source if away else "", copies_source=away.copies_source if away else "",
        machines=machines, procs=procs, schedule_gpus=gpus, max_steps=max_steps, max_hours=max_hours, scale=scale,
        target=str(goal or ""), save_seconds=save_seconds, skip_bad=skip_bad, workers=workers, spares=spares,
        min_machines=min_machines, lost_seconds=lost_seconds, stall_seconds=stall_seconds, log_ids=log_ids, exact=exact,
        probe=probe, hosts=found.to_json() if found else None,
        standby=machines + spares > 1 if standby is None else standby,
    )  # fmt: skip
    notes = [*([away.describe(recipe)] if away else []), *([schedule.scaling_note] if schedule.scaling_note else [])]
    if data is not None and not draw and not there and backend == "plan":
        notes.append(f"{root}: no images are there; these are the recipe's numbers of them")
    if exact and recipe.comm.hook != "none":
        raise BadInput(f"--exact: comm {recipe.comm.hook} rounds as it likes; take comm='none'")
    notes += (
        requirements.missing_requirements(recipe)
        if backend in ("local", "plan")
        else requirements.requirements_not_sent(recipe, PROJECT_ROOT)
    )
    if recipe.model.compile:
        notes.append("compile: minutes for each shape before the first step, which no forecast knows")
    largest = max(row.global_batch for row in schedule.scheduled_phases)
    if largest > images:
        notes.append(f"a step takes all {images} images there are, not the global batch of {largest}")
    if gpus != machines * procs:
        notes.append(gpu_mismatch_note(machines * procs, gpus))
    if kind and asked.account and s3:
        from cluster.backends.aws.s3_source import machine_role_problems

        notes += machine_role_problems(recipe.data.root, asked.account)
    if kind is None:
        told = forecast_local(Plan(spec, schedule, ()), constants) if backend == "local" else None
        return Plan(replace(spec, forecast=told.to_json() if told else None), schedule, tuple(notes))
    renting = aws_plan.plan_rental(spec, schedule, types, gone, kind, asked)
    return Plan(aws_plan.with_rental(spec, renting), schedule, (*notes, *renting.notes), renting)


def gpu_mismatch_note(processes: int, gpus: int) -> str:
    """Return how processes carry out the schedule of another number of GPUs."""
    work = f"the schedule is that of {gpus} GPU{'s' * (gpus != 1)}"
    if processes < gpus:
        return f"{work}: each of {processes} process{'es' * (processes != 1)} accumulates gradients"
    return f"{work}: of {processes} processes {processes - gpus} find nothing to do in a step"


def _remote_data_root(path: Path, is_synthetic: bool, hosts: Hosts) -> Path:
    """Return the folder of the images on machines elsewhere. Raises `BadInput` when it is relative: to what?"""
    if is_synthetic and hosts.shared:
        return Path(hosts.shared) / path
    if is_synthetic:
        return Path("~/.imgnet") / path
    if not path.is_absolute() and path.parts[0] != "~":
        raise BadInput(f"{path}: the images are on the machines; say where, as an absolute path: --data /data/imagenet")
    return path


def load_recipes(name: str) -> list[Recipe]:
    """Return the recipes of a file. Raises `BadInput` with one line."""
    try:
        return read_recipes(name)
    except RecipeError as error:
        raise BadInput(str(error)) from error
