"""The guard of NCCL's sums, against a model of what an aborted kernel does, and the copy of the state.

The model is our reading of src/device of NCCL 2.30, and not NCCL itself. It makes rare schedules frequent.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from train.distributed import guard
from train.distributed.guard import Ledger, StateCopy, StepGuard

CPU = torch.device("cpu")
RANKS, BUCKETS, STEPS = 3, 2, 6
CHUNKS = BUCKETS * RANKS  # of a step's gradients
SLOTS, SPINS = 8, 12  # of a connection; before a kernel looks at the abort flag: 10,000 in NCCL


class Ring:
    """A model of GPUs in a ring, one for each rank. Each runs its kernels in order: a step's sums, then its sentinel.

    A kernel that has waited in vain and sees its rank's abort flag waits no more: it takes what lies in the slot, which
    is an old value, and goes on to send, with valid flags. The next kernel begins afresh.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        draw = rng.randrange
        self.gradients = [[[draw(1000, 9999) for _ in range(CHUNKS)] for _ in range(RANKS)] for _ in range(STEPS)]
        self.slots = [[(-1, 0)] * SLOTS for _ in range(RANKS)]  # what a rank receives: (number, value)
        self.received, self.sent = [0] * RANKS, [0] * RANKS
        self.words, self.aborted = [1] * RANKS, [False] * RANKS
        self.token = str(rng.random())
        self.ledgers = [Ledger(RANKS, self.token) for _ in range(RANKS)]
        self.results: list[list[tuple[list[int], int]]] = [[] for _ in range(RANKS)]  # sums and sentinel of each step

    def true_sums(self, step: int) -> list[int]:
        return [sum(chunk) for chunk in zip(*self.gradients[step], strict=True)]

    def run_kernels(self, rank: int) -> Iterator[None]:
        """Run all kernels of a rank; each `yield` is one spin or one operation."""
        for step in range(STEPS):
            sums: list[int] = []
            for bucket in range(BUCKETS):
                values = self.gradients[step][rank][bucket * RANKS :][:RANKS]
                yield from self.all_reduce(rank, values)
                sums += values
            sentinel = [self.words[rank] * self.ledgers[rank].next_nonce()] * RANKS  # read after the buckets' kernels
            yield from self.all_reduce(rank, sentinel)
            self.results[rank].append((sums, sentinel[0]))

    def all_reduce(self, rank: int, values: list[int]) -> Iterator[None]:
        following, gives_up = (rank + 1) % RANKS, False
        for stage in range(2 * RANKS - 1):
            chunk = (rank - 1 - stage) % RANKS
            if stage:
                number, spins = self.received[rank], 0
                while self.slots[rank][number % SLOTS][0] != number and not gives_up:
                    spins += 1
                    gives_up = spins >= SPINS and self.aborted[rank]
                    yield
                value = self.slots[rank][number % SLOTS][1]
                self.received[rank] += 1
                values[chunk] = values[chunk] + value if stage < RANKS else value
            if stage < 2 * RANKS - 2:
                spins = 0
                while self.sent[rank] >= self.received[following] + SLOTS and not gives_up:
                    spins += 1
                    gives_up = spins >= SPINS and self.aborted[rank]
                    yield
                self.slots[following][self.sent[rank] % SLOTS] = (self.sent[rank], values[chunk])
                self.sent[rank] += 1
            yield

    def run(self, freezes: bool, poisons: bool) -> None:
        """Kill or freeze one rank. The ranks abort at different times; one that freezes continues, and aborts too."""
        rng, kernels, live = self.rng, [*map(self.run_kernels, range(RANKS))], set(range(RANKS))
        victim, fault_time = rng.randrange(RANKS), rng.randrange(20, 300)
        return_time = fault_time + rng.randrange(5, 400)
        aborting = [rank for rank in range(RANKS) if rank != victim or freezes]
        alarms = {rank: fault_time + rng.randrange(10, 400) for rank in aborting}
        for time in itertools.count():
            if time == fault_time:
                live.discard(victim)
            if freezes and time == return_time:
                live.add(victim)
            for rank, alarm in alarms.items():
                if poisons and time == alarm:
                    self.words[rank] = 0
                if time == alarm + 1:
                    self.aborted[rank] = True
            if live:
                rank = rng.choice(sorted(live))
                for _ in range(rng.choice((1, 1, 1, 3, 10))):
                    if next(kernels[rank], "ended") == "ended":
                        live.discard(rank)
                        break
            elif time > max(return_time, *alarms.values()):
                return


def count_steps(monkeypatch: pytest.MonkeyPatch, trials: int, freezes: bool, poisons: bool = True) -> tuple[int, int]:
    """Return how many steps the GPUs have finished, and how many of those that the guard accepts have wrong sums.

    The guard of each rank gets what the model has summed. The state that it keeps must be that of the steps it accepts.
    """
    rng, steps, wrong = random.Random(1), 0, 0
    for _ in range(trials):
        ring = Ring(rng)
        ring.run(freezes, poisons)
        for results in ring.results:
            totals = iter([total for _, total in results])
            monkeypatch.setattr(
                "torch.distributed.all_reduce", lambda values, totals=totals: values.fill_(next(totals))
            )
            own = StepGuard(RANKS, CPU, ring.token)
            state, expected = torch.zeros(CHUNKS, dtype=torch.int64), torch.zeros(CHUNKS, dtype=torch.int64)
            try:
                for sums, _ in results:
                    own.check_step([state])
                    state += torch.tensor(sums)
            except RuntimeError:
                pass
            own.go_back()
            for step, (sums, _) in enumerate(results[: own.ledger.right]):
                expected += torch.tensor(sums)
                wrong += sums != ring.true_sums(step)
            assert torch.equal(state, expected)
            steps += len(results)
    return steps, wrong


@pytest.mark.parametrize("freezes", [False, True], ids=["kill", "freeze"])
def test_guard_accepts_no_wrong_step(freezes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, wrong = count_steps(monkeypatch, 1600, freezes)
    assert steps > (28_000 if freezes else 22_000) and not wrong


@pytest.mark.parametrize(("constant", "freezes"), [(True, False), (True, True), (False, True)])
def test_without_nonce_or_poison_wrong_steps_are_accepted(
    constant: bool, freezes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    if constant:
        monkeypatch.setattr(guard, "nonce_of", lambda *_: 1)
    assert count_steps(monkeypatch, 200, freezes, poisons=False)[1] > 0


def test_nonces_differ_and_fit_into_the_sum() -> None:
    nonces = [guard.nonce_of(token, number) for token in ("a", "b") for number in range(1000)]
    assert len({*nonces}) == len(nonces) and min(nonces) > 0 and max(nonces) <= 2**31


@pytest.mark.parametrize("poisoned", [False, True])
def test_host_acts_only_on_sums_that_no_abort_has_met(poisoned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    own = StepGuard(1, CPU, "token")
    if poisoned:
        own.poison()
        with pytest.raises(RuntimeError, match=r"^NCCL: the sums of a step are not known to be right"):
            own.confirm()
    else:
        own.confirm()
    assert own.ledger.right == 1 - poisoned and not own.go_back()


def test_state_copy_restores_tensors_numbers_and_what_was_not_there() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    state, scale = StateCopy(), torch.ones(())
    values: dict[str, Any] = {"scale": scale, "steps": 3, "again": scale}
    for first in (True, False):  # before the first step, the optimizer has no state
        state.save([vars(optimizer), values])
        saved = [weight.detach().clone(), *(each.clone() for each in optimizer.state[weight].values())]
        weight.grad = torch.full((2,), 5.0)
        optimizer.step()
        scale.mul_(2)
        values.update(steps=4, more=5)
        state.restore()
        assert [*optimizer.state] == ([] if first else [weight])
        assert values == {"scale": scale, "steps": 3, "again": scale} and scale == 1
        assert all(map(torch.equal, saved, [weight, *optimizer.state[weight].values()]))
        optimizer.step()
