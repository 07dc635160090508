"""A plain training loop as torchvision's references write it: the peer of cifar_peer.py. One JSON line per event.

    .venv/bin/python benchmarks/training/baseline_loop.py --data DIR --epochs 3

One size, one batch: a listing of class folders, PIL, RandomCrop(32, padding=4), flip, ToTensor and Normalize for each
image, a DataLoader with a worker per core kept between epochs; SGD with Nesterov momentum and one cycle of the rate; a
whole validation after each epoch. The network is ours, with the same first weights.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, PADDING = 32, 4
CORE_COUNT = len(os.sched_getaffinity(0))


class ImageFolderDataset(Dataset[tuple[torch.Tensor, int]]):
    """<root>/<class>/<name>, one image at a time, as ImageFolder with transforms."""

    def __init__(self, root: Path, augment: bool) -> None:
        classes = sorted(one.name for one in root.iterdir() if one.is_dir())
        self.items = [
            (str(path), label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())
        ]
        self.classes, self.augment = classes, augment
        self.mean, self.std = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        """Return normalised floats [3, 32, 32] and the label."""
        path, label = self.items[number]
        with open(path, "rb") as file:  # noqa: PTH123
            image = Image.open(file).convert("RGB")
        if self.augment:
            left, top = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
            padded = Image.new("RGB", (SIZE + 2 * PADDING, SIZE + 2 * PADDING))
            padded.paste(image, (PADDING, PADDING))
            image = padded.crop((left, top, left + SIZE, top + SIZE))
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(self.mean).div_(self.std), label


def init_worker(_: int) -> None:
    """One thread each; DataLoader has seeded `random`."""
    torch.set_num_threads(1)


def make_loader(data: ImageFolderDataset, batch: int, shuffle: bool) -> DataLoader[Any]:
    """A DataLoader with a worker per core."""
    return DataLoader(
        data, batch_size=batch, shuffle=shuffle, num_workers=CORE_COUNT, persistent_workers=True, worker_init_fn=init_worker,
        multiprocessing_context="fork",
    )  # fmt: skip


def print_event(kind: str, **values: Any) -> None:
    """Print an event with its time."""
    print(json.dumps({"kind": kind, "time": time.time(), **values}), flush=True)


@torch.no_grad()
def validate(model: nn.Module, batches: DataLoader[Any]) -> float:
    """Top-1 in percent."""
    model.eval()
    right = seen = 0
    for images, labels in batches:
        images = images.to(memory_format=torch.channels_last)
        right += int((model(images).argmax(1) == labels).sum())
        seen += len(labels)
    model.train()
    return 100 * right / seen


def train(options: argparse.Namespace) -> None:
    """Train, and say the first step and each epoch."""
    from train.models import registry
    from train.optim import factory
    from train.recipe.components import Model, Optim

    torch.manual_seed(options.seed)
    torch.set_num_threads(CORE_COUNT)
    data = ImageFolderDataset(options.data / "train", augment=True)
    training, validation = (
        make_loader(data, options.batch, shuffle=True), make_loader(ImageFolderDataset(options.data / "val", augment=False), 256, shuffle=False),
    )  # fmt: skip
    model = registry.build_model(Model(name="resnet10_cifar", zero_gamma=False), len(data.classes), options.seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    settings = Optim(momentum=0.9, nesterov=True, weight_decay=5e-4, bias_decay=False)
    optimizer = factory.build_optimizer(model, settings)
    steps = options.epochs * len(training)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps, pct_start=options.warm_up)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(options.epochs):
        for number, (images, labels) in enumerate(training):
            if not epoch and not number:
                print_event("first step")
            loss = criterion(model(images.to(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
        trained = time.time()
        top1 = validate(model, validation)
        print_event("epoch", epoch=epoch + 1, top1=top1, trained=trained)


def main(argv: Sequence[str] | None = None) -> None:
    """Train once."""
    parser = argparse.ArgumentParser(description="A plain training loop on CIFAR-10 as JPEG files.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--warm-up", type=float, default=0.3, help="part of the steps in which the rate rises")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args(argv))


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
