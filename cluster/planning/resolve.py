"""Turns a recipe and the launch options into a plan."""

from dataclasses import replace
from pathlib import Path

from cluster.backends import registry
from cluster.backends.planner import MachineRequest
from cluster.errors import BadInput
from cluster.state.spec import MAX_MACHINES, JobSpec
from train.forecast import Constants
from train.recipe.components import SAMPLE
from train.recipe.files import RecipeError, read_recipes
from train.recipe.schedule import Schedule, scaled_image_count
from train.recipe.schema import Recipe

from . import data_fetch
from .data_fetch import count_splits
from .launch_options import LaunchOptions, make_launch_options
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

    With `offline`, nobody is asked for prices. `constants` were measured by another job on this computer, for the
    forecast of a job on it.

    Raises `BadInput` for options that do not fit together or to the recipe, `ClusterError` for all else.
    """
    options = options or make_launch_options()
    data = options.data
    planner = registry.open_planner(
        options.backend,
        MachineRequest(
            recipe=recipe,
            options=options.backend_options,
            machines=options.machines,
            spares=options.recovery.spares,
            is_offline=offline,
            constants=constants,
        ),
    )
    machines = planner.machine_count or recipe.machines
    machine_total = machines + options.recovery.spares
    if machine_total > MAX_MACHINES:
        raise BadInput(f"{machine_total} machines (--machines plus --spares) are too many: at most {MAX_MACHINES}")
    recipe = recipe.for_machines(machines)
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
    is_stored_data = not is_synthetic and data_fetch.is_in_object_store(recipe.data.root)

    root = requested_root if is_stored_data else planner.data_root(requested_root, is_synthetic)
    if options.train.copies and not is_stored_data:
        copies_root = Path(options.train.copies).expanduser().absolute()
    else:
        copies_root = root.parent / f"{root.name}-sz"  # not `with_name`: the root of all folders has no name

    remote_dataset = None
    if is_stored_data or options.fetch:
        if is_synthetic:
            raise BadInput(
                "--fetch does not work with the built-in data set (sample), which is generated where it is read"
            )
        source = recipe.data.root if is_stored_data else str(root)
        remote_dataset = data_fetch.RemoteDataset.resolve(
            source, recipe, options.train.copies, options.fetch or "", planner
        )
        root = remote_dataset.target
        copies_root = root.parent / f"{root.name}-sz"

    if options.recovery.min_machines > machines:
        raise BadInput(
            f"--min-machines {options.recovery.min_machines} is more than the {machines} machines of the job"
        )
    procs = options.procs or planner.default_procs(machines)
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
    standby = machines + options.recovery.spares > 1 if options.recovery.standby is None else options.recovery.standby
    spec = JobSpec(
        name="",
        recipe=recipe,
        recipe_file=recipe_file,
        train=replace(options.train, data=str(root), copies=str(copies_root), gpus=schedule_gpus),
        recovery=replace(options.recovery, standby=standby),
        data_source=remote_dataset.source if remote_dataset else "",
        copies_source=remote_dataset.copies_source if remote_dataset else "",
        generate_data=is_synthetic,
        backend=options.backend,
        is_one_computer=planner.is_this_computer,
        machines=machines,
        procs=procs,
        max_hours=planner.default_max_hours if options.max_hours is None else options.max_hours,
    )

    notes = []
    if remote_dataset:
        notes.append(remote_dataset.describe(recipe))
    if schedule.scaling_note:
        notes.append(schedule.scaling_note)
    if data is not None and not is_synthetic:
        notes += planner.notes_on_data(root, train_images)
    if options.train.exact and recipe.comm.hook != "none":
        raise BadInput(f"--exact does not work with the comm hook {recipe.comm.hook}, which rounds; set comm='none'")
    notes += planner.requirement_notes(recipe)
    if recipe.model.compile:
        notes.append("compile takes minutes for each shape before the first step; no forecast includes them")
    largest_batch = max(phase.global_batch for phase in schedule.scheduled_phases)
    if largest_batch > image_count:
        notes.append(f"a step takes all {image_count} images of the data set, not the global batch of {largest_batch}")
    if schedule_gpus != machines * procs:
        notes.append(gpu_mismatch_note(machines * procs, schedule_gpus))

    machine_plan = planner.complete(spec, schedule)
    return Plan(machine_plan.spec, schedule, (*notes, *machine_plan.notes), machine_plan.rental_plan)


def gpu_mismatch_note(processes: int, gpus: int) -> str:
    """Return a note on how `processes` execute the schedule of another number of GPUs."""
    schedule_text = f"the schedule is for {gpus} GPU{'s' if gpus != 1 else ''}"
    if processes < gpus:
        return f"{schedule_text}: each of {processes} process{'es' if processes != 1 else ''} accumulates gradients"
    return f"{schedule_text}: {processes - gpus} of {processes} processes are idle"


def load_recipes(name: str) -> list[Recipe]:
    """Return the recipes of a file. Raises `BadInput` with a one-line message."""
    try:
        return read_recipes(name)
    except RecipeError as error:
        raise BadInput(str(error)) from error
