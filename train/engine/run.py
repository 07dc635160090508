"""One attempt of a run, from the options to result.json."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from train.data.index.base import names_crc
from train.data.loading.dataset import Dataset, copies_of, open_dataset, root_of
from train.data.loading.loader import Images
from train.data.order.batch_sampler import Feed
from train.distributed import process_group
from train.metrics import thumbnails
from train.metrics.rows import overall
from train.models import pretrained, registry
from train.recipe import target
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools import checkpoint_io, filesystem, process
from train.tools.errors import Expected
from train.tools.provenance import git_commit, versions

from .agent_channel import Report
from .options import Options
from .trainer import Asked, Trainer

SAVED = 3  # exit code of a process that was asked to end, and saved


def run(options: Options, recipe: Recipe, report: Report, dataset: Dataset | None = None) -> int:
    """Train from the start or a checkpoint to the end, on images that are open already, or not.

    Returns the exit code: 0 done, 3 asked to end.
    Raises `Expected`, `DataError`, `OSError` with one line that says what and where.
    """
    started = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    if dataset is None:
        report.say("indexing")
        dataset = open_images(options, recipe)
    path = chosen(options)
    begun = dataset.begun or started
    if report.rank == 0:
        begun = target.begin(options.out, begun, anew=options.attempt == 1 and path is None)
    report.say("joining")
    group = process_group.join()
    report.listen()
    recipe = options.target.near(dataset.recipe) if options.target else dataset.recipe
    gpus = options.gpus or (recipe.nominal_gpus if options.keep_batch else group.world)
    try:
        schedule = Schedule(recipe, len(dataset.train), gpus, options.max_steps)
    except ValueError as error:
        raise Expected(str(error)) from error
    agree(group, dataset)
    process_group.say_transport(group)
    if group.device.type == "cpu":
        threads = 1 if options.exact else options.threads or (os.cpu_count() or 1) // group.local_world
        torch.set_num_threads(max(1, threads))
        process.keep_memory()
    feed = Feed(schedule, dataset.indexes, recipe.seed, group.rank, group.world)
    trainer = Trainer(options, recipe, group, feed, len(dataset.train.classes), report)
    if group.first and schedule.note:
        print(schedule.note, flush=True)
    trainer.begun = begun
    if group.first and not thumbnails.kept(options.out):
        thumbnails.keep(dataset.indexes["val", dataset.recipe.phases[-1].copy], options.notes, options.attempt)
    resume(trainer, path)
    process_group.same_everywhere(group, "the steps to go on from", trainer.steps_done)
    if group.first and report.folder is None:  # an agent looks after its own
        (options.out / "result.json").unlink(missing_ok=True)  # of an earlier run, or of this one with another target
    try:
        trainer.train(Images(dataset.indexes, recipe.seed), process_group.workers(group, options.workers))
    except Asked:
        report.say("saved", step=trainer.steps_done)
        print(f"asked to end: saved at step {trainer.steps_done}", flush=True)
        os._exit(SAVED)  # the loader has batches in flight that nobody wants
    if group.first:
        result = publish(trainer, started, dataset.recipe)
        where = options.out / "result.json"
        print(f"done: top-1 {result['top1']:.2f} %  top-5 {result['top5']:.2f} %  {where}", flush=True)
        if result["target"]:
            print(target.sentence(result["target"]), flush=True)
    process_group.barrier(group)
    report.say("done", step=trainer.steps_done)
    process_group.leave(group)
    return 0


def agree(group: process_group.Group, dataset: Dataset) -> None:
    """Raise `Expected` unless all processes have the same images, read the same copies of them, and compute alike.

    Of a copy only the sizes are compared: that it is of the same images as the full-size set each has seen already.
    """
    same = process_group.same_everywhere
    half = process_group.precision(group.device) == torch.bfloat16
    same(group, "the GPUs' precisions (1 for bfloat16, 0 for another)", int(half))
    same(group, "the numbers of prepared copies of the images", len(dataset.indexes) // 2 - 1)
    for split, copy in sorted(dataset.indexes, key=lambda one: (one[0], one[1] or 0)):
        index = dataset.indexes[split, copy]
        if copy is None:
            same(group, f"the numbers of images in {index.folder}", len(index))
            same(group, f"the names of the images in {index.folder}", index.fingerprint)
            same(group, f"the names of the classes in {index.folder}", names_crc(index.classes))
        same(group, f"the widths and heights of the images in {index.folder}", index.shapes_crc)


def open_images(options: Options, recipe: Recipe) -> Dataset:
    """Return the images that the options name. Raises `DataError`."""
    root = root_of(recipe.data, options.data)
    return open_dataset(
        recipe, root, copies_of(root, options.copies), scale=options.scale, seed=recipe.seed,
        skip_bad=options.skip_bad, say=lambda text: print(text, flush=True),
    )  # fmt: skip


def chosen(options: Options) -> Path | None:
    """Return the checkpoint that the options name, None for the beginning."""
    return newest(options) if options.resume == "auto" else None if options.resume == "none" else Path(options.resume)


def resume(trainer: Trainer, path: Path | None) -> None:
    """Go on from a checkpoint, if there is one. Raises `Expected` when it cannot be used."""
    if path is None:
        start(trainer)
        return
    try:
        state = checkpoint_io.load(path)
    except (ValueError, FileNotFoundError) as error:
        raise Expected(str(error)) from error
    trainer.restore(state)
    if trainer.group.first:
        print(f"resumed from {path} at step {trainer.steps_done}", flush=True)


def start(trainer: Trainer) -> None:
    """Begin with the weights that the recipe names. Other people's networks and files must be the same everywhere."""
    model, group = trainer.recipe.model, trainer.group
    if model.weights:
        pretrained.load(trainer.model, model.weights, partial(print, flush=True) if group.first else str)
    if group.world > 1 and (model.weights or model.name not in registry.MAKERS):
        process_group.same_everywhere(group, "the first weights of the network", registry.fingerprint(trainer.model))


def newest(options: Options) -> Path | None:
    """Return the newest whole checkpoint of this attempt or the last one before it that has any."""
    folder = options.out / "checkpoints"
    for number in range(options.attempt, 0, -1):
        found = checkpoint_io.newest(folder / f"{number:06d}")
        if found:
            return found
    return None


def publish(trainer: Trainer, started: float, recipe: Recipe) -> dict[str, Any]:
    """Write result.json, and return what is in it: there is one only when everything was done, or its target met."""
    epochs = [row | trainer.times.row(row["epoch"]) for row in trainer.history]  # the last one's save is known now
    trained, validated = (sum(one[name] for one in epochs) for name in ("train_seconds", "val_seconds"))
    goal = trainer.options.target or target.Target.of("", recipe)
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "state": "done",
        **overall(epochs),
        "images": trainer.images_seen,
        "steps": trainer.steps_done,
        "epochs": epochs,
        "target": target.outcome(goal, epochs),
        "clock": {"begun": trainer.begun, "seconds": epochs[-1].get("clock")},
        "train_images": trainer.schedule.images,
        "seconds": {
            "attempt": time.time() - started,
            "training": trained,
            "validation": validated,
            "waiting for images": trainer.times.waited,
            "first step to last": trainer.where["wall"],
        },
        "goodput": trainer.goodput,
        "where": trainer.where,
        "procs": trainer.group.world,
        "precision": str(trainer.inputs.precision).removeprefix("torch."),
        "device": trainer.group.device.type,
        "seed": recipe.seed,
        "schedule": trainer.schedule.table(),
        "schedule_gpus": trainer.schedule.gpus,
        "versions": versions(),
        "git_commit": git_commit(),
    }
    filesystem.publish(trainer.options.out / "result.json", filesystem.as_json(result))
    return result
