"""One attempt of a training run, from its options to result.json."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from train.data.index.base import names_crc32
from train.data.loading.dataset import Dataset, copies_root, data_root, open_dataset
from train.data.loading.loader import BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed import ddp, process_group
from train.distributed.gpu import bind_to_numa_node, full_memory_explained
from train.metrics import thumbnails
from train.metrics.accuracy import TOP_GUESSES, has_top5
from train.metrics.confusion import PICTURED_PAIRS, Confusion
from train.metrics.records import RunClock, TrainResult
from train.metrics.rows import overall_images_per_second
from train.models import pretrained, registry
from train.recipe import target
from train.recipe.history import best_epoch
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools import checkpoint_io, errors, files, host, process, text_files
from train.tools.agent_protocol import (
    CHECKPOINT_PATTERN,
    EXIT_SAVED,
    RESULT_FILE,
    TrainerState,
    best_weights_file,
    checkpoint_files,
    checkpoint_folder,
)
from train.tools.errors import HandoverFailed, TrainingError, UnreadableCheckpoint
from train.tools.host import git_commit, package_versions, unix_time
from train.tools.records import encode
from train.weights import run_files

from .agent_channel import AgentChannel, StopRequested, adopt_request
from .handover import Handover
from .options import RunOptions, parse_run_options
from .trainer import Trainer
from .warmup import batch_shapes, warm_up

Prepared = tuple[Dataset, Trainer | None]


def run_attempt(
    options: RunOptions, recipe: Recipe, agent_channel: AgentChannel, prepared: Prepared | None = None
) -> int:
    """Train from the start or from a checkpoint to the end.

    `prepared` is what a standby has made ready. Returns the exit code: 0 done, 3 asked to stop. Raises `TrainingError`,
    `DataError` or `OSError` with one line that says what is wrong and where.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    attempt_start_time = unix_time()
    if prepared is None:
        agent_channel.report_state(TrainerState.INDEXING)
        prepared = open_run_dataset(options, recipe), None
    dataset, trainer = prepared
    handover = Handover(agent_channel, trainer)
    while True:
        handover.begin_attempt()
        try:
            exit_code = join_and_train(options, agent_channel, dataset, handover, attempt_start_time)
            if exit_code != EXIT_SAVED:
                return exit_code
            if not handover.keep(None):
                os._exit(exit_code)  # a regular exit would wait for the loader's batches in flight
        except Exception as error:
            if not handover.keep(error):
                raise
        request = handover.wait_for_request(checkpoint_folder(options.out, options.attempt))
        adopt_request(request)
        agent_channel.begin_attempt()
        options = parse_run_options(request.argv)
        agent_channel.furthest_step = max(agent_channel.furthest_step, options.live_step or 0)
        attempt_start_time = unix_time()


def join_and_train(
    options: RunOptions, agent_channel: AgentChannel, dataset: Dataset, handover: Handover, attempt_start_time: float
) -> int:
    """Join the process group of an attempt, and train to the end or until the agent asks to stop.

    Returns 0 or `EXIT_SAVED`. Raises as `run_attempt` does, and the errors of collectives when a process is gone.
    """
    checkpoints = resume_candidates(options)
    run_start_time = dataset.load_start_time or attempt_start_time
    if agent_channel.rank == 0:
        is_new_run = options.attempt == 1 and not checkpoints
        run_start_time = target.start_clock(options.out, run_start_time, is_new_run=is_new_run)

    agent_channel.report_state(TrainerState.JOINING)
    group = process_group.join_process_group(lambda: handover.was_aborted)
    agent_channel.install_signal_handlers()
    schedule = schedule_of(options, dataset, group.world_size)
    recipe = schedule.recipe
    check_ranks_agree(group, dataset, recipe.precision)
    trainer = handover.prepared
    over_sockets = process_group.print_transport(group, trainer is not None and trainer.comm != recipe.comm)
    comm = ddp.choose_hook(recipe.comm, over_sockets, options.exact)
    if comm != recipe.comm:
        group.log("gradients are summed in bfloat16, over sockets; comm='none' in the recipe keeps float32")
    threads = options.threads or host.threads_per_process(group.local_world_size)
    torch.set_num_threads(1 if options.exact else threads)
    workers = process_group.loader_process_count(group, options.workers)
    if group.device.type == "cpu":
        process.disable_malloc_trim()
    else:
        bind_to_numa_node(group.device)  # after the processors were counted

    sampler = DistributedBatchSampler(schedule, dataset.indexes, recipe.seed, group.rank, group.world_size)
    if trainer and (trainer.schedule, trainer.group.device) == (schedule, group.device):
        trainer.begin_attempt(options, group, sampler, agent_channel)
    else:
        handover.kept = handover.prepared = None  # they belong to another network
        trainer = Trainer(options, recipe, group, sampler, dataset.train.classes, agent_channel)
    trainer.run_start_time = run_start_time
    trainer.comm = comm
    if schedule.scaling_note:
        group.log(schedule.scaling_note)
    if schedule.small_set_note and options.scale == 1:
        group.log(f"warning: {schedule.small_set_note}")
    if group.is_first and not thumbnails.read_thumbnails(options.out):
        val_index = dataset.indexes["val", dataset.recipe.phases[-1].copy]
        thumbnails.write_thumbnails(val_index, options.log_dir, options.attempt)
    if options.live_step is None:
        resume_or_start(trainer, checkpoints)
    else:
        go_on_in_place(trainer, handover)
    process_group.check_same_on_all_ranks(group, "the steps to resume from", trainer.steps_done)
    handover.hold(trainer)
    trainer.hold_state = partial(handover.hold, trainer)
    if group.is_first and agent_channel.folder is None:  # an agent removes an old result itself
        (options.out / RESULT_FILE).unlink(missing_ok=True)  # of an earlier run, or of this one with another target

    try:
        decoder = BatchDecoder(dataset.indexes, recipe.seed, recipe.transform, replaces_broken=True)
        with full_memory_explained(group.device, "the training"):
            trainer.train(decoder, workers)
    except StopRequested:
        agent_channel.report_state(TrainerState.SAVED, step=trainer.steps_done)
        print(f"stopped on request: saved at step {trainer.steps_done}", flush=True)
        trainer.progress.wait_for_tracker()
        return EXIT_SAVED
    if group.is_first:
        publish_network(trainer)
        result = publish_result(trainer, attempt_start_time, dataset.recipe)
        path = options.out / RESULT_FILE
        top5 = "" if result.top5 is None else f"  top-5 {result.top5:.2f} %"
        print(f"done: top-1 {result.top1:.2f} %{top5}  {path}", flush=True)
        if result.broken_images:
            print(trainer.broken_images.summary, flush=True)
        if result.target:
            print(target.describe_outcome(result.target), flush=True)
    trainer.progress.wait_for_tracker()
    process_group.leave_together(group)
    agent_channel.report_state(TrainerState.DONE, step=trainer.steps_done)
    process_group.exit_process(group)
    return 0


def schedule_of(options: RunOptions, dataset: Dataset, world_size: int) -> Schedule:
    """Return the schedule of a run. Raises `TrainingError` when the options do not fit to the images."""
    recipe = dataset.recipe
    if options.target:
        recipe = target.Target.parse(options.target).apply_to_recipe(recipe)
        if options.target.startswith("top5") and not has_top5(len(dataset.train.classes)):
            raise TrainingError(f"--target {options.target}: with at most {TOP_GUESSES} classes, give top1=...")
    gpus = options.gpus or (recipe.nominal_gpus if options.keep_batch else world_size)
    try:
        return Schedule(recipe, len(dataset.train), gpus, options.max_steps)
    except ValueError as error:
        raise TrainingError(str(error)) from error


def prepare(options: RunOptions, recipe: Recipe) -> Prepared:
    """Open the images, and on a CPU build the network and run it once, before there is an attempt to take part in.

    So the others wait for none of that when this process joins them. Nothing is written.
    """
    dataset = open_run_dataset(options, recipe)
    if torch.cuda.device_count() or not (options.gpus or options.keep_batch):  # a trainer may use the GPU meanwhile
        torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch._dynamo
        return dataset, None
    try:
        return dataset, build_before_attempt(options, recipe, dataset)
    except Exception as error:  # the trainer will fail in the same way, and report it
        print(f"{type(error).__name__}: {error}", flush=True)
        return dataset, None


def build_before_attempt(options: RunOptions, recipe: Recipe, dataset: Dataset) -> Trainer:
    """Return a trainer of no process group, which has run its network once."""
    torch.set_num_threads(1)
    no_group = process_group.ProcessGroup(1, 0, 2, 1, torch.device("cpu"))  # rank 1 of 2 prints and writes nothing
    schedule = schedule_of(options, dataset, 1)
    sampler = DistributedBatchSampler(schedule, dataset.indexes, recipe.seed, no_group.rank, no_group.world_size)
    trainer = Trainer(options, schedule.recipe, no_group, sampler, dataset.train.classes, AgentChannel())
    shapes, _ = batch_shapes(sampler, schedule.epochs[:1])
    warm_up(trainer.model, trainer.model, shapes, [], trainer.preprocessor)
    return trainer


def go_on_in_place(trainer: Trainer, handover: Handover) -> None:
    """Take the state of the process that stands furthest.

    Raises `HandoverFailed` when that is not the step on which the agents agreed, or the best weights are lost.
    """
    options = trainer.options
    state = handover.share_state(trainer.group)
    trainer.restore(state, has_tensors="model" not in state)
    handover.hold(trainer)  # a failure from here on finds the state that was received
    if trainer.steps_done != options.live_step:
        raise HandoverFailed(f"the processes stand at step {trainer.steps_done}, and not at {options.live_step}")
    if trainer.group.is_first:
        print(f"goes on in place at step {trainer.steps_done}", flush=True)
        save_inherited(trainer)


def save_inherited(trainer: Trainer) -> None:
    """Write what the process that was rank 0 may not have written: no file has the last steps.

    That is done here at the end of the run or of an epoch, else soon. Raises `HandoverFailed` when the weights of the
    best validation are lost.
    """
    options, history = trainer.options, trainer.history
    is_complete = trainer.epoch_index == len(trainer.schedule.epochs) or trainer.ends_here
    best = best_epoch(history) if options.keeps_best else None
    is_best = False
    if best and not trainer.saver.has_best(trainer.schedule.steps_at(history.index(best) + 1, 0)):
        is_best = best is history[-1] and not trainer.step
        if not is_best:
            raise HandoverFailed("the machine that wrote the weights of the best validation is lost")
    if is_complete or is_best:
        trainer.save(wait=is_complete, is_best=is_best and not is_complete)
    trainer.is_early_save_due = True


def open_run_dataset(options: RunOptions, recipe: Recipe) -> Dataset:
    """Open the data set that the options name, else the recipe's. Raises `DataError`."""
    root = data_root(recipe.data, Path(options.data) if options.data else None)
    return open_dataset(
        recipe,
        root,
        copies_root(root, Path(options.copies) if options.copies else None),
        scale=options.scale,
        seed=recipe.seed,
        skip_bad=options.skip_bad,
        log=lambda text: print(text, flush=True),
    )


def check_ranks_agree(group: process_group.ProcessGroup, dataset: Dataset, precision: str = "auto") -> None:
    """Raise `TrainingError` unless all ranks have the same images and copies, and compute in the same precision.

    Of a resized copy only the image sizes are compared. That it is a copy of the full-size images, each rank has
    checked when it opened the copy.
    """
    check = process_group.check_same_on_all_ranks
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    number = dtypes.index(process_group.compute_dtype(group.device, precision))
    check(group, "the GPUs' precisions (0 for float32, 1 for float16, 2 for bfloat16)", number)
    check(group, "the numbers of resized copies of the images", len(dataset.indexes) // 2 - 1)
    for split, copy in sorted(dataset.indexes, key=lambda key: (key[0], key[1] or 0)):
        index = dataset.indexes[split, copy]
        if copy is None:
            check(group, f"the numbers of images in {index.folder}", len(index))
            check(group, f"the names of the images in {index.folder}", index.names_checksum)
            check(group, f"the names of the classes in {index.folder}", names_crc32(index.classes))
        check(group, f"the widths and heights of the images in {index.folder}", index.sizes_checksum)


def resume_candidates(options: RunOptions) -> list[Path]:
    """Return the checkpoints that --resume allows, the newest first; [] to start from the beginning.

    "auto" allows those of this attempt and of earlier ones.
    """
    if options.resume != "auto":
        return [] if options.resume == "none" else [Path(options.resume)]
    folders = [checkpoint_folder(options.out, number) for number in range(options.attempt, 0, -1)]
    return [path for folder in folders for path in reversed(checkpoint_files(folder, CHECKPOINT_PATTERN))]


def resume_or_start(trainer: Trainer, checkpoints: Sequence[Path]) -> None:
    """Restore the first checkpoint that can be read, or load the first weights when none is given.

    Raises `UnreadableCheckpoint` when none can be read, `TrainingError` when one belongs to another run.
    """
    if not checkpoints:
        if trainer.options.extended_at:
            raise TrainingError(f"the checkpoints in {trainer.options.out} are gone, so it cannot get more epochs")
        load_initial_weights(trainer)
    for number, checkpoint in enumerate(checkpoints, 1):
        try:
            restore_checkpoint(trainer, checkpoint)
            return keep_last_as_best(trainer)
        except UnreadableCheckpoint as error:
            if number == len(checkpoints):
                raise
            trainer.group.log(f"{error}; the one before it is taken")


def keep_last_as_best(trainer: Trainer) -> None:
    """Save the last weights of a finished run as its best ones, if they are, before added epochs replace them."""
    options, history = trainer.options, trainer.history
    has_more = trainer.epoch_index < len(trainer.schedule.epochs) and not trainer.ends_here
    if options.keeps_best and history and has_more and not trainer.step and best_epoch(history) is history[-1]:
        path = checkpoint_folder(options.out, options.attempt) / best_weights_file(trainer.steps_done)
        if not path.exists():
            trainer.save(wait=True, is_best=True)


def restore_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Continue from a checkpoint file. Raises `UnreadableCheckpoint`, or `TrainingError` when it is another run's."""
    try:
        trainer.restore(checkpoint_io.load_checkpoint(checkpoint))
    except OSError as error:
        raise UnreadableCheckpoint(errors.one_line_error(error)) from error
    except ValueError as error:
        raise UnreadableCheckpoint(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpoint(f"{checkpoint}: cannot be read: {type(error).__name__}: {error}") from error
    trainer.group.log(f"resumed from {checkpoint} at step {trainer.steps_done}")


def load_initial_weights(trainer: Trainer) -> None:
    """Load the pretrained weights that the recipe names, if it names any.

    Files, and networks that this project does not define, may differ between machines, so their weights are compared
    over all ranks. Raises `TrainingError` when they differ or cannot be used.
    """
    model, group = trainer.recipe.model, trainer.group
    if model.weights:
        pretrained.load_pretrained(trainer.model, model.weights, group.log)
        trainer.average.restart()
    if group.world_size > 1 and (model.weights or model.name not in registry.MODEL_BUILDERS):
        checksum = registry.weights_crc32(trainer.model)
        process_group.check_same_on_all_ranks(group, "the initial weights of the network", checksum)


def publish_network(trainer: Trainer) -> None:
    """Write the files of the network that the run has trained. Raises `OSError`."""
    options = trainer.options
    # Under an agent only the attempt's own folder counts, into which those of the attempt before were linked.
    first_attempt = 1 if options.resume == "auto" else options.attempt
    best_weights = None
    if options.keeps_best:
        attempts = range(options.attempt, first_attempt - 1, -1)
        best_weights = run_files.find_best_weights(options.out, attempts, trainer.history, trainer.schedule)
    confusion = None
    if trainer.confusion_counts is not None:
        confusion = Confusion.from_counts(trainer.classes, trainer.confusion_counts.cpu().numpy())
        val_index = trainer.sampler.indexes["val", trainer.recipe.phases[-1].copy]
        labels = confusion.confused_labels(PICTURED_PAIRS)
        thumbnails.write_class_thumbnails(val_index, labels, options.log_dir, options.attempt)
    weights = trainer.average.state_dict() or trainer.model.state_dict()
    run_files.publish_network(options.out, weights, best_weights, trainer.description, trainer.recipe, confusion)


def publish_result(trainer: Trainer, attempt_start_time: float, recipe: Recipe) -> TrainResult:
    """Write result.json and return its content. It exists only when the schedule is done or the target is reached."""
    # The time of the last epoch's checkpoint is known only now.
    epochs = tuple(replace(epoch, **vars(trainer.time_breakdown.epoch_times(epoch.epoch))) for epoch in trainer.history)
    last = epochs[-1]
    requested_target = target.Target.from_options(trainer.options.target, recipe)
    result = TrainResult(
        recipe=recipe.name,
        top1=last.top1,
        top5=last.top5,
        top1_square=last.top1_square,
        top5_square=last.top5_square,
        images_per_second=overall_images_per_second(epochs),
        images=trainer.images_seen,
        steps=trainer.steps_done,
        broken_images=len(trainer.broken_images.known),
        epochs=epochs,
        target=target.target_outcome(requested_target, epochs),
        clock=RunClock(begun=trainer.run_start_time, seconds=last.clock),
        train_images=trainer.schedule.images,
        seconds={
            "attempt": unix_time() - attempt_start_time,
            "training": sum(epoch.train_seconds for epoch in epochs),
            "validation": sum(epoch.val_seconds for epoch in epochs),
            "waiting for images": trainer.time_breakdown.wait_seconds,
            "first step to last without losses": trainer.time_summary.wall,
        },
        goodput=trainer.goodput,
        where=trainer.time_summary,
        procs=trainer.group.world_size,
        precision=str(trainer.preprocessor.compute_dtype).removeprefix("torch."),
        device=trainer.group.device.type,
        seed=recipe.seed,
        schedule=tuple(trainer.schedule.table()),
        schedule_gpus=trainer.schedule.gpus,
        versions=package_versions(),
        git_commit=git_commit(),
    )
    files.create_once(trainer.options.out / RESULT_FILE, text_files.to_json_bytes(encode(result)))
    return result
