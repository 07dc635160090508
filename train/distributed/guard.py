"""Tells whether NCCL's sums are right, and goes back by a step if not: for processes on GPUs that go on in place.

A kernel of NCCL that is aborted takes what lies in its buffers for data, and sends it on as such (NCCL 2.30,
src/device: prims_ll.h, prims_simple.h). So an abort in one process may make the sums of all wrong, and nobody gets an
error. An update that the host has launched behind these sums cannot be taken back.

So each step ends with a *sentinel*: one more sum, to which each process contributes the nonce of the step times its own
*word*. The GPU reads the word from the host's memory in the order of its stream, after the sums of the step. The word
is 1, and becomes 0 before the process aborts. If the sum is the nonce times the number of processes, each of them has
read a 1 after its sums. So none had been aborted, and all are right. The nonce changes with each sentinel: an old sum
that lies in a buffer is not that of this step.

The host judges a step's sentinel when it has launched the next backward pass, so that the GPU does not wait for the
host. If it is right, the state is copied on the GPU before the next update changes it. If it is wrong, that copy is the
state after the last right step.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def nonce_of(token: str, number: int) -> int:
    """Return the nonce of a sentinel: 31 random bits, never 0, the same in all processes with this token."""
    return 1 + int.from_bytes(hashlib.blake2b(f"{token} {number}".encode(), digest_size=4).digest(), "big") // 2


class Ledger:
    """The sentinels of one process, and which of them are known to be right. It needs no device."""

    def __init__(self, world_size: int, token: str) -> None:
        self.world_size, self.token = world_size, token
        self.sent = self.right = 0  # numbers of sentinels; the right ones are the first ones
        self.is_ahead = False  # an update has been launched behind sums that are not known to be right

    def next_nonce(self) -> int:
        """Return the nonce of the sentinel that is sent now."""
        self.sent += 1
        return nonce_of(self.token, self.sent)

    def judge(self, total: int) -> None:
        """Take in the sum of the oldest sentinel that is not judged yet.

        Raises `RuntimeError` when it is wrong. Then all later ones are too, because another nonce is expected.
        """
        if total != self.world_size * nonce_of(self.token, self.right + 1):
            raise RuntimeError("NCCL: the sums of a step are not known to be right: another process is gone")
        self.right += 1
        self.is_ahead = False


class StateCopy:
    """A copy, on the same device, of all tensors in nested dicts and lists, and of all other values in these dicts."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}  # by their `id`: some are met twice
        self.pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # copies and tensors of one kind
        self.values: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # each dict, and its content when it was saved

    @torch.no_grad()
    def save(self, roots: Sequence[object]) -> None:
        """Copy what the roots contain now. The host does not wait for it."""
        known, self.tensors, self.values = self.tensors, {}, []
        self._collect(roots)
        if known.keys() != self.tensors.keys():
            self.pairs = []  # before others are made: two copies may not fit
            by_kind: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for tensor in self.tensors.values():
                copies, tensors = by_kind.setdefault((tensor.device, tensor.dtype), ([], []))
                copies.append(torch.empty_like(tensor))
                tensors.append(tensor)
            self.pairs = [*by_kind.values()]
        for copies, tensors in self.pairs:
            torch._foreach_copy_(copies, tensors)

    def _collect(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, dict):
            self.values.append((value, dict(value)))
            self._collect([*value.values()])
        elif isinstance(value, list | tuple):
            for each in value:
                self._collect(each)

    @torch.no_grad()
    def restore(self) -> None:
        """Make all that was saved what it was then."""
        for values, saved in self.values:
            values.clear()
            values.update(saved)
        for copies, tensors in self.pairs:
            torch._foreach_copy_(tensors, copies)


class StepGuard:
    """Sends and judges the sentinels of one process, and keeps the copy of its state. On a CPU nothing is asynchronous.

    All processes must call `check_step` and `confirm` in the same order, with the same token.
    """

    def __init__(self, world_size: int, device: torch.device, token: str) -> None:
        self.device = device
        self.ledger = Ledger(world_size, token)
        # The GPU reads pinned memory when its stream comes to the copy, other memory is read at the call.
        self.word = torch.ones(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()  # sums, and when they are there
        self.copy = StateCopy()

    def poison(self) -> None:
        """Make all further sentinels wrong, also those that the host has launched. To be called before an abort."""
        self.word.zero_()

    def check_step(self, *changing: object) -> None:
        """Guard the sums of a step that have been launched, and judge those of the step before.

        Then save what the update may change, which is `changing`. Raises `RuntimeError` when the step before is wrong.
        """
        self._send()
        self._judge(all_but=1)
        self.copy.save(changing)
        self.ledger.is_ahead = True

    def confirm(self) -> None:
        """Wait for all sums until now. Raises `RuntimeError` when one is wrong, else the host may act on them."""
        self._send()
        self._judge()

    def go_back(self) -> bool:
        """Undo the last update, after the abort, unless its sums are known to be right; return whether it did so."""
        with contextlib.suppress(RuntimeError):
            self._judge()
        if self.ledger.is_ahead:
            self.copy.restore()
        self.copy = StateCopy()  # the memory is needed in the next group
        return self.ledger.is_ahead

    def _send(self) -> None:
        total = self.word.to(self.device, non_blocking=True) * self.ledger.next_nonce()
        dist.all_reduce(total)
        on_host = total.to("cpu", non_blocking=True)
        event = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if event:
            event.record()
        self.pending.append((on_host, event))

    def _judge(self, all_but: int = 0) -> None:
        while len(self.pending) > all_but:
            total, event = self.pending.popleft()
            if event:
                event.synchronize()
            self.ledger.judge(int(total.item()))
