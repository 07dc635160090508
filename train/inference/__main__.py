"""`python -m train.inference export|predict`: exports a trained network, or classifies images with it.

Prints JSON lines to stdout: "exported", a "prediction" for each image, or "error". Exit codes: 0 done, 1 error, 2 wrong
usage. Importing this module does not import torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train.evaluation.protocol import exit_with_error
from train.tools.errors import TrainingError
from train.tools.filesystem import one_line_error

from .protocol import ExportOptions, FileFormat, ParameterNames, PredictOptions


def parse_options(argv: Sequence[str] | None = None) -> ExportOptions | PredictOptions:
    """Parse the command line. Exits with code 2 and a usage message when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m train.inference", description="Use a trained network.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the network for other programs")
    predict = commands.add_parser("predict", help="classify image files")
    for command in (export, predict):
        command.add_argument("--model", metavar="NAME", help="accept only a file that contains this network")
        command.add_argument("source", type=Path, help="checkpoint step-*.pt, or weights *.safetensors of a run")
    export.add_argument("file", type=Path, help="file to write")
    export.add_argument("--names", type=ParameterNames, default=ParameterNames.PLAIN, choices=list(ParameterNames))
    export.add_argument("--format", type=FileFormat, default=FileFormat.SAFETENSORS, choices=list(FileFormat))
    predict.add_argument("images", type=Path, nargs="+", help="image files")
    values = vars(parser.parse_args(argv))
    if values.pop("command") == "export":
        return ExportOptions(**values)
    return PredictOptions(**{**values, "images": tuple(values["images"])})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = parse_options(argv)
    try:
        if isinstance(options, ExportOptions):
            from .export import export_network

            export_network(options)
        else:
            from .predict import predict_images

            predict_images(options)
    except (TrainingError, OSError) as error:
        exit_with_error(one_line_error(error))
    except KeyboardInterrupt:
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
