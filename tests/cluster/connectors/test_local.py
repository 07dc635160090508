"""The GPUs that are visible on this computer."""

import pytest

from cluster.connectors.local import visible_gpus


@pytest.mark.parametrize(
    ("variable", "names"),
    [("", ()), ("-1", ()), ("0", ("0",)), ("0,1, 2", ("0", "1", "2")), ("GPU-1,GPU-2", ("GPU-1", "GPU-2"))],
)
def test_visible_gpus_reads_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, variable: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == names
