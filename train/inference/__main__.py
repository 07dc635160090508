"""`python -m train.inference TASK OPTIONS`: evaluates or exports a trained network, or classifies images with it.

TASK is evaluate, export or predict; OPTIONS are its `EvalOptions`, `ExportOptions` or `PredictOptions` as JSON. Prints
JSON lines to stdout: "progress" and at last the "evaluation", or "exported", or a "prediction" for each image; or else
"error". Exit codes: 0 done, 1 error. Importing this module does not import torch.
"""

import os
import sys
from collections.abc import Sequence

from train.data.index.open import DataError
from train.engine.main import gpu_count
from train.tools.errors import MachineTrouble, TrainingError, is_peer_failure, one_line_error
from train.tools.process import launch_ranks
from train.tools.records import decode_json

from .protocol import EvalOptions, ExportOptions, PredictOptions, emit_json_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    task, text = sys.argv[1:] if argv is None else argv
    try:
        if task == "evaluate":
            options = decode_json(EvalOptions, text.encode())
            if "RANK" not in os.environ and (procs := options.procs or gpu_count() or 1) > 1:
                return launch_ranks([sys.executable, "-P", "-m", "train.inference", task, text], procs)
            from .evaluate import evaluate_checkpoint

            evaluate_checkpoint(options)
        elif task == "export":
            from .export import export_network

            export_network(decode_json(ExportOptions, text.encode()))
        else:
            from .predict import predict_images

            predict_images(decode_json(PredictOptions, text.encode()))
    except (TrainingError, MachineTrouble, DataError, OSError) as error:
        emit_json_line({"kind": "error", "error": one_line_error(error)})
        os._exit(1)  # without waiting for loader processes, or for peers in a collective
    except RuntimeError as error:
        if not is_peer_failure(type(error), str(error)):
            raise
        os._exit(1)  # the process that failed first has reported why
    except KeyboardInterrupt:
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
