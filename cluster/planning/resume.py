"""The plan of a resume: the rest of a job, on its machines or on others, with changed options."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, replace

from cluster.backends import catalog
from cluster.backends.planner import MachineRequest, Plan, ResumedRun
from cluster.errors import BadInput
from cluster.machines.trained_files import newest_local_checkpoint
from cluster.notifications.targets import chosen_targets
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from train.recipe.schedule import Schedule, with_more_epochs
from train.recipe.target import Target
from train.tools.option_fields import Option, OptionError
from train.tools.records import decode, encode

from .forecasts import constants_so_far
from .launch_options import LaunchOptions, MoreEpochs, refuse_keyword
from .resolve import check_machine_counts, gpu_mismatch_note


@dataclass(frozen=True, kw_only=True)
class ResumePlan(Plan):
    """The plan of a resume, of whose schedule `steps_done` steps are done."""

    steps_done: int
    changes: tuple[str, ...]  # a line for each option whose value the resume changes
    adds_epochs: bool


def plan_resume(
    run: Run, steps_done: int, spent_dollars: float, *, rented_type: str = "", **keywords: object
) -> ResumePlan:
    """Plan the rest of a job, with options that the keyword arguments change; None keeps the value of the job.

    The schedule stays as it is, on other machines too, but for epochs that are added to it. What the job has measured
    on machines of its `rented_type` is used to forecast the rest on them. Raises `BadInput` for options that a resume
    does not have, or that do not fit together or to the job; `ClusterError` for all else.
    """
    values = {name: value for name, value in keywords.items() if value is not None}
    job_options = options_of(run.spec)
    _check_names(values, run.spec.backend)
    try:
        options, more_epochs = job_options.changed(values), MoreEpochs().changed(values)
    except OptionError as error:
        raise BadInput(str(error)) from error
    job_spec = _with_added_epochs(replace(run, spec=replace(run.spec, train=options.train)), more_epochs)
    machines = options.machines or run.spec.machines
    check_machine_counts(machines, options.recovery)
    planner = catalog.open_planner(
        options.backend,
        MachineRequest(
            workload=job_spec.workload,
            options=options.backend_options,
            machines=machines,
            spares=options.recovery.spares,
            resumed=ResumedRun(
                run=run,
                steps_done=steps_done,
                spent_dollars=spent_dollars,
                constants=constants_so_far(run, run.spec.schedule) if rented_type and run.spec.schedule else None,
                rented_type=rented_type,
            ),
        ),
    )
    notify = chosen_targets(options.notify)
    has_other_machines = (machines, options.backend_options) != (job_options.machines, job_options.backend_options)
    default_procs = planner.default_procs(machines) if has_other_machines else run.spec.procs
    spec = replace(
        job_spec,
        recovery=options.recovery,
        backend_options=encode(options.backend_options),
        machines=machines,
        procs=options.procs or default_procs,
        requested_procs=options.procs,
        max_hours=planner.default_max_hours if options.max_hours is None else options.max_hours,
        notify=notify,
    )
    schedule = spec.schedule
    machine_plan = planner.complete(spec, schedule)
    spec = replace(machine_plan.spec, forecast=job_spec.forecast)  # which is about the whole job
    max_dollars = spec.rental_facts.max_dollars
    if max_dollars is not None and spent_dollars >= max_dollars:
        raise BadInput(
            f"--max-price-total {max_dollars:g}: {spec.name} has cost ${spent_dollars:,.2f} already; "
            f"to continue: imgnet-cluster resume {spec.name} --max-price-total DOLLARS"
        )
    notes = []
    changes = [*_describe_changes(job_options, options)]
    if schedule and schedule.recipe.epochs > run.spec.recipe.epochs:
        changes.insert(0, f"--epochs: {run.spec.recipe.epochs} -> {schedule.recipe.epochs}")
        notes.append(_note_on_added_epochs(schedule, run.spec.recipe.epochs, more_epochs))
    if schedule and schedule.gpus != spec.machines * spec.procs:
        notes.append(gpu_mismatch_note(spec.machines * spec.procs, schedule.gpus))
    return ResumePlan(
        spec=spec,
        schedule=schedule,
        notes=(*notes, *machine_plan.notes),
        rental_plan=machine_plan.rental_plan,
        obstacles=machine_plan.obstacles,
        steps_done=min(steps_done, schedule.steps) if schedule else steps_done,
        changes=tuple(changes),
        adds_epochs=bool(more_epochs.epochs),
    )


def options_of(spec: JobSpec) -> LaunchOptions:
    """Return the options with which a job was launched, from its specification. Raises `DamagedRecord`."""
    options_class = catalog.options_class(spec.backend)
    backend_options = spec.backend_options or {}
    if (dollars := spec.rental_facts.max_dollars) is not None and "max_dollars" in backend_options:
        backend_options = {**backend_options, "max_dollars": dollars}  # `extend` may have changed it
    return LaunchOptions(
        backend=spec.backend,
        machines=spec.machines,
        procs=spec.requested_procs,
        max_hours=spec.max_hours,
        notify=spec.notify,
        recovery=spec.recovery,
        train=spec.train,
        backend_options=decode(options_class, backend_options, "backend_options"),
    )


def _all_options(backend: str) -> dict[str, Option]:
    options_class = catalog.options_class(backend)
    return {option.name: option for option in (*LaunchOptions.launch_options(), *options_class.launch_options())}


def _check_names(values: dict[str, object], backend: str) -> None:
    options = _all_options(backend) | {option.name: option for option in MoreEpochs.launch_options()}
    for name in values:
        if name not in options:
            refuse_keyword(name, backend)
        if options[name].is_fixed:
            flags = " or ".join(options[name].all_flags)
            raise BadInput(f"{flags}: a resume cannot change it; start a new job: imgnet-cluster launch")


def _describe_changes(before: LaunchOptions, after: LaunchOptions) -> Iterator[str]:
    values, changed_values = before.launch_values(), after.launch_values()
    for name, option in _all_options(after.backend).items():
        old, new = values[name], changed_values[name]
        if old != new:
            label = name if option.switches else option.flags[0].partition("/")[0]
            yield f"{label}: {_value_text(option.show(old), option)} -> {_value_text(option.show(new), option)}"


def _value_text(value: object, option: Option) -> str:
    if isinstance(value, bool):
        is_given = value if "/" in option.flags[0] else value is not option.default
        return "yes" if is_given else "no"
    if value in (None, (), "", MISSING):
        return "default"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _with_added_epochs(run: Run, options: MoreEpochs) -> JobSpec:
    """Return a job's specification with the epochs that `resume --epochs` adds. Raises `BadInput` when it cannot."""
    spec, epochs, lr = run.spec, options.epochs, options.lr
    if not epochs:
        if lr is not None:
            raise BadInput("--lr is the learning rate of added epochs: give --epochs +N with it")
        return spec
    schedule = spec.schedule
    if schedule is None:
        raise BadInput(f"--epochs: {spec.name} runs a command of your own, whose epochs this program does not know")
    if schedule.max_steps is not None:
        raise BadInput(f"--epochs: {spec.name} has --max-steps, which distributes its steps over all phases")
    rows = run.folder.epochs()
    done, planned = rows[-1].epoch if rows else 0, spec.recipe.epochs
    total = planned * epochs.startswith("+") + int(epochs)
    if total < planned or total <= done:
        raise BadInput(
            f"--epochs {epochs}: {spec.name} has done {done} of {planned} epochs, and its schedule can only become "
            f"longer: give +N, or a total of {max(planned, done + 1)} or more"
        )
    reached = spec.train.target and Target.parse(spec.train.target).first_epoch_reaching(rows)
    if reached:
        raise BadInput(
            f"--epochs {epochs}: {spec.name} has reached its target {spec.train.target} in epoch {reached.epoch}, "
            "where training ends; give a higher one, or none: --target ''"
        )
    # Machines with folders of their own are not asked: there the trainers find it.
    if done and not spec.has_own_folders and newest_local_checkpoint(run.folder.shared) is None:
        raise BadInput(f"--epochs {epochs}: the checkpoints of {spec.name} are gone from {run.folder.shared}")
    extended = replace(spec, forecast=None, train=replace(spec.train, extended_at=done))
    if total == planned:  # it has ended before
        if lr is not None:
            raise BadInput("--lr is the learning rate of added epochs: there are none")
        return extended
    recipe = with_more_epochs(schedule, total - planned, lr)
    if not recipe.phases[-1].lr_endpoints[0]:
        raise BadInput(
            f"--epochs {epochs}: the schedule of {spec.name} ends at a learning rate of 0; give another: --lr LR"
        )
    return replace(extended, workload=recipe)


def _note_on_added_epochs(schedule: Schedule, planned: int, options: MoreEpochs) -> str:
    origin = "that of the last step before; for another one: --lr" if options.lr is None else "by --lr"
    lr, _ = schedule.scheduled_phases[-1].scaled_lr_endpoints
    return (
        f"epochs {planned + 1} to {schedule.recipe.epochs} train as the last phase does, at a constant learning rate "
        f"of {lr:.4g} ({origin})"
    )
