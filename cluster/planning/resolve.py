"""Turns a recipe and the launch options into a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.backends.aws.options import AwsOptions
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

from . import data_fetch
from .data_fetch import count_splits
from .launch_options import LaunchOptions
from .local_forecast import forecast_local
from .plan import Plan


def plan(
    recipe: Recipe,
    options: LaunchOptions | None = None,
    *,
    recipe_file: str = "",
    offline: bool = False,
    constants: Constants | None = None,
) -> Plan:
    """Plan a launch without starting anything.

    With `offline`, AWS is not asked for prices. `constants` were measured by another job on this computer, for the
    forecast of the backend "local".

    Raises `BadInput` for options that do not fit together or to the recipe, `ClusterError` for all else.
    """
    options = options or LaunchOptions()
    backend, machines, procs, data = options.backend, options.machines, options.procs, options.data
    max_hours, spares = options.max_hours, options.recovery.spares
    hosts_file = read_hosts(Path(options.hosts).expanduser()) if options.hosts else None
    if hosts_file:
        backend = "ssh"
        machines = machines or max(1, len(hosts_file.machines) - spares)
    is_local = backend == "local"
    recipe = recipe.for_machines(machines or (1 if is_local else recipe.machines))
    is_synthetic = data == "sample" or (data is None and recipe.data == SAMPLE)
    try:
        if options.train.seed is not None:
            recipe = replace(recipe, seed=options.train.seed)
        if is_synthetic:
            recipe = replace(recipe, data=SAMPLE)
        elif data is not None:
            name = Path(data).absolute().name or "data"
            recipe = replace(recipe, data=replace(recipe.data, name=name, root=data))
    except ValueError as error:
        raise BadInput(str(error)) from error
    requested_root = Path(recipe.data.root if data is None or is_synthetic else data)
    is_s3_data = not is_synthetic and data_fetch.is_s3(recipe.data.root)

    instance_type: Any = None  # an InstanceType of infra, which only the AWS backend may import
    if backend == "aws":
        from cluster.backends.aws import plan as aws_plan

        rental = aws_plan.RentalRequest(options.backend_options or AwsOptions(), offline)
        type_names, type_notes, instance_type = aws_plan.choose_instance_types(recipe.types, rental)
        root = aws_plan.data_root(requested_root)
        procs = procs or max(1, instance_type.gpus)
        max_hours = aws_plan.DEFAULT_MAX_HOURS if max_hours is None else max_hours
    elif hosts_file and not is_s3_data:
        root = _remote_data_root(requested_root, is_synthetic, hosts_file)
    else:
        root = requested_root.expanduser().absolute()
    if options.train.copies and not is_s3_data:
        copies_root = Path(options.train.copies).expanduser().absolute()
    else:
        copies_root = root.with_name(root.name + "-sz")

    remote_dataset = None
    if is_s3_data or options.fetch:
        if is_synthetic:
            raise BadInput(
                "--fetch does not work with the built-in data set (sample), which is generated where it is read"
            )
        source = recipe.data.root if is_s3_data else str(root)
        remote_dataset = data_fetch.RemoteDataset.resolve(
            source, recipe, options.train.copies, options.fetch or "", backend, offline
        )
        root = remote_dataset.target
        copies_root = root.with_name(root.name + "-sz")

    machines = machines or (1 if is_local else recipe.machines)
    if options.recovery.min_machines > machines:
        raise BadInput(
            f"--min-machines {options.recovery.min_machines} is more than the {machines} machines of the job"
        )
    if not procs:
        procs = max(1, visible_gpu_count() // (machines + spares)) if is_local else recipe.gpus
    schedule_gpus = recipe.nominal_gpus if options.train.keep_batch else machines * procs
    if remote_dataset:
        train_images, val_images = remote_dataset.image_counts
    else:  # a synthetic set may be incomplete: another job may be generating it right now
        train_images, val_images = (0, 0) if is_synthetic else count_splits(root)
    counted_data = replace(recipe.data, train=train_images or recipe.data.train, val=val_images or recipe.data.val)
    recipe = replace(recipe, data=counted_data)
    image_count = scaled_image_count(recipe.data.train, options.train.scale)
    try:
        schedule = Schedule(recipe, image_count, schedule_gpus, options.train.max_steps)
    except ValueError as error:
        raise BadInput(str(error)) from error
    standby = machines + spares > 1 if options.recovery.standby is None else options.recovery.standby
    spec = JobSpec(
        name="",
        recipe=recipe,
        recipe_file=recipe_file,
        train=replace(options.train, data=str(root), copies=str(copies_root), gpus=schedule_gpus),
        recovery=replace(options.recovery, standby=standby),
        data_source=remote_dataset.source if remote_dataset else "",
        copies_source=remote_dataset.copies_source if remote_dataset else "",
        generate_data=is_synthetic,
        backend=backend,
        hosts=hosts_file.to_json() if hosts_file else None,
        machines=machines,
        procs=procs,
        max_hours=max_hours,
    )

    notes = []
    if remote_dataset:
        notes.append(remote_dataset.describe(recipe))
    if schedule.scaling_note:
        notes.append(schedule.scaling_note)
    if data is not None and not is_synthetic and not train_images and backend == "plan":
        notes.append(f"{root}: contains no images; the plan uses the recipe's image counts")
    if options.train.exact and recipe.comm.hook != "none":
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
        spec = replace(spec, forecast=local_forecast.to_json() if local_forecast else None)
        return Plan(spec, schedule, tuple(notes))
    if rental.account and is_s3_data:
        from cluster.backends.aws.s3_source import machine_role_problems

        notes += machine_role_problems(recipe.data.root, rental.account)
    rental_plan = aws_plan.plan_rental(spec, schedule, type_names, type_notes, instance_type, rental)
    return Plan(aws_plan.with_rental(spec, rental_plan), schedule, (*notes, *rental_plan.notes), rental_plan)


def gpu_mismatch_note(processes: int, gpus: int) -> str:
    """Return a note on how `processes` execute the schedule of another number of GPUs."""
    schedule_text = f"the schedule is for {gpus} GPU{'s' if gpus != 1 else ''}"
    if processes < gpus:
        return f"{schedule_text}: each of {processes} process{'es' if processes != 1 else ''} accumulates gradients"
    return f"{schedule_text}: {processes - gpus} of {processes} processes are idle"


def _remote_data_root(path: Path, is_synthetic: bool, hosts: Hosts) -> Path:
    """Return the data folder on the machines of a hosts file.

    Raises `BadInput` for a relative path, except for the synthetic set, which is in the shared folder or ~/.imgnet.
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
