"""Runs one slurmd in the foreground as a process of which every process of that node is a descendant.

`python slurm_node.py COMMAND...`. slurmd detaches the slurmstepd of each job step (double fork). This process adopts
them. When it gets SIGTERM, or its parent ends, it kills all its descendants, and ends.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

from train.tools.process import adopt_orphans, descendant_pids

_PR_SET_PDEATHSIG = 1  # of prctl(2)
POLL_SECONDS = 0.02


def main() -> int:
    """Run the command until SIGTERM, then kill all descendants. The end of the command alone changes nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt_orphans()
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    subprocess.Popen(sys.argv[1:], preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()))
    while signal.sigwait(signals) == signal.SIGCHLD:
        reap_children()
    while descendants := descendant_pids(os.getpid()):
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        reap_children()
    return 0


def reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main())
