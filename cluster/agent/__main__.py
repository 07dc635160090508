"""Runs the agent of one machine: `python -m cluster.agent SHARED WORK MACHINE`."""

import argparse
import sys
from pathlib import Path

from cluster.state.run_folder import AGENT_LOCK
from train.tools.files import locked, use_utf8_names

from .agent import Agent

LOCK_TIMEOUT_SECONDS = 2.0  # another process may hold the lock for a moment, to see whether an agent lives


def main() -> int:
    """Run the agent of a machine and return its exit code; 1 when another agent uses the same work folder."""
    use_utf8_names()
    parser = argparse.ArgumentParser(prog="python -m cluster.agent", description=__doc__)
    parser.add_argument("shared", type=Path, help="the job's folder that all its machines share")
    parser.add_argument("work", type=Path, help="a folder that only this machine uses")
    parser.add_argument("machine", help="this machine's number")
    parser.add_argument("--address", default="127.0.0.1", help="address at which the other machines reach this one")
    parser.add_argument("--host", default="", help="what people call this machine, where only the machine knows it")
    parser.add_argument("--elapsed", type=float, default=0.0, help="seconds since the launch, for the time limit")
    parser.add_argument("--user-project", type=Path, help="the job's copy of the modules that its recipe names")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(options.work / AGENT_LOCK, LOCK_TIMEOUT_SECONDS):
            machine = options.machine, options.address, options.elapsed, options.user_project, options.host
            return Agent(options.shared, options.work, *machine).run()
    except BlockingIOError:
        print(f"{options.work}: another agent already uses this work folder; end it first", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
