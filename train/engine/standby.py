"""A standby trainer: `python -m train.engine.standby READY OPTIONS...` loads everything and waits to become a trainer.

After a loss, starting a trainer is what all other machines would wait for: torch takes seconds to import, the first
optimizer as long again (it imports torch._dynamo), and listing a folder of a million images longer. OPTIONS are the
trainer's own, without those that only an attempt knows. The standby creates the file READY when everything is loaded,
then reads a `StandbyRequest` from stdin, one line of JSON, and becomes that trainer.
Until then it touches no GPU. It exits when stdin is closed: then it is not needed.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from train.recipe.recipe_files import read_recipes
from train.tools import process
from train.tools.agent_protocol import StandbyRequest
from train.tools.records import decode

from . import main as command_main
from .agent_channel import adopt_request
from .options import parse_run_options

if TYPE_CHECKING:
    from train.data.loading.dataset import Dataset


def main() -> int:
    """Load, wait, and become the requested trainer. Returns its exit code."""
    process.die_with_parent()
    ready_path, *options = sys.argv[1:]
    dataset = preload(options)
    Path(ready_path).touch()
    line = sys.stdin.readline()
    if not line:
        return 0
    request = decode(StandbyRequest, json.loads(line), "the agent's request")
    adopt_request(request)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return command_main.main(request.argv, dataset)


def preload(argv: list[str]) -> "Dataset | None":
    """Import what a run imports, now or at first use, and return the opened data set.

    Returns None when the data cannot be used. The trainer will fail in the same way, and report it to its agent.
    """
    import torch

    from . import run

    torch.optim.SGD([torch.zeros(1)], lr=0.0)
    try:
        options = parse_run_options(argv)
        return run.open_run_dataset(options, read_recipes(options.recipe)[0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
