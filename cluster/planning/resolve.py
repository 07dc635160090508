"""Turns a recipe, or a command of the user, and the launch options into a plan."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from cluster.backends import catalog
from cluster.backends.catalog import UNKNOWN_MACHINES
from cluster.backends.planner import MachinePlanner, MachineRequest, Plan
from cluster.connectors.local import visible_gpus
from cluster.errors import BadInput
from cluster.machines.requirements import require_functions
from cluster.machines.user_project import find_command_project, find_project
from cluster.notifications.targets import chosen_targets
from cluster.script import container, secret_values
from cluster.script.progress import BadPattern, compile_pattern
from cluster.state.recovery_options import RecoveryOptions
from cluster.state.spec import MAX_MACHINES, JobSpec, Workload
from train.data.validation_split import note_on_missing_copies, notes_on_empty_classes
from train.engine.options import TrainOptions
from train.recipe.command import Command
from train.recipe.components import SAMPLE
from train.recipe.recipe_files import RecipeError, read_recipes, read_work, select_recipes
from train.recipe.schedule import Schedule, scaled_image_count
from train.recipe.schema import Recipe
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
        recipe = options.train.changed_recipe(recipe)
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


def plan_work(
    work: Workload, options: LaunchOptions | None = None, *, recipe_file: str = "", offline: bool = False
) -> Plan:
    """Plan the launch of a recipe, or of a command in the copy of its file's project. Raises `ClusterError`."""
    if isinstance(work, Recipe):
        return plan(work, options, recipe_file=recipe_file, offline=offline)
    workdir = str(Path(recipe_file).resolve().parent) if recipe_file else ""
    return plan_command(work, options, workdir=workdir, recipe_file=recipe_file, offline=offline)


def plan_command(
    command: Command,
    options: LaunchOptions | None = None,
    *,
    workdir: str = "",
    recipe_file: str = "",
    secrets: Mapping[str, str] | None = None,
    offline: bool = False,
) -> Plan:
    """Plan the launch of a command without starting anything. It runs in the copy of `workdir`, "" for this folder.

    `secrets` are values of its secret variables; this process has the others. With `offline`, prices come from
    built-in tables. Raises `BadInput` for options that do not fit, `ClusterError` for all else.
    """
    options = options or make_launch_options()
    planner = open_planner(command, options, options.machines or command.machines, offline)
    machines = planner.machine_count or 1
    check_machine_counts(machines, options.recovery)
    if planner.is_this_computer and not command.image:
        program = command.argv[0]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        if "/" not in program and "PATH" not in command.env and not shutil.which(program, path=path):
            raise BadInput(f"{program}: there is no such program here; correct the command after --")
    available_procs = planner.default_procs(machines)
    if options.train != TrainOptions():
        raise BadInput(
            f"{command.name}: a command takes no options of the trainer, such as --seed; pass them to it in its argv"
        )
    procs = options.procs or (available_procs if command.procs == "gpu" else command.procs)
    computer_gpus = len(visible_gpus()) if planner.is_this_computer else 0
    all_procs = procs * (machines + options.recovery.spares)
    if 0 < computer_gpus < all_procs:
        raise BadInput(
            f"the job needs {all_procs} GPUs, one for each process, and this computer has {computer_gpus}; use fewer "
            "--machines or --procs, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        )
    if command.image:
        if command.requirements:
            raise BadInput("--image and --requirements exclude each other: install the requirements in the image")
        container.check_image(command.image)
        if planner.is_this_computer and not shutil.which(container.DOCKER):
            raise BadInput("--image: docker is missing on this computer; install Docker, or leave out --image")
    if command.progress:
        try:
            compile_pattern(command.progress)
        except BadPattern as error:
            raise BadInput(str(error)) from error
    given_values = dict(secrets or {})
    missing_values = [name for name in command.secrets if name not in given_values]
    project = find_command_project(command, Path(workdir or ".").expanduser())
    notify = chosen_targets(options.notify)
    data = ""
    if options.data is not None:
        if "://" in str(options.data):
            raise BadInput(
                f"--data {options.data}: only recipes fetch data; let the script read it: --env DATA={options.data}"
            )
        data = str(planner.data_root(Path(options.data), is_synthetic=False))
        if planner.is_this_computer and not Path(data).exists():
            raise BadInput(f"--data {options.data}: there is no such folder")
    spec = JobSpec(
        name="",
        workload=command,
        recipe_file=recipe_file,
        train=replace(options.train, data=data, gpus=machines * procs),
        recovery=replace(options.recovery, standby=False),
        user_project=project,
        given_name=options.name,
        backend=options.backend,
        is_one_computer=planner.is_this_computer,
        backend_options=encode(options.backend_options),
        machines=machines,
        procs=procs,
        requested_procs=options.procs or (None if command.procs == "gpu" else command.procs),
        max_hours=planner.default_max_hours if options.max_hours is None else options.max_hours,
        notify=notify,
        secret_values=given_values | secret_values.collect(missing_values, [], os.environ),
    )
    notes = planner.command_notes(project)
    job_plan = planner.complete(spec, None)
    gpus = job_plan.spec.rental_facts.gpus_per_machine
    if 0 < gpus < procs:
        raise BadInput(f"--procs {procs}: a machine has {gpus} GPU{'s' * (gpus > 1)}; pass {gpus} or less")
    return replace(job_plan, notes=(*notes, *job_plan.notes))


def read_environment(assignments: Sequence[str], files: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of `--env K=V`, and the secret ones of `--env NAME` and of files. Raises `BadInput`."""
    secrets = secret_values.collect([name for name in assignments if "=" not in name], files, os.environ)
    variables = secret_values.collect([assignment for assignment in assignments if "=" in assignment], [], {})
    return variables, {name: value for name, value in secrets.items() if name not in variables}
