"""From a batch of the loader to what the network takes: on the device, normalised, in the precision of the run."""

import zlib
from typing import Any

import torch

from . import distributed
from .data.loader import Batch

# of ImageNet's pixels; all ResNets since 2015 use them
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Inputs:
    """What a device does with a batch. `dtype` is that of scores and losses; `warmed` are the shapes (images, height,
    width) that the warm-up has met.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.precision = distributed.precision(device)
        self.warmed: set[tuple[int, ...]] = set()
        self.mean, self.std = (torch.tensor(one, device=device).view(1, 3, 1, 1) * 255 for one in (MEAN, STD))

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [n, h, w, 3] to normalised [n, 3, h, w] in channels-last memory, and labels [n], on the device.

        Kernels are searched for shapes that the warm-up has met, so for none again: a rest of few images takes what
        cuDNN thinks best.
        """
        torch.backends.cudnn.benchmark = tuple(batch.images.shape[:3]) in self.warmed
        images = batch.images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        labels = torch.from_numpy(batch.labels).to(self.device, non_blocking=True)
        return images.to(self.dtype).sub_(self.mean).div_(self.std), labels

    def autocast(self) -> Any:
        """Half precision where the GPU has it, nothing on a CPU."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)


def draw_anew(seed: int, step: int, chunk: int) -> None:
    """Let what a network drops out of a chunk depend on (seed, step, chunk) only: the same after a resume, and on any
    number of processes.
    """
    torch.manual_seed(zlib.crc32(f"{seed} {step} {chunk}".encode()))
