"""Commands that run modules of this project, and the GPUs that are visible."""

import subprocess
from pathlib import Path

import pytest

from cluster.connectors.local import module_command, visible_gpus


def test_module_command_ignores_packages_in_current_folder(tmp_path: Path) -> None:
    for name in ("train", "cluster", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    completed = subprocess.run(module_command("cluster", "--version"), cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0 and completed.stdout.startswith("imgnet-cluster"), completed


@pytest.mark.parametrize(
    ("variable", "names"),
    [("", ()), ("-1", ()), ("0", ("0",)), ("0,1, 2", ("0", "1", "2")), ("GPU-1,GPU-2", ("GPU-1", "GPU-2"))],
)
def test_visible_gpus_reads_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, variable: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == names
