"""The console of a rented machine whose boot failed: kept in the run folder, its end quoted in the reason."""

import contextlib
import re
from pathlib import Path

from cluster.connectors import untrusted
from infra.errors import CloudError
from train.tools.filesystem import write_atomic

from .provider import CloudProvider, MachineT

QUOTED_LINES = 3
QUOTED_CHARACTERS = 160  # of each line
TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def describe_console(provider: CloudProvider[MachineT], machine: MachineT, folder: Path) -> str:
    """Return the last lines of a machine's console, to be added to a reason; "" if the cloud does not tell.

    The whole text is written to the run folder, because nobody can ask for it once the machine is terminated.
    """
    text = ""
    with contextlib.suppress(CloudError):
        text = provider.read_console(machine)
    lines = [untrusted.one_line(TERMINAL_SEQUENCE.sub("", line)) for line in text.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    path = folder / f"console-{machine.id}.log"
    with contextlib.suppress(OSError):
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode(), durable=False)
    quoted = " | ".join(untrusted.one_line(line, QUOTED_CHARACTERS) for line in lines[-QUOTED_LINES:])
    return f"; its console ends with: {quoted}; all of it: {path}"
