"""`python -m train.evaluation OPTIONS`: evaluates a checkpoint by several crops and image sizes.

OPTIONS are `EvalOptions` as JSON. Prints JSON lines to stdout: "progress" now and then, at last the "evaluation", or
"error". Exit codes: 0 done, 1 error. Importing this module does not import torch.
"""

import os
import sys
from collections.abc import Sequence

from train.data.index.open import DataError
from train.engine.main import gpu_count
from train.tools.errors import MachineTrouble, TrainingError, is_peer_failure
from train.tools.filesystem import one_line_error
from train.tools.process import launch_ranks
from train.tools.records import decode_json

from .protocol import EvalOptions, exit_with_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    (text,) = sys.argv[1:] if argv is None else argv
    options = decode_json(EvalOptions, text.encode())
    if "RANK" not in os.environ:
        procs = options.procs or gpu_count() or 1
        if procs > 1:
            return launch_ranks([sys.executable, "-P", "-m", "train.evaluation", text], procs)
    try:
        from . import runner

        runner.evaluate_checkpoint(options)
    except (TrainingError, MachineTrouble, DataError, OSError) as error:
        exit_with_error(one_line_error(error))
    except RuntimeError as error:
        if not is_peer_failure(type(error), str(error)):
            raise
        os._exit(1)  # the process that failed first has reported why
    except KeyboardInterrupt:
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
