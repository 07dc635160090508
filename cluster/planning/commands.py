"""Turns a command of the user and the launch options into a plan."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.backends.planner import Plan
from cluster.connectors.local import visible_gpus
from cluster.errors import BadInput
from cluster.machines.user_project import find_command_project
from cluster.notifications.targets import chosen_targets
from cluster.script import container, secret_values
from cluster.script.progress import BadPattern, compile_pattern
from cluster.state.spec import JobSpec, Workload
from train.engine.options import TrainOptions
from train.recipe.command import Command
from train.recipe.schema import Recipe
from train.tools.records import encode

from .launch_options import LaunchOptions, make_launch_options
from .resolve import check_machine_counts, open_planner, plan


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
    """Return the variables of `--env K=V`, and the secret others, but for typed ones. Raises `BadInput`."""
    secrets = secret_values.collect([name for name in assignments if "=" not in name], files, os.environ)
    variables = secret_values.collect([assignment for assignment in assignments if "=" in assignment], [], {})
    return variables, {name: value for name, value in secrets.items() if name not in variables}
