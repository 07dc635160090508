"""A process that has loaded all it can and waits to be told which trainer to be. `python -m train.engine.standby READY WORDS`.

Loading torch takes seconds, the first optimizer as long again (it imports torch._dynamo), and looking through a folder
of a million images longer: after a loss they are what everybody would wait for. WORDS are the trainer's own, but for
what only an attempt knows. The file READY appears when nothing is left to load; then one line of JSON on stdin says
{"argv": [...], "environment": {...}, "log": path}. No GPU is touched before that. End of input: nobody needs us.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from train.recipe.files import read_recipes as load_recipe
from train.tools import process

from . import main as command_main
from .options import parse_train_options


def main() -> int:
    """Wait, then be the trainer that was asked for. Returns its exit code."""
    process.die_with_parent()
    dataset = preload(sys.argv[2:])
    Path(sys.argv[1]).touch()
    line = sys.stdin.readline()
    if not line:
        return 0
    asked = json.loads(line)
    os.environ.update(asked["environment"])
    with Path(asked["log"]).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return command_main.main(asked["argv"], dataset)


def preload(argv: list[str]) -> Any:
    """Import what a run needs, build what imports the rest at its first use, and return the images.

    None when they cannot be used: the trainer will find the same, and has somebody to say it to.
    """
    import torch

    from . import run

    torch.optim.SGD([torch.zeros(1)], lr=0.0)
    try:
        options = parse_train_options(argv)
        return run.open_run_dataset(options, load_recipe(options.recipe)[0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
