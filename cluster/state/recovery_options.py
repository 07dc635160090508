"""How a job recovers when it loses machines: options of a launch. Light: `launch --help` imports this."""

from dataclasses import dataclass

from train.tools.option_fields import OptionSet, one_of, option_field


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(OptionSet):
    """How a job recovers when it loses machines."""

    spares: int = option_field(
        0,
        metavar="N",
        group="Recovery",
        minimum=0,
        help="Number of standby machines. They take over when a machine is lost.",
    )
    min_machines: int = option_field(
        1,
        metavar="N",
        group="Recovery",
        minimum=1,
        help="Keep training with at least this many machines; pause with fewer.",
    )
    standby: bool | None = option_field(
        None,
        "--standby/--no-standby",
        group="Recovery",
        help="Keep a second set of processes waiting on each machine, with torch imported. It makes recovery faster.",
        default_text="on with several machines",
    )
    in_place: str = option_field(
        "auto",
        metavar="on|off|auto",
        parse=one_of(("on", "off", "auto")),
        group="Recovery",
        help="After a loss, let the trainers of the other machines keep their state and go on with the next step. Else "
        "they start again from the newest checkpoint. 'auto' is on where they train on CPUs. It has never run with "
        "more than one GPU.",
        default_text="auto",
    )
    lost_seconds: float = option_field(
        5.0,
        metavar="SECONDS",
        group="Recovery",
        minimum=1,
        help="When no step has completed for this long, give up each machine that sends no heartbeat.",
    )
    stall_seconds: float = option_field(
        120.0,
        metavar="SECONDS",
        group="Recovery",
        minimum=5,
        help="If no step completes for this long while all machines respond, dump stack traces into the logs and "
        "restart the trainers that hang; where trainers do not go on in place, all of them from the last checkpoint.",
    )
    max_exchanges: int = option_field(
        2,
        metavar="N",
        group="Recovery",
        minimum=0,
        help="How many broken rented machines may be replaced: those whose boot fails, whose driver hangs, which lose "
        "a GPU, or whose trainers fail twice while those of the others do not. At the next one the job saves and ends.",
    )

    @property
    def goes_on_in_place(self) -> bool:
        """Whether trainers may keep their state. With "auto" those on GPUs find that they may not."""
        return self.in_place != "off"
