"""From a batch of the loader to what the network takes: on the device, normalised, in the precision of the run."""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from train.data.loading.loader import Batch
from train.distributed import process_group


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of red, green and blue, from 0 to 1, by which a network's pixels are normalised."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        mean, std = (", ".join(f"{one:g}" for one in found) for found in (self.mean, self.std))
        return f"mean {mean}, deviation {std}"


IMAGENET_NORMALIZATION = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # all ResNets since 2015 use it


def normalization_of(net: nn.Module) -> Normalization:
    """Return how a network wants its pixels: timm's say it, and their files of weights were trained so; others are
    ImageNet's.
    """
    told = getattr(net, "pretrained_cfg", None) or getattr(net, "default_cfg", None)
    pair = [told.get(name) for name in ("mean", "std")] if isinstance(told, dict) else []
    good = [tuple(map(float, one)) for one in pair if isinstance(one, tuple | list) and len(one) == 3]
    return Normalization(*good) if len(good) == 2 else IMAGENET_NORMALIZATION


class BatchPreprocessor:
    """What a device does with a batch. `dtype` is that of scores and losses; `warmed` are the shapes (images, height,
    width) that the warm-up has met.
    """

    def __init__(
        self,
        device: torch.device,
        score_dtype: torch.dtype = torch.float32,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> None:
        self.device, self.score_dtype, self.normalization = device, score_dtype, normalization
        self.compute_dtype = process_group.compute_dtype(device)
        self.warmed_shapes: set[tuple[int, ...]] = set()
        pair = (normalization.mean, normalization.std)
        self.mean, self.std = (torch.tensor(one, device=device).view(1, 3, 1, 1) * 255 for one in pair)

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, h, w, 3] to normalised [n, 3, h, w] in channels-last memory, and labels [n], on the device.

        Kernels are searched for shapes that the warm-up has met, so for none again: a rest of few images takes what
        cuDNN thinks best.
        """
        torch.backends.cudnn.benchmark = tuple(batch.images.shape[:3]) in self.warmed_shapes
        images = batch.images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        labels = torch.from_numpy(batch.labels).to(self.device, non_blocking=True)
        return images.to(self.score_dtype).sub_(self.mean).div_(self.std), labels

    def autocast(self) -> Any:
        """Half precision where the GPU has it, nothing on a CPU."""
        return torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32)


def seed_dropout(seed: int, step: int, chunk: int) -> None:
    """Let what a network drops out of a chunk depend on (seed, step, chunk) only: the same after a resume, and on any
    number of processes.
    """
    torch.manual_seed(zlib.crc32(f"{seed} {step} {chunk}".encode()))
