"""Benchmarks that must follow changes of what they call: one answers our commands by their text, one needs a GPU."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "launch/waiting.py"
# Without "compile": torch's compiler takes minutes on busy cores.
PARTS_BUT_COMPILE = (
    *("prepare", "smoke", "eager", "peer", "warm-up", "hooks", "feed", "recovery", "graphs", "cifar", "goodput"),
)


def test_launch_on_machines_that_only_wait_is_measured() -> None:
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "1", "2", "--rounds", "1"], capture_output=True, text=True, timeout=240
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "2 machines / 1: " in completed.stdout


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
    refused = subprocess.run([*argv, "--report"], capture_output=True, text=True)
    assert refused.returncode == 1 and "has no measurement of a GPU; RESULTS.md stays as it is" in refused.stderr
    out.unlink()
    short = subprocess.run([*argv, "--dry-run", "--budget", "1.5", "--parts", "eager", "graphs"], timeout=100)
    last = json.loads(out.read_text().splitlines()[-1])
    assert short.returncode == 1 and last["result"] == "not measured: the budget of time was used up"
