"""A plain training loop in the style of torchvision's references: the peer of cifar_baseline.py. Prints JSON lines.

    .venv/bin/python benchmarks/training/baseline_loop.py --data DIR

One image size and one batch size. Images are listed from class folders and go one by one through PIL, RandomCrop(32,
padding=4), flip, ToTensor and Normalize, in a DataLoader with one worker per core that is kept between epochs. SGD with
Nesterov momentum and one cycle of the learning rate; a whole validation after each epoch. The network is ours, with the
same initial weights.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZE, PADDING = 32, 4
EPOCHS, BATCH = 2, 128
PEAK_LR, WARM_UP = 0.2, 0.3  # of the cycle; the learning rate rises in this fraction of the steps
CORE_COUNT = len(os.sched_getaffinity(0))


class ImageFolderDataset(Dataset[tuple[torch.Tensor, int]]):
    """The images <root>/<class>/<name>, opened one at a time, like torchvision's ImageFolder with transforms."""

    def __init__(self, root: Path, augment: bool) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.samples = [
            (str(path), label) for label, name in enumerate(self.classes) for path in sorted((root / name).iterdir())
        ]
        self.augment = augment
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        """Return the normalised pixels, float32 [3, 32, 32], and the label."""
        path, label = self.samples[number]
        with open(path, "rb") as file:  # noqa: PTH123 - as torchvision does
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
    """Limit a worker to one thread. The DataLoader has seeded `random`."""
    torch.set_num_threads(1)


def make_loader(dataset: ImageFolderDataset, batch: int, shuffle: bool) -> DataLoader[Any]:
    """Return a DataLoader with one worker per core."""
    return DataLoader(
        dataset,
        batch_size=batch,
        shuffle=shuffle,
        num_workers=CORE_COUNT,
        persistent_workers=True,
        worker_init_fn=init_worker,
        multiprocessing_context="fork",
    )


def print_event(kind: str, **values: Any) -> None:
    """Print an event with its time as a line of JSON."""
    print(json.dumps({"kind": kind, "time": time.time(), **values}), flush=True)


@torch.no_grad()
def validate(model: nn.Module, batches: DataLoader[Any]) -> float:
    """Return the top-1 accuracy in percent."""
    model.eval()
    correct = total = 0
    for images, labels in batches:
        images = images.to(memory_format=torch.channels_last)
        correct += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    model.train()
    return 100 * correct / total


def train(options: argparse.Namespace) -> None:
    """Train, and print an event at the first step and after each epoch."""
    from train.models import registry
    from train.optim import factory
    from train.recipe.components import Model, Optim

    torch.manual_seed(options.seed)
    torch.set_num_threads(CORE_COUNT)
    dataset = ImageFolderDataset(options.data / "train", augment=True)
    training_batches = make_loader(dataset, BATCH, shuffle=True)
    validation_batches = make_loader(ImageFolderDataset(options.data / "val", augment=False), 256, shuffle=False)
    model = registry.build_model(Model(name="resnet10_cifar", zero_gamma=False), len(dataset.classes), options.seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    settings = Optim(momentum=0.9, nesterov=True, weight_decay=5e-4, bias_decay=False)
    optimizer = factory.build_optimizer(model, settings)
    steps = EPOCHS * len(training_batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, steps, pct_start=WARM_UP)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(EPOCHS):
        for step, (images, labels) in enumerate(training_batches):
            if epoch == 0 and step == 0:
                print_event("first step")
            loss = criterion(model(images.to(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        trained = time.time()
        top1 = validate(model, validation_batches)
        print_event("epoch", epoch=epoch + 1, top1=top1, trained=trained)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description="A plain training loop on CIFAR-10 as JPEG files.")
    parser.add_argument("--data", type=Path, required=True, help="folder with train/<class>/ and val/<class>/")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    train(parser.parse_args(argv))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
