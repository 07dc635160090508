"""`python -m cluster.agent SHARED WORK MACHINE`: run the agent of one machine."""

import argparse
import sys
from pathlib import Path

from cluster.state.locks import AGENT_LOCK
from train.tools.filesystem import locked

from .agent import Agent


def main() -> int:
    """Run the agent of a machine. Returns its exit code; 1 at once when another agent has the work folder."""
    parser = argparse.ArgumentParser(prog="python -m cluster.agent", description=__doc__)
    parser.add_argument("shared", type=Path, help="the job's folder that all its machines see")
    parser.add_argument("work", type=Path, help="a folder of this machine alone")
    parser.add_argument("machine", help="its number")
    parser.add_argument("--address", default="127.0.0.1", help="what the other machines reach it by")
    parser.add_argument("--elapsed", type=float, default=0.0, help="seconds since the launch, for the time limit")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(asked.work / AGENT_LOCK, 2.0):  # someone may just be asking whether we live
            return Agent(asked.shared, asked.work, asked.machine, asked.address, asked.elapsed).run()
    except BlockingIOError:
        print(f"{asked.work}: another agent is at work here", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
