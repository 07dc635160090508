"""Meters of throughput and network traffic."""

import time
from pathlib import Path

import torch

from .accuracy import count_correct


class StepMeter:
    """Sums of a stretch of steps, kept on the device until `read`."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.losses = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.correct = torch.zeros(2, dtype=torch.float64, device=device)
        self.steps = 0

    @torch.no_grad()
    def add(self, loss: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, share: float) -> None:
        """Count a chunk: its summed loss, to which `share` was applied, and its hits."""
        self.losses[self.steps] += loss
        self.correct += torch.stack(count_correct(scores, labels)) * share

    def end_step(self) -> None:
        """The chunks that follow belong to the next step."""
        self.steps += 1

    def reset(self) -> None:
        """Begin the next stretch."""
        self.losses.zero_()
        self.correct.zero_()
        self.steps = 0


class NetworkMeter:
    """Bytes through this machine's network cards, the loopback left out (/proc/net/dev)."""

    def __init__(self) -> None:
        self.last_reading = (time.perf_counter(), *self._read_counters())

    @staticmethod
    def _read_counters() -> tuple[int, int]:
        received = sent = 0
        for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != "lo":
                received, sent = (
                    received + int(numbers.split()[0]),
                    sent + int(numbers.split()[8]),
                )
        return received, sent

    def rates(self) -> dict[str, float]:
        """Return Gbit/s received and sent since the last call."""
        before, self.last_reading = self.last_reading, (time.perf_counter(), *self._read_counters())
        seconds, received, sent = (now - then for now, then in zip(self.last_reading, before, strict=True))
        factor = 8e-9 / max(seconds, 1e-9)
        return {"net/receive_gbit": received * factor, "net/send_gbit": sent * factor}
