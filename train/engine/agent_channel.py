"""What a trainer tells the agent beside it, and what the agent may ask: small files in the folder IMGNET_WORK.

    progress.json     the first process of a machine: state, step, numbers; replaced about once a second
    failed-3.json     rank 3, last words: why it ended, and whose fault it was ("final", "own", "peer")
    ask               made by the agent: save at an agreed step and end; SIGTERM asks the same

Without IMGNET_WORK (torchrun by hand) nothing is written. Imports no torch.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from train.tools.errors import TrainingError, is_peer_failure
from train.tools.filesystem import to_json_bytes, write_atomic


class AgentChannel:
    """One process's line to its agent."""

    def __init__(self) -> None:
        work = os.environ.get("IMGNET_WORK")
        self.folder = Path(work) if work else None
        self.rank, self.local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.last_report: dict[str, Any] = {}
        self.finished_state_seconds: dict[str, float] = {}  # seconds in each state that is over
        self.last_write_time, self.state_start = 0.0, time.perf_counter()
        self.sigterm_received = False
        self.ticks = 0

    def install_signal_handlers(self) -> None:
        """Let SIGTERM ask for a save and an end, instead of killing; SIGUSR1 write the stacks of all threads."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "sigterm_received", True))
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def stop_requested(self) -> bool:
        """Whether this process is asked to save and end."""
        return self.sigterm_received or (self.folder is not None and (self.folder / "ask").exists())

    def report_state(self, state: str, throttled: bool = False, **numbers: Any) -> None:
        """Report a state and numbers. `often` marks news that may be dropped when the last ones are fresh."""
        if state != self.last_report.get("state"):
            self.finished_state_seconds = self.seconds_by_state()
            self.state_start = time.perf_counter()
        self.last_report |= {"state": state, **numbers}
        now = time.monotonic()
        if self.folder is None or self.local_rank or (throttled and now - self.last_write_time < 0.5):
            return
        self.last_write_time = now
        write_atomic(self.folder / "progress.json", to_json_bytes(self.last_report), durable=False)

    def seconds_by_state(self) -> dict[str, float]:
        """Return the seconds in each state until now."""
        state = self.last_report.get("state")
        if state is None:
            return {}
        return {
            **self.finished_state_seconds,
            state: self.finished_state_seconds.get(state, 0.0) + time.perf_counter() - self.state_start,
        }

    def tick(self) -> None:
        """Say that we go forward, in a stretch without other news: who says nothing for long counts as stuck."""
        self.ticks += 1
        if self.last_report:
            self.report_state(self.last_report["state"], throttled=True, ticks=self.ticks)

    def report_failure(self, reason: str, fault: str = "own") -> None:
        """Leave the last words. Fault: "final" would come back at every try, "peer" is another process's silence."""
        if self.folder is not None:
            path = self.folder / f"failed-{self.rank}.json"
            write_atomic(
                path,
                to_json_bytes({"rank": self.rank, "reason": reason, "fault": fault, "time": time.time()}),
                durable=False,
            )

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An excepthook: print the trace, tell the agent, and end at once, for an exit with torch takes a second."""
        # Not to sys.stderr: init_process_group makes torch call us with a buffer there, and write it when we are gone.
        said = "".join(traceback.format_exception(kind, error, trace))
        print(said, end="", file=sys.__stderr__, flush=True)
        text = str(error).strip()
        # A loader's worker sends its trace as text; the last line of it that is no part of the stack is the error.
        reason = next((one for one in reversed(text.splitlines()) if one[:1].strip()), kind.__name__)
        try:
            if isinstance(error, TrainingError):
                self.report_failure(reason, "final")
            else:
                self.report_failure(f"{kind.__name__}: {reason}", "peer" if is_peer_failure(kind, text) else "own")
        finally:
            os._exit(1)
