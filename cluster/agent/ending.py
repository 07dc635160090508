"""Why a machine's part of a job ends: the job's result, a stop request, the time limit, or a notice to leave."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.state.membership import IDLE_PHASES
from cluster.state.run_folder import stop_reason
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase, MachineState
from train.tools.agent_protocol import RESULT_FILE, Fault
from train.tools.files import is_visible

from .watchdog import SAVE_GRACE_SECONDS, Watchdog


class JobFinished(Exception):
    """The job has ended on this machine. `fault` is MACHINE when this machine is broken, `reason` one line or ""."""

    def __init__(self, state: MachineState, reason: str = "", fault: Fault = Fault.NONE) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.fault = fault


def broken_machine_end(spec: JobSpec, problem: str) -> JobFinished:
    """Return the end of a broken machine's part of the job: a rented one is exchanged, another one stays as it is."""
    if spec.cloud:
        return JobFinished(MachineState.LEFT, problem, Fault.MACHINE)
    return JobFinished(MachineState.FAILED, f"{problem}; restart the machine", Fault.MACHINE)


@dataclass
class EndConditions:
    """The conditions under which this machine's part of the job ends. `stop_reason` is "" until the job has to stop."""

    spec: JobSpec
    shared: Path
    watchdog: Watchdog
    clock: Callable[[], float] = time.monotonic
    stop_reason: str = ""
    stop_time: float = 0.0  # when the job was first seen to have to stop

    def check(self, phase: AgentPhase, has_made_steps: bool) -> bool:
        """Return whether the trainers have to save and exit, because the job has to stop.

        `has_made_steps` says whether there is something to save. Raises `JobFinished` when the job has ended here.
        """
        if phase != AgentPhase.RUNNING and is_visible(self.shared / RESULT_FILE):
            raise JobFinished(MachineState.DONE)
        if not self.stop_reason:
            self.stop_reason = stop_reason(self.shared) or self.watchdog.limit_reason
            self.stop_time = self.clock()
        can_save = has_made_steps and phase == AgentPhase.RUNNING
        if self.stop_reason:
            if not can_save or self.clock() - self.stop_time > SAVE_GRACE_SECONDS:
                raise JobFinished(MachineState.STOPPED, self.stop_reason)
            return True
        if self.watchdog.leave_reason:
            must_wait = can_save or phase in IDLE_PHASES  # the other machines need the last steps to be saved
            if not must_wait or self.watchdog.seconds_left() <= 0:
                is_only_machine = len(self.spec.machine_names) == 1 and not self.spec.cloud
                state = MachineState.STOPPED if is_only_machine else MachineState.LEFT
                raise JobFinished(state, self.watchdog.leave_reason)
        return False
