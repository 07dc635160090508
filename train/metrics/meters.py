"""Meters that a training process reads about once a second: losses and hits of its steps, traffic of the network."""

import time

import torch

from train.tools.host import read_interface_bytes

from .accuracy import count_correct


class StepMeter:
    """Losses and hits of an interval of steps, summed on the device, so that no step waits for it.

    `losses` [capacity] has the summed loss of each step, `correct` [capacity, 2] its top-1 and top-5 hits, both as
    float64. `capacity` is the largest number of steps in an interval.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.losses = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.correct = torch.zeros(capacity, 2, dtype=torch.float64, device=device)
        self.steps = 0

    @torch.no_grad()
    def add(self, loss: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, share: float) -> None:
        """Add a chunk of the current step: its summed loss and its hits.

        `share`, which the loss contains, is the weight of its images: less than 1 where some are repeated to fill it.
        """
        self.losses[self.steps] += loss
        self.correct[self.steps] += torch.stack(count_correct(scores, labels)) * share

    def end_step(self) -> None:
        """Count the step: the chunks that follow belong to the next."""
        self.steps += 1

    def reset(self) -> None:
        """Begin the next interval."""
        self.losses.zero_()
        self.correct.zero_()
        self.steps = 0


class NetworkMeter:
    """Traffic of all network cards of this machine but the loopback."""

    def __init__(self) -> None:
        self.last_reading = (time.perf_counter(), *self._read_counters())

    @staticmethod
    def _read_counters() -> tuple[int, int]:
        counts = read_interface_bytes().values()
        return sum(received for received, _ in counts), sum(sent for _, sent in counts)

    def rates(self) -> dict[str, float]:
        """Return the Gbit/s received and sent since the last call, by their names in TensorBoard."""
        previous = self.last_reading
        self.last_reading = (time.perf_counter(), *self._read_counters())
        seconds, received, sent = (new - old for new, old in zip(self.last_reading, previous, strict=True))
        gbit_per_second = 8e-9 / max(seconds, 1e-9)  # of one byte
        return {"net/receive_gbit": received * gbit_per_second, "net/send_gbit": sent * gbit_per_second}
