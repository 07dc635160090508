"""The progress bar of commands that read or write many files: rich's on a terminal, else lines."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from .tables import console

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """A progress bar on stderr, called with (done, total). Without a terminal it prints a line for every 10 percent.

    `format_count` turns a number into text, for example into megabytes.
    """

    def __init__(self, title: str, format_count: Callable[[int], str] = str) -> None:
        self.title = title
        self.format_count = format_count
        self.last_shown_step = -1
        self.bar: Progress | None = None  # on a terminal

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            description, counts = (
                TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[counts]")
            )
            columns = (description, BarColumn(), counts)
            # Without a thread of its own (`auto_refresh`): the commands fork worker processes meanwhile.
            self.bar = Progress(*columns, console=console(to_stderr=True), auto_refresh=False, redirect_stdout=False)
            self.bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show the progress, unless the shown text stays the same."""
        percent = 100 * done // max(total, 1)
        step = percent if self.bar else percent // 10
        if step == self.last_shown_step:
            return
        self.last_shown_step = step
        counts = f"{self.format_count(done)} of {self.format_count(total)} ({percent} %)"
        if self.bar is None:
            print(f"{self.title}: {counts}", file=sys.stderr, flush=True)
            return
        if not self.bar.tasks:
            self.bar.add_task(self.title, total=total, counts=counts)
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, counts=counts, refresh=True)

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
