"""Seconds from a loss to the next training step, of four machines on this computer, beside torchrun's elastic launch.

    .venv/bin/python benchmarks/elastic/recovery.py --data DIR          # about 45 minutes; writes its part of RESULTS.md
    .venv/bin/python benchmarks/elastic/recovery.py --data DIR --quick worker notice

DIR holds CIFAR-10 as JPEG files: train/<class>/*.jpg and val/... Nothing else should run. The moment of a kill is by
our clock. The next step is the first line of the next attempt's metrics, which its first trainer writes after its first
step. Where nobody is killed, the pause begins with the last line of the attempt before: before a planned end it is
written after the last step. Each case waits until all four machines train and their standbys are warm, and until
an epoch is in its middle: validation is not what is measured.
"""

import argparse
import contextlib
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic.local_agents import RECIPE, SAVE_SECONDS, LocalJob
from benchmarks.elastic.torchrun_peer import MACHINES, TorchrunElastic
from benchmarks.measure import write_section

MARK_VARIABLE = "IMGNET_BENCHMARK"
ROUNDS, PEER_ROUNDS = 5, 3


CASE_TITLES = {
    "worker": "worker machine killed", "head": "head machine killed", "two": "two at once, one the head",
    "second": "second loss right after the first", "frozen": "frozen, without its 5 s (--lost-seconds)",
    "notice": "notice, pause of the others", "crash": "a trainer's own crash", "join": "join, pause of the others",
}  # fmt: skip


def measure_ours(work_folder: Path, data: Path, cases: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each case."""
    found: dict[str, list[float]] = defaultdict(list)
    with LocalJob(work_folder / "ours", data, process_environment(work_folder)) as local:
        for case in [one for one in cases if one != "join"]:
            for _ in range(rounds):
                found[case].append(measure_case(local, case))
                print_measurement(case, found[case][-1])
        if "join" in cases:
            while len(local.join_pauses) < rounds:
                local.wait_until_ready()
                if len(local.join_pauses) < rounds:
                    measure_case(local, "worker")
            found["join"] = local.join_pauses
    return found


def measure_case(local_job: LocalJob, case: str, max_tries: int = 3) -> float:
    """Measure a case once all is ready; again, when something else came between."""
    for left in reversed(range(max_tries)):
        try:
            local_job.wait_until_ready()
            return float(getattr(local_job, case)())
        except (RuntimeError, ProcessLookupError) as error:
            print(f"{case}: {error}", flush=True)
            if not left:
                raise
    raise AssertionError


def measure_torchrun(
    work_folder: Path, data: Path, cases: Sequence[str], rounds: int
) -> dict[tuple[str, bool], list[float | str]]:
    """Return the seconds of torchrun for a worker and the head, by the defaults (False) and tuned (True)."""
    found: dict[tuple[str, bool], list[float | str]] = defaultdict(list)
    words = [str(RECIPE), "--data", str(data), "--gpus", str(MACHINES), "--workers", "0", "--threads", "1"]
    words += ["--save-seconds", str(SAVE_SECONDS)]
    for number in range(rounds):
        for case in [one for one in ("worker", "head") if one in cases]:
            for tuned in (True, False):
                folder = work_folder / f"torchrun-{case}-{tuned}-{number}"
                with TorchrunElastic(folder, words, process_environment(work_folder), tuned) as run:
                    run.wait_until_training()
                    found[case, tuned].append(run.kill_agent(kill_head=case == "head"))
                print_measurement(f"torchrun {'tuned' if tuned else 'defaults'}, {case}", found[case, tuned][-1])
    return found


def process_environment(work_folder: Path) -> dict[str, str]:
    """Return what all processes get: a home and a tmux server of their own, and a mark by which they are found."""
    kept = {name: text for name, text in os.environ.items() if name not in ("TMUX", "IMGNET_RUNS")}
    own = {"HOME": str(work_folder), "TMUX_TMPDIR": str(work_folder), "TERM": "xterm", MARK_VARIABLE: work_folder.name}
    return {**kept, **own, "PYTHONPATH": str(ROOT)}


def kill_leftover_processes(work_folder: Path) -> int:
    """Kill whatever has our mark until there is nothing, for some seconds. Returns how many are still there."""
    mark = f"{MARK_VARIABLE}={work_folder.name}".encode()
    left: list[int] = []
    for _ in range(50):
        left = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    left.append(int(entry.name))
                    os.kill(int(entry.name), signal.SIGKILL)
        if not left:
            break
        time.sleep(0.1)
    return len(left)


def print_measurement(what: str, seconds: float | str) -> None:
    """Print a measurement."""
    text = seconds if isinstance(seconds, str) else f"{seconds:.2f} s"
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", flush=True)


def format_cell(values: Sequence[float | str]) -> str:
    """Return median, least and most, and how often there was no number."""
    known = [one for one in values if not isinstance(one, str)]
    parts = [f"{statistics.median(known):.1f} ({min(known):.1f}-{max(known):.1f})"] if known else []
    why = Counter(one for one in values if isinstance(one, str))
    return "; ".join(parts + [f"{text}: {count} of {len(values)}" for text, count in why.items()])


def table(
    our_seconds: dict[str, list[float]],
    torchrun_seconds: dict[tuple[str, bool], list[float | str]],
    load_before: Sequence[float],
) -> Iterator[str]:
    """Yield the part of RESULTS.md."""
    import torch

    count = max((len(one) for case, one in our_seconds.items() if case != "join"), default=0)
    peer = max((len(one) for one in torchrun_seconds.values()), default=0)
    yield "## Seconds from a loss to the next training step, beside torchrun elastic"
    yield ""
    yield (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, gloo; load {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after. `launch --local "
        f"--machines {MACHINES} --workers 0 --save-seconds {SAVE_SECONDS} recipes/cifar10.py`; torchrun with the same "
        f"trainer, four agents, `--max-restarts=1000`. Median (least-most), n = {count}, torchrun {peer}, joins "
        f"{len(our_seconds.get('join', ()))}. Written by `benchmarks/elastic/recovery.py`."
    )
    yield ""
    yield "| | attempt files | torchrun elastic, defaults | tuned, its store elsewhere |"
    yield "|---|---|---|---|"
    for case in [one for one in CASE_TITLES if one in our_seconds]:
        cells = (
            format_cell(our_seconds[case]),
            format_cell(torchrun_seconds.get((case, False), ())),
            format_cell(torchrun_seconds.get((case, True), ())),
        )
        yield f"| {CASE_TITLES[case]} | {' | '.join(cells)} |"


def main() -> int:
    """Measure and print; with everything measured, write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Seconds from a loss to the next training step.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASE_TITLES)} (default: all)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="CIFAR-10 as JPEG files")
    parser.add_argument("--quick", action="store_true", help="each case once, and nothing is written")
    parser.add_argument("--no-torchrun", action="store_true", help="leave out the peer")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASE_TITLES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    cases = options.cases or list(CASE_TITLES)
    place = Path(tempfile.mkdtemp(prefix=f"imgr-{uuid4().hex[:6]}-", dir="/tmp"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load = os.getloadavg()
    try:
        mine = measure_ours(place, options.data.resolve(), cases, 1 if options.quick else ROUNDS)
        theirs = {}
        if not options.no_torchrun:
            theirs = measure_torchrun(place, options.data.resolve(), cases, 1 if options.quick else PEER_ROUNDS)
    except KeyboardInterrupt:
        return 130
    finally:
        left = kill_leftover_processes(place)
        print(f"{left} processes do not die" if left else "nothing was left running", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    lines = list(table(mine, theirs, load))
    print("\n".join(["", *lines]))
    if not (options.cases or options.quick or options.no_torchrun):
        write_section("recovery.py", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
