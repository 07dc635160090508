"""docs/screenshots: what six commands print on terminals of two widths, in a light and in a dark theme.

    python docs/tools/screenshots.py docs/screenshots

The tables are those of the commands; the jobs are invented, in fixed states, so that the pictures change only with the
program. `plan` and the plan of `launch` are computed from a recipe of this project. A test compares the files.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pictured_jobs
from terminal_svg import THEMES, draw_terminal

from cluster.cli.app import cli
from cluster.display import cloud, plan, status, top
from cluster.planning import resolve
from cluster.planning.launch_options import make_launch_options

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (80, 140)  # columns
RECIPE = "recipes/resnet50_18min.py"
IMAGES = "s3://my-bucket/imagenet"
ENVIRONMENT = {  # nothing of the computer on which the pictures are made
    "HOME": "/home/you",
    "IMGNET_RUNS": "/home/you/runs",
    "TERM": "xterm",
    "TZ": "UTC",
}


class Screen(io.StringIO):
    """A terminal that records the output of a command."""

    def isatty(self) -> bool:
        """Say that it is a terminal."""
        return True


def show_plan() -> None:
    """Print the forecast on several numbers of machines."""
    cli.main(["plan", "--machines", "1,2,4,8,16", RECIPE], standalone_mode=False)


def show_launch() -> None:
    """Print the plan of a launch on machines of AWS, and its question."""
    (recipe,) = resolve.load_recipes(RECIPE)
    options = make_launch_options("aws", machines=pictured_jobs.MACHINES, market="on-demand", data=IMAGES)
    job_plan = pictured_jobs.with_known_price(resolve.plan(recipe, options, recipe_file=RECIPE, offline=True))
    plan.show_plan(job_plan)
    print(f"{plan.rental_question([job_plan])} [y/N]:")


def show_top() -> None:
    """Print the live table of a job's machines as it first is."""
    console, machines, tracker = top.console(), pictured_jobs.machine_rows(), top.StatusAgeTracker()
    tracker.update(machines, 0.0)
    console.print(top.render(pictured_jobs.RUNNING, machines, 0.0, tracker, console.width), soft_wrap=False)


PICTURES: dict[str, tuple[str, Callable[[], None]]] = {  # by the name of the file: the command, and what prints
    "plan": (f"plan --machines 1,2,4,8,16 {RECIPE}", show_plan),
    "launch": (f"launch --machines {pictured_jobs.MACHINES} --on-demand --data {IMAGES} {RECIPE}", show_launch),
    "ls": ("ls", lambda: status.show_jobs({job.job: job for job in pictured_jobs.OTHER_JOBS})),
    "status": (
        "status job-3",
        lambda: status.show_status(pictured_jobs.STATUS, pictured_jobs.machine_rows(), pictured_jobs.ATTEMPTS),
    ),
    "top": ("top job-3", show_top),
    "cost": ("cost job-3", lambda: cloud.show_cost(pictured_jobs.cost_report())),
}


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[Screen]:
    """Replace stdout by a terminal, in the environment and the folder of the pictures."""
    screen = Screen()
    with (
        patch.dict(os.environ, {**ENVIRONMENT, "COLUMNS": str(columns)}, clear=True),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(screen),
    ):
        time.tzset()
        yield screen
    time.tzset()


def draw_pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    for name, (command, show) in PICTURES.items():
        for columns in WIDTHS:
            with terminal(columns) as screen:
                print(f"$ imgnet-cluster {command}")
                show()
            for theme in THEMES:
                yield f"{name}-{columns}-{theme}.svg", draw_terminal(screen.getvalue(), columns, theme)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, svg in draw_pictures():
        (folder / file_name).write_text(svg)
