"""Turns a recipe and the launch options into a plan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from train.tools.records import encode

from . import data_fetch
from .data_fetch import count_splits
from .local_forecast import forecast_local
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
    """Plan a launch without starting anything.

    The parameters are the options of `imgnet-cluster launch` (None: the default), with these additions:
      backend         "local", "ssh" or "aws"; "plan" is for a plan on machines that nothing is known about
      hosts           the hosts file; it makes the backend "ssh"
      rental_options  the fields of `RentalOptions` for the backend "aws"
      constants       measured by another job on this computer, for the forecast of the backend "local"

    Raises `BadInput` for options that do not fit together or to the recipe, `ClusterError` for all else.
    """
    hosts_file = read_hosts(Path(hosts).expanduser()) if hosts else None
    if hosts_file:
        backend = "ssh"
        machines = machines or max(1, len(hosts_file.machines) - spares)
    is_local = backend == "local"
    recipe = recipe.for_machines(machines or (1 if is_local else recipe.machines))
    is_synthetic = str(data) == "sample" or (data is None and recipe.data == SAMPLE)
    try:
        if seed is not None:
            recipe = replace(recipe, seed=seed)
        parsed_target = None if target is None else Target.parse(target)
        if is_synthetic:
            recipe = replace(recipe, data=SAMPLE)
        elif data is not None:
            name = Path(data).absolute().name or "data"
            recipe = replace(recipe, data=replace(recipe.data, name=name, root=str(data)))
    except ValueError as error:
        raise BadInput(str(error)) from error
    requested_root = Path(recipe.data.root if data is None or is_synthetic else data)
    is_s3_data = not is_synthetic and data_fetch.is_s3(recipe.data.root)

    instance_type: Any = None  # an InstanceType of infra, which only the AWS backend may import
    if backend == "aws":
        from cluster.backends.aws import plan as aws_plan

        aws_options = aws_plan.RentalOptions(**(rental_options or {}))
        type_names, type_notes, instance_type = aws_plan.choose_instance_types(recipe.types, aws_options)
        root = aws_plan.data_root(requested_root)
        procs = procs or max(1, instance_type.gpus)
        max_hours = aws_plan.DEFAULT_MAX_HOURS if max_hours is None else max_hours
    elif hosts_file and not is_s3_data:
        root = _remote_data_root(requested_root, is_synthetic, hosts_file)
    else:
        root = requested_root.expanduser().absolute()
    if copies and not is_s3_data:
        copies_root = Path(copies).expanduser().absolute()
    else:
        copies_root = root.with_name(root.name + "-sz")

    remote_dataset = None
    if is_s3_data or fetch:
        if is_synthetic:
            raise BadInput(
                "--fetch does not work with the built-in data set (sample), which is generated where it is read"
            )
        source = recipe.data.root if is_s3_data else str(root)
        offline = bool((rental_options or {}).get("offline"))
        remote_dataset = data_fetch.RemoteDataset.resolve(
            source, recipe, str(copies or ""), str(fetch or ""), backend, offline
        )
        root = remote_dataset.target
        copies_root = root.with_name(root.name + "-sz")

    machines = machines or (1 if is_local else recipe.machines)
    if min_machines > machines:
        raise BadInput(f"--min-machines {min_machines} is more than the {machines} machines of the job")
    if not procs:
        procs = max(1, visible_gpu_count() // (machines + spares)) if is_local else recipe.gpus
    schedule_gpus = recipe.nominal_gpus if keep_batch else machines * procs
    if remote_dataset:
        train_images, val_images = remote_dataset.image_counts
    else:  # a synthetic set may be incomplete: another job may be generating it right now
        train_images, val_images = (0, 0) if is_synthetic else count_splits(root)
    counted_data = replace(recipe.data, train=train_images or recipe.data.train, val=val_images or recipe.data.val)
    recipe = replace(recipe, data=counted_data)
    image_count = scaled_image_count(recipe.data.train, scale)
    try:
        schedule = Schedule(recipe, image_count, schedule_gpus, max_steps)
    except ValueError as error:
        raise BadInput(str(error)) from error
    spec = JobSpec(
        name="",
        recipe=recipe,
        recipe_file=recipe_file,
        data=str(root),
        copies=str(copies_root),
        data_source=remote_dataset.source if remote_dataset else "",
        copies_source=remote_dataset.copies_source if remote_dataset else "",
        generate_data=is_synthetic,
        backend=backend,
        hosts=hosts_file.to_json() if hosts_file else None,
        machines=machines,
        spares=spares,
        min_machines=min_machines,
        procs=procs,
        schedule_gpus=schedule_gpus,
        max_steps=max_steps,
        max_hours=max_hours,
        scale=scale,
        target=str(parsed_target or ""),
        save_seconds=save_seconds,
        lost_seconds=lost_seconds,
        stall_seconds=stall_seconds,
        standby=machines + spares > 1 if standby is None else standby,
        probe=probe,
        skip_bad=skip_bad,
        workers=workers,
        log_ids=log_ids,
        exact=exact,
    )

    notes = []
    if remote_dataset:
        notes.append(remote_dataset.describe(recipe))
    if schedule.scaling_note:
        notes.append(schedule.scaling_note)
    if data is not None and not is_synthetic and not train_images and backend == "plan":
        notes.append(f"{root}: contains no images; the plan uses the recipe's image counts")
    if exact and recipe.comm.hook != "none":
        raise BadInput(f"--exact does not work with the comm hook {recipe.comm.hook}, which rounds; set comm='none'")
    if backend in ("local", "plan"):
        notes += requirements.missing_requirements(recipe)
    else:
        notes += requirements.requirements_not_sent(recipe, PROJECT_ROOT)
    if recipe.model.compile:
        notes.append("compile takes minutes for each shape before the first step; no forecast includes them")
    largest_batch = max(phase.global_batch for phase in schedule.scheduled_phases)
    if largest_batch > image_count:
        notes.append(f"a step takes all {image_count} images of the data set, not the global batch of {largest_batch}")
    if schedule_gpus != machines * procs:
        notes.append(gpu_mismatch_note(machines * procs, schedule_gpus))

    if instance_type is None:
        if not is_local:
            return Plan(spec, schedule, tuple(notes))
        local_forecast = forecast_local(Plan(spec, schedule, ()), constants)
        spec = replace(spec, forecast=encode(local_forecast.to_record()) if local_forecast else None)
        return Plan(spec, schedule, tuple(notes))
    if aws_options.account and is_s3_data:
        from cluster.backends.aws.s3_source import machine_role_problems

        notes += machine_role_problems(recipe.data.root, aws_options.account)
    rental_plan = aws_plan.plan_rental(spec, schedule, type_names, type_notes, instance_type, aws_options)
    return Plan(aws_plan.with_rental(spec, rental_plan), schedule, (*notes, *rental_plan.notes), rental_plan)


def gpu_mismatch_note(processes: int, gpus: int) -> str:
    """Return a note on how `processes` execute the schedule of another number of GPUs."""
    schedule_text = f"the schedule is for {gpus} GPU{'s' if gpus != 1 else ''}"
    if processes < gpus:
        return f"{schedule_text}: each of {processes} process{'es' if processes != 1 else ''} accumulates gradients"
    return f"{schedule_text}: {processes - gpus} of {processes} processes are idle"


def _remote_data_root(path: Path, is_synthetic: bool, hosts: Hosts) -> Path:
    """Return the data folder on the machines of a hosts file.

    Raises `BadInput` for a relative path, except that of the synthetic set, which goes to a folder of ours.
    """
    if is_synthetic and hosts.shared:
        return Path(hosts.shared) / path
    if is_synthetic:
        return Path("~/.imgnet") / path
    if not path.is_absolute() and path.parts[0] != "~":
        raise BadInput(
            f"--data {path}: the images are on the machines; give their absolute path there, such as /data/imagenet"
        )
    return path


def load_recipes(name: str) -> list[Recipe]:
    """Return the recipes of a file. Raises `BadInput` with a one-line message."""
    try:
        return read_recipes(name)
    except RecipeError as error:
        raise BadInput(str(error)) from error
