"""Measure the claims of README, each beside its peer in the same run, and write benchmarks/RESULTS.md.

    make benchmarks                                     # all, about six minutes on two quiet cores
    .venv/bin/python benchmarks/run.py help loader --images DIR

Pairs alternate, so that a machine that grows busy slows both; the numbers are medians. Nothing else should run.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(rounds: int, *works: Callable[[], object]) -> list[float]:
    """The median seconds of each work, called in turn; the first round is not counted."""
    seconds = [[timed(work) for work in works] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def quiet(*argv: str) -> None:
    """Run a command to its end without its output. Raises `CalledProcessError`."""
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def help_time(_: Path | None) -> Iterator[str]:
    """`--help` beside Python's own start."""
    bare, ours = alternate(20, lambda: quiet(sys.executable, "-c", "pass"), lambda: quiet(COMMAND, "--help"))
    yield f"| `python -c pass` | {1000 * bare:.0f} ms |"
    yield f"| `imgnet-cluster --help` | {1000 * ours:.0f} ms, {1000 * (ours - bare):.0f} ms more (bound: 100 ms) |"


def loader(images: Path | None) -> Iterator[str]:
    """Training crops per second and core, beside torchvision's pipeline, with the same boxes."""
    import numpy as np
    import torch
    from PIL import Image

    from train.data.index import load
    from train.data.loader import Images, Work
    from train.data.order import random_boxes
    from train.data.sample import draw_set

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if images is None:
            draw_set(Path(folder) / "data", train=400, val=10)
        index = load(images or Path(folder) / "data", "train", skip_bad=True)
        count = min(400, len(index))
        ids = np.arange(count)
        pixels = f"{int(np.median(index.widths))} x {int(np.median(index.heights))}"
        yield f"{count} images, {'photographs' if images else 'drawn'}, {pixels} pixels at the median."
        yield ""
        yield "| one core, images/s | ours, uint8 | PIL, uint8 | PIL, ToTensor, Normalize | ours / PIL uint8 |"
        yield "|---|---|---|---|---|"
        for size, scale in ((128, 0.35), (224, 0.08)):
            batches = [Work("train", None, part, (size, size), 0, scale) for part in np.array_split(ids, 8)]
            dataset = Images({("train", None): index}, 0)
            boxes, flips = random_boxes(0, 0, ids, index.widths[ids], index.heights[ids], scale)

            def ours(dataset: Images = dataset, batches: list[Work] = batches) -> None:
                for work in batches:
                    dataset[work]

            def peer(floats: bool, size: int = size, boxes: object = boxes, flips: object = flips) -> None:
                for number, (top, left, height, width), flip in zip(ids, boxes, flips, strict=True):  # type: ignore[call-overload]
                    with Image.open(index.folder / str(index.paths[number])) as file:
                        image = file.convert("RGB")
                    image = image.crop((left, top, left + width, top + height))
                    image = image.resize((size, size), Image.Resampling.BILINEAR)
                    if flip:
                        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
                    if floats:
                        tensor = tensor.float().div(255)
                        tensor.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))

            seconds = alternate(5, ours, lambda: peer(False), lambda: peer(True))
            speeds = [count / one for one in seconds]
            cells = " | ".join(f"{one:.0f}" for one in speeds)
            yield f"| {size} pixels, min_scale {scale} | {cells} | {speeds[0] / speeds[1]:.2f} |"


def demo(_: Path | None) -> Iterator[str]:
    """What `make demo` runs, three times, the set drawn once."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for _round in range(3):
            command = [COMMAND, "launch", "--local", "-y", str(HERE.parent / "recipes" / "quickstart.py")]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        for path in sorted(Path(folder).glob("runs/job-*/result.json")):
            result = json.loads(path.read_text())
            parts = result["seconds"]
            rows.append((result["top1"], parts["training"] + parts["validation"], 100 * result["goodput"]))
    top1, seconds, goodput = (statistics.median(column) for column in zip(*rows, strict=True))
    yield f"| top-1 | {top1:.2f} % (bound: 90) |"
    yield f"| training and validation | {seconds:.1f} s (bound: 120) |"
    yield f"| goodput | {goodput:.1f} % (bound: 95; the record of 2018 reached about 76 on its machines) |"
    yield f"| goodput of the three runs | {', '.join(f'{row[2]:.1f}' for row in rows)} |"


PARTS = {"help": help_time, "loader": loader, "demo": demo}


def main() -> int:
    """Measure what is asked for and print it; with everything measured, write RESULTS.md."""
    parser = argparse.ArgumentParser(description="Measure the claims of README.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs for the loader: train/<class>/*.JPEG")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    import torch

    lines = [
        "# Measured",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}. Written by `make benchmarks`; medians, pairs in turn.",
    ]
    for name in options.parts or PARTS:
        lines += ["", f"## {(PARTS[name].__doc__ or name).rstrip('.')}", ""]
        part = list(PARTS[name](options.images))
        if part[0].startswith("|"):
            lines += ["| | |", "|---|---|"]
        lines += part
        print("\n".join(["", *part]), flush=True)
    if not options.parts:
        path = HERE / "RESULTS.md"
        before = path.read_text() if path.exists() else ""
        others = re.finditer(r"<!-- (\S+) -->\n.*?<!-- end of \1 -->", before, re.DOTALL)  # other scripts' parts
        path.write_text("\n".join([*lines, *(f"\n{one[0]}" for one in others)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
