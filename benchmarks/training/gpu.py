"""Measures on one GPU, in parts of about a minute, each in a process of its own with a limit of time.

    make gpu-bench                                                    # all parts, at most BUDGET seconds (1500)
    .venv/bin/python benchmarks/training/gpu.py --parts eager peer    # some parts
    .venv/bin/python benchmarks/training/gpu.py --search [256x128]    # is a search for cuDNN's kernels worth its time?
    .venv/bin/python benchmarks/training/gpu.py --dry-run             # try the code on a CPU, tiny; measures nothing
    .venv/bin/python benchmarks/training/gpu.py --report              # write benchmarks/RESULTS.md from the JSON lines

Each measurement is appended at once to a file of JSON lines (--out, default gpu-results.jsonl), so that a part that
fails or runs out of time costs neither its own earlier rows nor other parts. It needs no network. A machine without
this project's .venv needs torch, numpy, Pillow, tensorboard and simplejpeg in the Python that runs it; timm is used if
installed. The parts: benchmarks/training/gpu_parts.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import describe_machine, write_section
from benchmarks.training.gpu_parts import ON_A_GPU, PARTS, REHEARSAL, Scale, Work, describe_error, search_parts
from train.tools.process import kill_process_groups, project_search_path

SECTION = "training/gpu.py"  # of RESULTS.md
DEFAULT_BUDGET = 1500  # seconds
NOT_MEASURED = "not measured"


def describe_gpu(scale: Scale) -> dict[str, str]:
    """Return the names and versions of what is measured."""
    names = {"machine": describe_machine(), "gpu": "none: a rehearsal"}
    if scale.device.type == "cuda":
        names["gpu"] = f"{torch.cuda.get_device_name()}, 1 of {torch.cuda.device_count()}"
        names["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        names["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return names


def append_row(out: Path, row: Mapping[str, object]) -> None:
    """Append one JSON line and print it."""
    line = json.dumps(row)
    with out.open("a") as file:
        file.write(line + "\n")
    print(f"{row['part']}: {row['what']}: {row['result']}", flush=True)


def run_part(name: str, scale: Scale, work: Work, out: Path) -> int:
    """Run a part in this process. Returns 1 when it fails, which is a row too."""
    subject = describe_gpu(scale)

    def emit(what: str, result: str, numbers: Mapping[str, float]) -> None:
        row = {"part": name, "what": what, "result": result, "numbers": dict(numbers), "time": time.time()}
        append_row(out, {**row, **subject})

    part = (PARTS | search_parts(scale))[name]
    try:
        part.run(scale, work, emit)
    except Exception as error:
        emit(part.title, f"failed: {describe_error(error)}", {})
        return 1
    return 0


def run_all(names: Sequence[str], options: argparse.Namespace) -> int:
    """Run parts one after another, each in a process of its own. Returns the number of parts that gave no result."""
    deadline = time.monotonic() + options.budget
    failures = 0
    environment = {**os.environ, "PYTHONPATH": project_search_path()}
    parts = PARTS | search_parts(REHEARSAL if options.dry_run else ON_A_GPU)
    if options.dry_run:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="imgnet-gpu-") as folder:
        environment["TMPDIR"] = folder  # what a killed part leaves goes with it
        for name in names:
            title, left = parts[name].title, deadline - time.monotonic()
            limit = min(left, parts[name].seconds * (10 if options.dry_run else 1))
            row = {"part": name, "what": title, "numbers": {}, "time": time.time()}
            if left < 1:
                append_row(options.out, {**row, "result": f"{NOT_MEASURED}: the budget of time was used up"})
                failures += 1
                continue
            argv = [sys.executable, __file__, "--part", name, "--work", folder, "--out", str(options.out)]
            argv += ["--dry-run"] * options.dry_run
            argv += [word for key in ("images", "cifar") if (path := getattr(options, key))
                     for word in (f"--{key}", str(path))]  # fmt: skip
            start = time.monotonic()
            process = subprocess.Popen(argv, env=environment, start_new_session=True)
            try:
                code = process.wait(limit)
                result = f"failed: exit code {code}" if code not in (0, 1) else ""
            except subprocess.TimeoutExpired:
                code, result = 1, f"{NOT_MEASURED} to the end: stopped after {limit:.0f} s"
            finally:
                kill_process_groups([process])  # also loader workers and trainers
            failures += code != 0
            if result:
                append_row(options.out, {**row, "result": result})
            print(f"{name}: {time.monotonic() - start:.0f} s\n", flush=True)
    return failures


def report_lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the section of RESULTS.md: the last row of each measurement, and "not measured" for parts without any."""
    last = {(row["part"], row["what"]): row for row in rows}
    machines = dict.fromkeys(
        ". ".join(row[key] for key in ("machine", "gpu", "cuda", "nccl") if key in row) for row in rows if "gpu" in row
    )
    lines = ["## On a GPU", "", *machines, "", "| part | measured | result |", "|---|---|---|"]
    for name, part in (PARTS | search_parts(ON_A_GPU)).items():
        cells = [(row["what"], row["result"]) for (of_part, _), row in last.items() if of_part == name]
        if name in PARTS and not cells:
            cells = [("", NOT_MEASURED)]
        lines += [f"| {part.title} | {what} | {result} |" for what, result in cells]
    return lines


def write_report(path: Path) -> int:
    """Write the section of RESULTS.md from the JSON lines of a GPU; rehearsals are refused."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not any("cuda" in row for row in rows):
        print(f"error: {path} has no measurement of a GPU; RESULTS.md stays as it is", file=sys.stderr)
        return 1
    write_section(SECTION, report_lines(rows))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the trainer on one GPU, in parts.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET, help="seconds for all parts (default: 1500)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results.jsonl"), help="file that rows are appended to")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: a folder or .tar; else drawn ones")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="CIFAR-10 as JPEG files, train/ and val/")
    parser.add_argument(
        "--search",
        nargs="*",
        metavar="BATCHxSIZE",
        help="measure instead our step with and without a search for cuDNN's kernels, at these shapes of the recipes "
        "(default: all)",
    )
    parser.add_argument("--dry-run", action="store_true", help="try all parts on a CPU with tiny sizes")
    parser.add_argument("--report", action="store_true", help="write the section of RESULTS.md from --out, and end")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Returns 0 when every part gave its rows, 1 when one failed, 2 without a GPU."""
    options = parse_arguments(argv)
    options.out = options.out.absolute()
    if options.report:
        return write_report(options.out)
    scale = REHEARSAL if options.dry_run else ON_A_GPU
    if options.part:
        return run_part(options.part, scale, Work(options.work, options.images, options.cifar), options.out)
    if scale.device.type == "cuda" and not torch.cuda.is_available():
        print("error: this torch sees no GPU; --dry-run tries the code on a CPU", file=sys.stderr)
        return 2
    names = options.parts or list(PARTS)
    if options.search is not None:
        known = [f"{batch}x{size}" for batch, size in scale.searched_shapes]
        if unknown := set(options.search) - {*known}:
            print(f"error: --search {', '.join(sorted(unknown))}: is none of {', '.join(known)}", file=sys.stderr)
            return 2
        names = [name for name in search_parts(scale) if name.split("-")[1] in (options.search or known)]
    if "prepare" not in names and {"feed", "recovery", "goodput"} & set(names):
        names = ["prepare", *names]
    return min(1, run_all(names, options))


if __name__ == "__main__":
    sys.exit(main())
