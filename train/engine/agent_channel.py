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

from train.tools.errors import Expected, is_of_a_peer
from train.tools.filesystem import as_json, replace


class Report:
    """One process's line to its agent."""

    def __init__(self) -> None:
        work = os.environ.get("IMGNET_WORK")
        self.folder = Path(work) if work else None
        self.rank, self.local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.said: dict[str, Any] = {}
        self.spent: dict[str, float] = {}  # seconds in each state that is over
        self.at, self.since = 0.0, time.perf_counter()
        self.terminated = False
        self.ticks = 0

    def listen(self) -> None:
        """Let SIGTERM ask for a save and an end, instead of killing; SIGUSR1 write the stacks of all threads."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "terminated", True))
        faulthandler.register(signal.SIGUSR1, all_threads=True)

    def asked(self) -> bool:
        """Whether this process is asked to save and end."""
        return self.terminated or (self.folder is not None and (self.folder / "ask").exists())

    def say(self, state: str, often: bool = False, **numbers: Any) -> None:
        """Report a state and numbers. `often` marks news that may be dropped when the last ones are fresh."""
        if state != self.said.get("state"):
            self.spent = self.so_far()
            self.since = time.perf_counter()
        self.said |= {"state": state, **numbers}
        now = time.monotonic()
        if self.folder is None or self.local_rank or (often and now - self.at < 0.5):
            return
        self.at = now
        replace(self.folder / "progress.json", as_json(self.said), durable=False)

    def so_far(self) -> dict[str, float]:
        """Return the seconds in each state until now."""
        state = self.said.get("state")
        if state is None:
            return {}
        return {**self.spent, state: self.spent.get(state, 0.0) + time.perf_counter() - self.since}

    def tick(self) -> None:
        """Say that we go forward, in a stretch without other news: who says nothing for long counts as stuck."""
        self.ticks += 1
        if self.said:
            self.say(self.said["state"], often=True, ticks=self.ticks)

    def fail(self, reason: str, fault: str = "own") -> None:
        """Leave the last words. Fault: "final" would come back at every try, "peer" is another process's silence."""
        if self.folder is not None:
            path = self.folder / f"failed-{self.rank}.json"
            replace(
                path,
                as_json({"rank": self.rank, "reason": reason, "fault": fault, "time": time.time()}),
                durable=False,
            )

    def last_words(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An excepthook: print the trace, tell the agent, and end at once, for an exit with torch takes a second."""
        # Not to sys.stderr: init_process_group makes torch call us with a buffer there, and write it when we are gone.
        said = "".join(traceback.format_exception(kind, error, trace))
        print(said, end="", file=sys.__stderr__, flush=True)
        text = str(error).strip()
        # A loader's worker sends its trace as text; the last line of it that is no part of the stack is the error.
        reason = next((one for one in reversed(text.splitlines()) if one[:1].strip()), kind.__name__)
        try:
            if isinstance(error, Expected):
                self.fail(reason, "final")
            else:
                self.fail(f"{kind.__name__}: {reason}", "peer" if is_of_a_peer(kind, text) else "own")
        finally:
            os._exit(1)
