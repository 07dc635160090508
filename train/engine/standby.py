"""A standby trainer: `python -m train.engine.standby READY OPTIONS...` loads everything and waits to become a trainer.

After a loss, starting a trainer is what all other machines would wait for: torch takes seconds to import, the first
optimizer as long again (it imports torch._dynamo), and listing a folder of a million images longer. On a CPU it
builds the network too, and runs it once; it touches no GPU. OPTIONS are the trainer's own, without those that only an
attempt knows. The standby creates the file READY when everything is loaded, then reads a `StandbyRequest` from stdin,
one line of JSON, and becomes that trainer. It exits when stdin is closed: then it is not needed.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from train.tools import process
from train.tools.agent_protocol import StandbyRequest
from train.tools.records import decode

from . import main as command_main
from .agent_channel import adopt_request
from .options import parse_run_options

if TYPE_CHECKING:
    from .run import Prepared


def main() -> int:
    """Load, wait, and become the requested trainer. Returns its exit code."""
    process.die_with_parent()
    ready_path, *options = sys.argv[1:]
    prepared = preload(options)
    Path(ready_path).touch()
    line = sys.stdin.readline()
    if not line:
        return 0
    request = decode(StandbyRequest, json.loads(line), "the agent's request")
    adopt_request(request)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return command_main.main(request.argv, prepared)


def preload(argv: list[str]) -> "Prepared | None":
    """Import what a run imports, now or at first use, and return what an attempt begins with.

    Returns None when it cannot begin. The trainer will fail in the same way, and report it to its agent.
    """
    from . import run

    try:
        options = parse_run_options(argv)
        return run.prepare(options, command_main.choose_recipe(options))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
