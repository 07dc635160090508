"""The last thing that machines of a job that is done are paid for: its trained network comes home."""

import time
from collections.abc import Callable, Mapping

from cluster.errors import ClusterError
from cluster.machines.fleet import Fleet
from infra.aws.errors import CloudError
from infra.aws.instances.instances import Instance

from .instances import Rented

SECONDS = 480.0  # at most; the machine ends by itself ten minutes after the job


def bring_network(fleet: Fleet, rented: Rented, present: Mapping[str, Instance], note: Callable[[str], None]) -> None:
    """Bring the newest checkpoint home through one machine, the one that can be reached best; the others end first.

    What goes wrong is said, and passed over: the checkpoint is on the shared file system too, and a machine bills.
    """
    from cluster.machines import checkpoint_files  # it knows all places that jobs run in

    begun = time.monotonic()

    def going_on(done: int, total: int) -> None:
        note(f"bringing the network home: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        if time.monotonic() - begun > SECONDS:
            raise ClusterError(f"not here after {SECONDS:.0f} s")

    try:
        for name in sorted(present, key=lambda one: (not present[one].public, int(one)))[:1]:
            if others := [one.id for one in present.values() if one.name != name]:
                rented.release(others, "the job is done")
            checkpoint_files.bring(
                fleet.remotes[name], fleet.machines.job_folder(name), rented.folders.shared, going_on
            )
    except (ClusterError, CloudError, OSError, KeyError) as error:
        rented.say(f"the network stays on the stack's shared file system: {error}")
