"""The states of jobs and machines, by the names that files and output use for them."""

from collections.abc import Iterable
from enum import StrEnum


class JobState(StrEnum):
    """The state of a job."""

    WAITING = "waiting"  # in its queue
    BOOTING = "booting"
    ACQUIRING = "acquiring"  # machines are rented
    SETUP = "setup"
    RUNNING = "running"
    RECOVERING = "recovering"
    ENDING = "ending"  # it trains no more, and its rented machines are not known to be gone
    ADOPTED = "adopted"  # by another computer, which supervises it now: this one does not know how it goes on
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def phrase(self) -> str:
        """What follows "the job is" in a sentence."""
        return {JobState.SETUP: "being set up", JobState.ACQUIRING: "waiting for its machines"}.get(self, self.value)


class WorkKind(StrEnum):
    """What a job does: it trains a recipe, or runs a command of the user."""

    RECIPE = "recipe"
    COMMAND = "command"


def work_title(kinds: Iterable[WorkKind]) -> str:
    """Return the title of a column with the names of recipes, of commands, or of both."""
    present = set(kinds)
    return "/".join(kind for kind in WorkKind if kind in present) or WorkKind.RECIPE


class AgentPhase(StrEnum):
    """What an agent does, by which its peers agree on the next attempt. In a later phase it knows more of the job."""

    ENDED = "ended"  # it has announced its end
    WARMING = "warming"  # getting ready
    SPARE = "spare"  # ready
    FAILED = "failed"  # its trainers have failed, and the next attempt is due
    SAVED = "saved"  # its trainers have saved and ended, and the next attempt is due
    FINISHED = "finished"  # the processes of a command have ended well here; those of other machines may still run
    RUNNING = "running"  # its trainers are at work


class MachineState(StrEnum):
    """What a machine does at the moment. While its trainers are at work, this is what they report (`TrainerState`).

    Up to TRAINING, the states are in the order of progress: a job is in the last of its machines' states in this order.
    """

    SETUP = "setup"
    FETCHING = "fetching"
    WARMING = "warming"
    WAITING = "waiting"
    FAILED = "failed"
    SAVED = "saved"
    FINISHED = "finished"  # its part of a command is done
    STARTING = "starting"
    INDEXING = "indexing"
    JOINING = "joining"
    STOPPING = "stopping"
    VALIDATING = "validating"
    TRAINING = "training"
    DONE = "done"
    STOPPED = "stopped"
    LEFT = "left"  # it had to leave the job, which goes on or is moved
    LOST = "lost"  # its agent was killed, or the others go on without it


class SetupStep(StrEnum):
    """A step of a machine from its launch to its first training step, in order.

    The supervisor measures the steps of the set-up, up to the start of the agent. The steps after it are those states
    of the agent in which it does not train yet; STANDBY is WARMING before the trainers are started.
    """

    NONE = ""
    BOOTING = "booting"
    CONNECTING = "connecting"
    CODE = "code"
    ENVIRONMENT = "environment"
    CHECKS = "checks"
    AGENT = "agent"
    SETUP = "setup"
    FETCHING = "fetching"
    STANDBY = "standby"
    WAITING = "waiting"
    STARTING = "starting"
    INDEXING = "indexing"
    JOINING = "joining"
    WARMING = "warming"


class AttemptReason(StrEnum):
    """A reason for an attempt that is the same in all jobs. Other reasons name machines or quote an error."""

    START = "start"
    RESUME = "resume"  # the start of a later launch, as the history of a job names it
    ALL_LOST = "all members were lost"
    MOVED = "all machines were lost; new ones were rented"
