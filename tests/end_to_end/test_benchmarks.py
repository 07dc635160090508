"""The benchmark for one GPU runs on a CPU too, so that it follows changes of what it calls."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Without "compile": torch's compiler takes minutes on busy cores.
PARTS_BUT_COMPILE = ("graphs", "eager", "prepare", "feed", "recovery", "goodput", "peer", "warm-up", "hooks", "cifar")


def test_gpu_benchmark_rehearses_its_parts_on_a_cpu(tmp_path: Path) -> None:
    """Each part gives rows, a rehearsal is no measurement, and a part that is out of time costs no other."""
    out = tmp_path / "rows.jsonl"
    argv = [sys.executable, str(BENCHMARKS / "training/gpu.py"), "--out", str(out)]
    completed = subprocess.run(
        [*argv, "--dry-run", "--parts", *PARTS_BUT_COMPILE], capture_output=True, text=True, timeout=900, cwd=tmp_path
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert completed.returncode == 0, [row for row in rows if "failed" in row["result"]]
    assert {row["part"] for row in rows} == set(PARTS_BUT_COMPILE)
    feeds = [row["what"] for row in rows if row["part"] == "feed"]
    assert len(feeds) == 2 and ", graphs," in feeds[0] and ", no graphs," in feeds[1]
    starts = [row["numbers"] for row in rows if row["part"] == "recovery"]
    assert len(starts) == 3 and all({"start to first step", "indexing", "warming"} <= {*row} for row in starts[:2])
    refused = subprocess.run([*argv, "--report"], capture_output=True, text=True)
    assert refused.returncode == 1 and "has no measurement of a GPU; RESULTS.md stays as it is" in refused.stderr
    out.unlink()
    unknown = subprocess.run([*argv, "--dry-run", "--search", "8x32", "4x32"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "--search 8x32: is none of 4x32, 2x48" in unknown.stderr
    search = subprocess.run([*argv, "--dry-run", "--search", "2x48"], capture_output=True, text=True, timeout=600)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert search.returncode == 0, rows
    assert [row["part"] for row in rows] == [f"search-2x48-auto-{state}" for state in ("off", "on")], "each by itself"
    assert ["gain" in row["numbers"] for row in rows] == [False, True]
    out.unlink()
    short = subprocess.run([*argv, "--dry-run", "--budget", "1.5", "--parts", "eager", "peer"], timeout=100)
    last = json.loads(out.read_text().splitlines()[-1])
    assert short.returncode == 1 and last["result"] == "not measured: the budget of time was used up"
