"""The states of jobs and machines, by the names that files and output use for them."""

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job."""

    WAITING = "waiting"  # in its queue
    BOOTING = "booting"
    ACQUIRING = "acquiring"  # machines are rented
    SETUP = "setup"
    RUNNING = "running"
    RECOVERING = "recovering"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class AgentPhase(StrEnum):
    """What an agent does, as far as its peers have to know. They agree by it on the members of the next attempt."""

    WARMING = "warming"  # getting ready
    SPARE = "spare"  # ready
    RUNNING = "running"  # its trainers are at work
    FAILED = "failed"  # its trainers have failed, and the next attempt is due
    SAVED = "saved"  # its trainers have saved and ended, and the next attempt is due
    ENDED = "ended"  # it has announced its end


class MachineState(StrEnum):
    """What a machine does at the moment. While its trainers are at work, this is what they report (`TrainerState`)."""

    SETUP = "setup"
    FETCHING = "fetching"
    WARMING = "warming"
    WAITING = "waiting"
    FAILED = "failed"
    SAVED = "saved"
    STARTING = "starting"
    INDEXING = "indexing"
    JOINING = "joining"
    STOPPING = "stopping"
    VALIDATING = "validating"
    TRAINING = "training"
    DONE = "done"
    STOPPED = "stopped"
    LEFT = "left"  # it had to leave the job, which goes on or is moved
    GONE = "gone"  # its agent was killed
    LOST = "lost"  # the others go on without it


class SetupStep(StrEnum):
    """A step of a machine from its launch to its first training step, in order.

    The supervisor measures the steps of the set-up, up to the start of the agent, and the agent those after it.
    """

    NONE = ""
    BOOTING = "booting"
    CONNECTED = "connected"
    CODE = "code"
    ENVIRONMENT = "environment"
    CHECKS = "checks"
    NETWORK = "network"
    AGENT = "agent"
    DATA = "data"
    FETCH = "fetch"
    STANDBY = "standby"
    OTHERS = "others"
    RENDEZVOUS = "rendezvous"
    INDEXING = "indexing"
    GROUP = "group"
    FIRST_STEP = "first step"


class AttemptReason(StrEnum):
    """A reason for an attempt that is the same in all jobs. Other reasons name machines or quote an error."""

    START = "start"
    ALL_LOST = "all members were lost"
    MOVED = "all machines were lost; new ones were rented"
