"""Turns a loader's batch into the network's input: on the device, normalized, in the precision of the run."""

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from train.data.loading.loader import Batch
from train.distributed import process_group


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of red, green and blue, on a scale from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in channels) for channels in (self.mean, self.std))
        return f"mean {mean}, standard deviation {std}"


IMAGENET_NORMALIZATION = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # of all ResNets since 2015


def normalization_of(model: nn.Module) -> Normalization:
    """Return the normalization that a network expects.

    timm's networks state theirs, and their published weights were trained with it. All others get ImageNet's.
    """
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if not isinstance(config, dict):
        return IMAGENET_NORMALIZATION
    channels = [config.get("mean"), config.get("std")]
    valid = [tuple(map(float, values)) for values in channels if isinstance(values, tuple | list) and len(values) == 3]
    return Normalization(*valid) if len(valid) == 2 else IMAGENET_NORMALIZATION


class BatchPreprocessor:
    """Moves batches to a device and normalizes them.

    `score_dtype` is the type of the inputs, scores and losses. `compute_dtype` is the type that autocast computes in,
    by the recipe's `precision`. `warmed_shapes` holds the batch shapes (images, height, width) that training and full
    validation batches have had so far.
    """

    def __init__(
        self,
        device: torch.device,
        score_dtype: torch.dtype = torch.float32,
        normalization: Normalization = IMAGENET_NORMALIZATION,
        precision: str = "auto",
        kernel_search: bool = False,
    ) -> None:
        self.device = device
        self.score_dtype = score_dtype
        self.normalization = normalization
        self.compute_dtype = process_group.compute_dtype(device, precision)
        self.kernel_search = kernel_search
        self.warmed_shapes: set[tuple[int, ...]] = set()
        is_gpu = device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self.mean, self.std = (
            torch.tensor(values, device=device).view(1, 3, 1, 1) * 255
            for values in (normalization.mean, normalization.std)
        )

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels on the device.

        Images: uint8 [n, h, w, 3] becomes normalized [n, 3, h, w] in channels-last memory. Labels: [n].

        With the recipe's `kernel_search`, cuDNN has searched the shapes of the warm-up and finds their kernels in its
        cache. For any other, such as a remainder of a few images, it uses its heuristic: no search within a phase.
        """
        allow_kernel_search(self.kernel_search and tuple(batch.images.shape[:3]) in self.warmed_shapes)
        images, labels = self._on_device(batch)
        if self.copy_stream is not None and self.score_dtype == torch.float32:
            return self.normalize_in_one_pass(images), labels
        return images.to(self.score_dtype).sub_(self.mean).div_(self.std), labels

    def _on_device(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [n, 3, h, w] and labels on the device.

        On a GPU a stream of its own copies them: while the GPU still computes the step before, which the host has
        queued already. The step waits for the copy, and the memory is not used again before the step is done.
        """
        labels = torch.from_numpy(batch.labels)
        if self.copy_stream is None:
            return batch.images.to(self.device).permute(0, 3, 1, 2), labels.to(self.device)
        with torch.cuda.stream(self.copy_stream):
            images = batch.images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
        compute_stream = torch.cuda.current_stream(self.device)
        compute_stream.wait_stream(self.copy_stream)
        for tensor in (images, labels):
            tensor.record_stream(compute_stream)
        return images.permute(0, 3, 1, 2), labels

    def normalize_in_one_pass(self, images: torch.Tensor) -> torch.Tensor:
        """Return uint8 images [n, 3, h, w] normalized in `compute_dtype`: one kernel, where (x - mean) / std are three.

        The arithmetic is in float32: x / std - mean / std.
        """
        out = torch.empty_like(images, dtype=self.compute_dtype, memory_format=torch.preserve_format)
        return torch.addcmul(-self.mean / self.std, images, 1 / self.std, out=out)

    def autocast(self, cache_enabled: bool = True) -> torch.autocast:
        """Return a context of half precision on a GPU; it does nothing on a CPU."""
        is_half = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, self.compute_dtype, is_half, cache_enabled)


def allow_kernel_search(is_allowed: bool) -> None:
    """Let cuDNN choose kernels by measuring them, or by its heuristic; by the latter always in a deterministic run."""
    torch.backends.cudnn.benchmark = is_allowed and not torch.backends.cudnn.deterministic


def seed_dropout(seed: int, step: int, chunk: int) -> None:
    """Seed torch so that dropout depends on (seed, step, chunk) only.

    A resumed run, and one on another number of processes, then drops the same values. `step` counts from the start of
    the run, `chunk` over all ranks.
    """
    torch.manual_seed(zlib.crc32(f"{seed} {step} {chunk}".encode()))
