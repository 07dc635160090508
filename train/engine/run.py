"""One attempt of a run, from the options to result.json."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from train.data.index.base import names_crc32
from train.data.loading.dataset import Dataset, copies_root, data_root, open_dataset
from train.data.loading.loader import BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed import process_group
from train.metrics import thumbnails
from train.metrics.rows import run_summary
from train.models import pretrained, registry
from train.recipe import target
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools import checkpoint_io, filesystem, process
from train.tools.errors import TrainingError
from train.tools.provenance import git_commit, package_versions

from .agent_channel import AgentChannel
from .options import TrainOptions
from .trainer import StopRequested, Trainer

EXIT_SAVED = 3  # exit code of a process that was asked to end, and saved


def run_attempt(
    options: TrainOptions, recipe: Recipe, agent_channel: AgentChannel, dataset: Dataset | None = None
) -> int:
    """Train from the start or a checkpoint to the end, on images that are open already, or not.

    Returns the exit code: 0 done, 3 asked to end.
    Raises `Expected`, `DataError`, `OSError` with one line that says what and where.
    """
    started = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    if dataset is None:
        agent_channel.report_state("indexing")
        dataset = open_run_dataset(options, recipe)
    path = resume_path(options)
    begun = dataset.load_start_time or started
    if agent_channel.rank == 0:
        begun = target.start_clock(options.out, begun, is_new_run=options.attempt == 1 and path is None)
    agent_channel.report_state("joining")
    group = process_group.join_process_group()
    agent_channel.install_signal_handlers()
    recipe = options.target.apply_to_recipe(dataset.recipe) if options.target else dataset.recipe
    gpus = options.gpus or (recipe.nominal_gpus if options.keep_batch else group.world_size)
    try:
        schedule = Schedule(recipe, len(dataset.train), gpus, options.max_steps)
    except ValueError as error:
        raise TrainingError(str(error)) from error
    check_ranks_agree(group, dataset)
    process_group.print_transport(group)
    if group.device.type == "cpu":
        threads = 1 if options.exact else options.threads or (os.cpu_count() or 1) // group.local_world_size
        torch.set_num_threads(max(1, threads))
        process.disable_malloc_trim()
    feed = DistributedBatchSampler(schedule, dataset.indexes, recipe.seed, group.rank, group.world_size)
    trainer = Trainer(options, recipe, group, feed, len(dataset.train.classes), agent_channel)
    if group.is_first and schedule.scaling_note:
        print(schedule.scaling_note, flush=True)
    trainer.run_start_time = begun
    if group.is_first and not thumbnails.read_thumbnails(options.out):
        thumbnails.write_thumbnails(
            dataset.indexes["val", dataset.recipe.phases[-1].copy], options.log_dir, options.attempt
        )
    resume_or_start(trainer, path)
    process_group.check_same_on_all_ranks(group, "the steps to go on from", trainer.steps_done)
    if group.is_first and agent_channel.folder is None:  # an agent looks after its own
        (options.out / "result.json").unlink(missing_ok=True)  # of an earlier run, or of this one with another target
    try:
        trainer.train(
            BatchDecoder(dataset.indexes, recipe.seed), process_group.loader_process_count(group, options.workers)
        )
    except StopRequested:
        agent_channel.report_state("saved", step=trainer.steps_done)
        print(f"asked to end: saved at step {trainer.steps_done}", flush=True)
        os._exit(EXIT_SAVED)  # the loader has batches in flight that nobody wants
    if group.is_first:
        result = publish_result(trainer, started, dataset.recipe)
        where = options.out / "result.json"
        print(f"done: top-1 {result['top1']:.2f} %  top-5 {result['top5']:.2f} %  {where}", flush=True)
        if result["target"]:
            print(target.describe_outcome(result["target"]), flush=True)
    process_group.barrier(group)
    agent_channel.report_state("done", step=trainer.steps_done)
    process_group.exit_process(group)
    return 0


def check_ranks_agree(group: process_group.ProcessGroup, dataset: Dataset) -> None:
    """Raise `Expected` unless all processes have the same images, read the same copies of them, and compute alike.

    Of a copy only the sizes are compared: that it is of the same images as the full-size set each has seen already.
    """
    same = process_group.check_same_on_all_ranks
    half = process_group.compute_dtype(group.device) == torch.bfloat16
    same(group, "the GPUs' precisions (1 for bfloat16, 0 for another)", int(half))
    same(group, "the numbers of prepared copies of the images", len(dataset.indexes) // 2 - 1)
    for split, copy in sorted(dataset.indexes, key=lambda one: (one[0], one[1] or 0)):
        index = dataset.indexes[split, copy]
        if copy is None:
            same(group, f"the numbers of images in {index.folder}", len(index))
            same(group, f"the names of the images in {index.folder}", index.names_checksum)
            same(group, f"the names of the classes in {index.folder}", names_crc32(index.classes))
        same(group, f"the widths and heights of the images in {index.folder}", index.sizes_checksum)


def open_run_dataset(options: TrainOptions, recipe: Recipe) -> Dataset:
    """Return the images that the options name. Raises `DataError`."""
    root = data_root(recipe.data, options.data)
    return open_dataset(
        recipe, root, copies_root(root, options.copies), scale=options.scale, seed=recipe.seed,
        skip_bad=options.skip_bad, log=lambda text: print(text, flush=True),
    )  # fmt: skip


def resume_path(options: TrainOptions) -> Path | None:
    """Return the checkpoint that the options name, None for the beginning."""
    return (
        checkpoint_to_resume(options)
        if options.resume == "auto"
        else None
        if options.resume == "none"
        else Path(options.resume)
    )


def resume_or_start(trainer: Trainer, path: Path | None) -> None:
    """Go on from a checkpoint, if there is one. Raises `Expected` when it cannot be used."""
    if path is None:
        load_initial_weights(trainer)
        return
    try:
        state = checkpoint_io.load_checkpoint(path)
    except (ValueError, FileNotFoundError) as error:
        raise TrainingError(str(error)) from error
    trainer.restore(state)
    if trainer.group.is_first:
        print(f"resumed from {path} at step {trainer.steps_done}", flush=True)


def load_initial_weights(trainer: Trainer) -> None:
    """Begin with the weights that the recipe names. Other people's networks and files must be the same everywhere."""
    model, group = trainer.recipe.model, trainer.group
    if model.weights:
        pretrained.load_pretrained(trainer.model, model.weights, partial(print, flush=True) if group.is_first else str)
    if group.world_size > 1 and (model.weights or model.name not in registry.MODEL_BUILDERS):
        process_group.check_same_on_all_ranks(
            group, "the first weights of the network", registry.weights_crc32(trainer.model)
        )


def checkpoint_to_resume(options: TrainOptions) -> Path | None:
    """Return the newest whole checkpoint of this attempt or the last one before it that has any."""
    folder = options.out / "checkpoints"
    for number in range(options.attempt, 0, -1):
        found = checkpoint_io.newest_checkpoint(folder / f"{number:06d}")
        if found:
            return found
    return None


def publish_result(trainer: Trainer, attempt_start_time: float, recipe: Recipe) -> dict[str, Any]:
    """Write result.json, and return what is in it: there is one only when everything was done, or its target met."""
    epochs = [
        row | trainer.time_breakdown.epoch_times(row["epoch"]) for row in trainer.history
    ]  # the last one's save is known now
    trained, validated = (sum(one[name] for one in epochs) for name in ("train_seconds", "val_seconds"))
    goal = trainer.options.target or target.Target.from_options("", recipe)
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "state": "done",
        **run_summary(epochs),
        "images": trainer.images_seen,
        "steps": trainer.steps_done,
        "epochs": epochs,
        "target": target.target_outcome(goal, epochs),
        "clock": {"begun": trainer.run_start_time, "seconds": epochs[-1].get("clock")},
        "train_images": trainer.schedule.images,
        "seconds": {
            "attempt": time.time() - attempt_start_time,
            "training": trained,
            "validation": validated,
            "waiting for images": trainer.time_breakdown.wait_seconds,
            "first step to last": trainer.time_summary["wall"],
        },
        "goodput": trainer.goodput,
        "where": trainer.time_summary,
        "procs": trainer.group.world_size,
        "precision": str(trainer.preprocessor.compute_dtype).removeprefix("torch."),
        "device": trainer.group.device.type,
        "seed": recipe.seed,
        "schedule": trainer.schedule.table(),
        "schedule_gpus": trainer.schedule.gpus,
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    filesystem.create_once(trainer.options.out / "result.json", filesystem.to_json_bytes(result))
    return result
