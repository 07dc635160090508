"""`imgnet-cluster eval`: its process, what the command prints, and its picture."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ClusterError
from cluster.jobs import checkpoints


def test_run_module_yields_messages_and_raises_errors(sandbox: Any) -> None:
    def run(program: str) -> Any:
        return checkpoints.run_module([sys.executable, "-c", program])

    messages = run('print(\'{"kind": "row", "n": 1}\', flush=True); import time; time.sleep(60)')
    assert next(messages) == {"kind": "row", "n": 1}
    messages.close()  # kills the process; the fixture checks that
    with pytest.raises(ClusterError, match=r"^too small$"):
        list(run('print(\'{"kind": "error", "error": "too small"}\'); raise SystemExit(1)'))
    with pytest.raises(ClusterError, match="ended with code 7"):
        list(run("raise SystemExit(7)"))


@pytest.fixture(scope="module")
def evaluated(finished: Any) -> Any:
    """All crops of the finished job's network, as JSON, with a picture."""
    options = ("--crops", "center,rect,five,tta", "--sizes", "32,48", "--workers", "0", "-o", "json")
    return finished.cli("eval", "job-1", *options, "--plot", "crops.png")


def test_eval_of_a_checkpoint_file_prints_tables_although_its_plot_cannot_be_written(
    finished: Any, evaluated: Any, tmp_path: Path
) -> None:
    report = json.loads(evaluated.out)
    shutil.copy(report["checkpoint"], tmp_path / "kept.safetensors")
    words = ("eval", tmp_path / "kept.safetensors", "--data", finished.data, "--sizes", "32", "--workers", "0")
    ran = finished.cli(*words, "--plot", tmp_path / "no/x.png")
    assert ran.code == 2 and ran.err == f"error: --plot {tmp_path / 'no/x.png'}: there is no folder {tmp_path / 'no'}\n"
    (tmp_path / "x.png").mkdir()
    ran = finished.cli(*words, "--plot", tmp_path / "x.png")
    assert ran.code == 1 and f"--plot {tmp_path / 'x.png'}: " in ran.err, ran
    lines = [line.split() for line in ran.out.splitlines()]
    rows = {row["crop"]: row for row in report["rows"] if row["size"] == 32}
    assert ["center", "32", "1", f"{rows['center']['top1']:.3f}"] in [cells[:4] for cells in lines]
    assert f"3 epochs done, step {report['step']}; 20 images" in ran.out
    assert "classes of the lowest accuracy, center at 32:" in ran.out
    assert "top-1 at 32 pixels, by width / height:" in ran.out
    by_ratio = list(zip(rows["center"]["buckets"], rows["rect"]["buckets"], strict=True))
    printed = [[float(cell) for cell in cells[1:]] for cells in lines[-len(by_ratio) :]]
    expected = [[center["images"], center["top1"], rect["top1"]] for center, rect in by_ratio]
    assert printed == [pytest.approx(row, abs=0.051) for row in expected]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("job-7",), 102, "no such job"),
    (("nowhere.pt",), 2, "nowhere.pt: there is no such file"),
    (("home",), 2, "is neither a job nor a checkpoint"),
    (("job-1", "--crops", "middle"), 2, "choose from center, rect, five, tta"),
    (("job-1", "--sizes", "224,8"), 2, "whole numbers from 16 to 4096"),
    (("job-1", "--sizes", ""), 2, "whole numbers from 16 to 4096"),
    (("job-1", "--plot", "x.jpg"), 2, "ends in .png"),
    (("job-1", "--procs", "0"), 2, "--procs"),
    ((), 102, "there is no job in"),
])  # fmt: skip
def test_eval_refuses_bad_input_in_one_line(sandbox: Any, arguments: tuple[str, ...], code: int, message: str) -> None:
    ran = sandbox.cli("eval", *arguments)
    assert ran.code == code and message in ran.err and ran.err.count("\n") == 1 and not ran.out, ran
