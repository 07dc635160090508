"""Turns a recipe and the launch options into a plan."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from cluster.backends import catalog
from cluster.backends.catalog import UNKNOWN_MACHINES
from cluster.backends.planner import MachinePlanner, MachineRequest, Plan
from cluster.errors import BadInput
from cluster.machines.requirements import require_functions
from cluster.machines.user_project import find_project
from cluster.notifications.targets import chosen_targets
from cluster.state.recovery_options import RecoveryOptions
from cluster.state.spec import MAX_MACHINES, JobSpec, Workload
from train.data.validation_split import note_on_missing_copies, notes_on_empty_classes
from train.recipe.components import SAMPLE
from train.recipe.recipe_files import RecipeError, read_recipes, read_work, select_recipes
from train.recipe.schedule import Schedule, scaled_image_count
from train.recipe.schema import Recipe
from train.recipe.settings import with_settings
from train.tools.records import encode

from . import data_fetch
from .data_fetch import SetCounts, count_set
from .launch_options import LaunchOptions, make_launch_options


def plan(recipe: Recipe, options: LaunchOptions | None = None, *, recipe_file: str = "", offline: bool = False) -> Plan:
    """Plan a launch without starting anything. With `offline`, prices come from built-in tables.

    Raises `BadInput` for options that do not fit together or to the recipe, `ClusterError` for all else.
    """
    options = options or make_launch_options()
    data = options.data
    planner = open_planner(recipe, options, options.machines, offline)
    machines = planner.machine_count or recipe.machines
    check_machine_counts(machines, options.recovery)
    recipe = recipe.for_machines(machines)
    is_synthetic = data == "sample" or (data is None and recipe.data == SAMPLE)
    try:
        recipe = with_settings(recipe, options.train.set)
        if options.train.seed is not None:
            recipe = replace(recipe, seed=options.train.seed)
        if options.train.precision:
            recipe = replace(recipe, precision=options.train.precision)
        if is_synthetic:
            recipe = replace(recipe, data=SAMPLE)
        elif data is not None:
            name = Path(data).absolute().name or "data"
            recipe = replace(recipe, data=replace(recipe.data, name=name, root=data))
        if options.train.val_fraction is not None and not is_synthetic:
            recipe = replace(recipe, data=replace(recipe.data, val_fraction=options.train.val_fraction))
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

    procs = options.procs or planner.default_procs(machines)
    schedule_gpus = recipe.nominal_gpus if options.train.keep_batch else machines * procs
    if remote_dataset:
        remote_dataset.check_val_fraction(recipe.data.val_fraction)
        counts = SetCounts(*remote_dataset.image_counts)
    else:  # a synthetic set may be incomplete: another job may be generating it right now
        counts = SetCounts() if is_synthetic else count_set(root, recipe.data.val_fraction)
    counted_data = replace(recipe.data, train=counts.train or recipe.data.train, val=counts.val or recipe.data.val)
    recipe = replace(recipe, data=counted_data)
    image_count = scaled_image_count(recipe.data.train, options.train.scale)
    try:
        schedule = Schedule(recipe, image_count, schedule_gpus, options.train.max_steps)
    except ValueError as error:
        raise BadInput(str(error)) from error
    standby = machines + options.recovery.spares > 1 if options.recovery.standby is None else options.recovery.standby
    project = find_project(recipe, recipe_file)
    require_functions(recipe, project)
    notify = chosen_targets(options.notify)
    spec = JobSpec(
        name="",
        workload=recipe,
        recipe_file=recipe_file,
        train=replace(options.train, data=str(root), copies=str(copies_root), gpus=schedule_gpus),
        recovery=replace(options.recovery, standby=standby),
        user_project=project,
        data_source=remote_dataset.source if remote_dataset else "",
        copies_source=remote_dataset.copies_source if remote_dataset else "",
        generate_data=is_synthetic,
        given_name=options.name,
        backend=options.backend,
        is_one_computer=planner.is_this_computer,
        backend_options=encode(options.backend_options),
        machines=machines,
        procs=procs,
        requested_procs=options.procs,
        max_hours=planner.default_max_hours if options.max_hours is None else options.max_hours,
        notify=notify,
    )

    notes = []
    if remote_dataset:
        notes.append(remote_dataset.describe(recipe))
    if schedule.scaling_note:
        notes.append(schedule.scaling_note)
    if schedule.small_set_note and options.train.scale == 1:  # a rehearsal on a part of the images has few steps anyway
        notes.append(schedule.small_set_note)
    is_here = options.backend == UNKNOWN_MACHINES or planner.is_this_computer
    if data is not None and is_here and not is_synthetic and not counts.train:
        if planner.is_this_computer or root.is_dir():
            from train.data.index.open import DataError, check_layout  # imports numpy

            try:
                check_layout(root, recipe.data.val_fraction)
            except DataError as error:
                raise BadInput(str(error)) from error
            raise BadInput(f"{root}: contains no images; what is wrong: imgnet-cluster data check {root}")
        notes.append(f"{root}: there is no such folder here; the plan uses the recipe's image counts")
    notes += notes_on_empty_classes(counts.untrained, counts.unvalidated, counts.classes)
    missing_copies: tuple[int, ...] = ()
    if planner.is_this_computer and not remote_dataset and not is_synthetic:
        missing_copies = tuple(size for size in recipe.copy_sizes if not (copies_root / str(size)).is_dir())
        fraction = 0.0 if (root / "val").is_dir() else recipe.data.val_fraction
        if note := note_on_missing_copies(missing_copies, root, copies_root, fraction, options.train.skip_bad):
            notes.append(note)
    if options.train.exact and recipe.comm.hook not in ("auto", "none"):
        raise BadInput(f"--exact does not work with the comm hook {recipe.comm.hook}, which rounds; set comm='none'")
    notes += planner.requirement_notes(recipe, spec.user_project)
    if tracker := options.train.log:
        if not planner.is_this_computer:
            notes.append(f"--log {tracker}: pip's {tracker} and its credentials must be on the machines")
        elif find_spec(tracker) is None:
            raise BadInput(f"--log {tracker}: it is not installed here; pip install {tracker}")
    if recipe.model.compile:
        notes.append("torch.compile takes minutes per image shape before the first step; the forecast leaves them out")
    largest_batch = max(phase.global_batch for phase in schedule.scheduled_phases)
    if largest_batch > image_count:
        notes.append(f"a step takes all {image_count} images of the data set, not the global batch of {largest_batch}")
    if schedule_gpus != machines * procs:
        notes.append(gpu_mismatch_note(machines * procs, schedule_gpus))

    job_plan = planner.complete(spec, schedule)
    return replace(job_plan, notes=(*notes, *job_plan.notes), missing_copies=missing_copies)


def open_planner(work: Workload, options: LaunchOptions, machines: int | None, offline: bool) -> MachinePlanner:
    """Return the part of the backend in the plan of a launch on `machines` (None: as many as the backend finds)."""
    request = MachineRequest(
        workload=work,
        options=options.backend_options,
        machines=machines,
        spares=options.recovery.spares,
        is_offline=offline,
    )
    return catalog.open_planner(options.backend, request)


def check_machine_counts(machines: int, recovery: RecoveryOptions) -> None:
    """Raise `BadInput` for numbers of machines that do not fit together."""
    machine_total = machines + recovery.spares
    if machine_total > MAX_MACHINES:
        raise BadInput(f"{machine_total} machines (--machines plus --spares) are too many: at most {MAX_MACHINES}")
    if recovery.min_machines > machines:
        raise BadInput(
            f"--min-machines {recovery.min_machines}: the job has fewer machines, {machines}; lower it, or pass more "
            "--machines"
        )


def gpu_mismatch_note(processes: int, gpus: int) -> str:
    """Return a note on how `processes` execute the schedule of another number of GPUs."""
    schedule_text = f"the schedule is for {gpus} GPU{'s' if gpus != 1 else ''}"
    if processes < gpus:
        subject = "the process accumulates" if processes == 1 else f"the {processes} processes accumulate"
        return f"{schedule_text}: {subject} gradients over several batches, so that the global batch stays the same"
    return f"{schedule_text}: {processes - gpus} of {processes} processes are idle"


def load_work(name: str, only: Sequence[str] = ()) -> list[Workload]:
    """Return the recipes and commands of a file, or those named by `--only`. Raises `BadInput`."""
    try:
        return select_recipes(read_work(name), only)
    except RecipeError as error:
        raise BadInput(str(error)) from error


def load_recipes(name: str, only: Sequence[str] = ()) -> list[Recipe]:
    """Return the recipes of a file, or those named by `--only`. Raises `BadInput`."""
    try:
        return select_recipes(read_recipes(name), only)
    except RecipeError as error:
        raise BadInput(str(error)) from error
