"""The trainer on real GPUs, in processes of its own: a run and its resume, NCCL, and the texts of its failures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
RECIPE = REPO / "recipes/quickstart.py"
FAILS_ON_THE_GPU = """
import sys, torch
from train.engine.agent_channel import AgentChannel
sys.excepthook = AgentChannel().excepthook
torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
"""
FILLS_THE_MEMORY = """
import torch
from torch import nn
from train.engine import inputs, warmup
net, preprocessor = nn.Conv2d(3, 64, 3, padding=1).cuda(), inputs.BatchPreprocessor(torch.device("cuda", 0))
warmup.warm_up(net, net, [(1 << 16, 512, 512)], [], preprocessor)
"""
# The same weights to the bit after 20 steps with and without graphs, and with them in stages.
GRAPHS = """
import sys, torch
from pathlib import Path
from train.distributed import cuda_graphs
from train.engine import inputs
from train.models import registry
from train.recipe.components import Model
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.deterministic = True
preprocessor = inputs.BatchPreprocessor(torch.device("cuda", 0), precision=sys.argv[1])
weights = []
for shapes, in_stages in (([], False), ([(8, 64, 64), (4, 96, 96)], False), ([(8, 64, 64), (4, 96, 96)], True)):
    net = registry.build_model(Model(name="resnet18"), 10, 0).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=preprocessor.compute_dtype == torch.float16)
    problem = cuda_graphs.CudaGraphs(net.train(), preprocessor, Path()).try_capture(shapes, in_stages)
    assert not problem, problem
    torch.manual_seed(0)
    for step in range(20):
        for n, size in ((8, 64), (4, 96), (4, 96), (3, 64)):
            images = torch.rand(n, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
            with preprocessor.autocast():
                scaler.scale(net(images).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    weights.append([*net.state_dict().values()])
assert all(torch.equal(*pair) for graphed in weights[1:] for pair in zip(weights[0], graphed)), "they differ"
"""

# With dropout and memory of another stream, both of which a capture that has failed may leave out of order.
WAITS = """
import contextlib, sys, torch
from pathlib import Path
from torch import nn
from train.distributed import cuda_graphs
from train.engine.inputs import BatchPreprocessor
class Waits(nn.Sequential):
    def forward(self, images):
        scores = super().forward(images)
        return scores * (2 if scores.sum().item() > 0 else 1)
if sys.argv[1] == "1":
    cuda_graphs._waits_refused = contextlib.nullcontext
net = Waits(nn.Flatten(), nn.Dropout(), nn.Linear(3 * 32 * 32, 3)).cuda()
preprocessor = BatchPreprocessor(torch.device("cuda", 0))
print(cuda_graphs.CudaGraphs(net, preprocessor, Path()).try_capture([(8, 32, 32)], False))
side = torch.cuda.Stream()
for step in range(50):
    with torch.cuda.stream(side):
        images = torch.rand(1 << 20, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    images.record_stream(torch.cuda.current_stream())
    with preprocessor.autocast():
        net(images[:8 * 3 * 32 * 32].view(8, 3, 32, 32)).sum().backward()
    reserved = torch.cuda.memory_reserved() if step == 9 else reserved if step else 0
assert torch.cuda.memory_reserved() == reserved, "memory that was used by another stream does not come back"
"""

# Three right steps, and one that is aborted while its kernels wait. The GPU reads the word after the abort has begun.
GUARD = """
import torch
import torch.distributed as dist
from train.distributed import gpu, regroup
from train.distributed.guard import StepGuard
device = torch.device("cuda", 0)
def join(name):
    dist.init_process_group("nccl", store=dist.PrefixStore(name, dist.HashStore()), rank=0, world_size=1)
    guard = StepGuard(1, device, name)
    regroup.before_abort(guard.poison)
    return guard
def step(guard, gradient):
    dist.all_reduce(gradient)
    guard.check_step([weights])
    weights.add_(gradient)
weights, one = torch.zeros(1 << 20, device=device), torch.ones(1 << 20, device=device)
guard = join("first")
for _ in range(3):
    step(guard, one.clone())
guard.confirm()
assert not regroup.has_failed()
torch.cuda._sleep(3 * 10**9)
step(guard, one * float("nan"))
regroup.leave_group()
assert gpu.find_problem_after_abort(device, 60.0) == ""
assert guard.go_back() and weights.eq(3).all(), weights
regroup.destroy_left_groups()
guard = join("second")
step(guard, one.clone())
guard.confirm()
assert not guard.go_back() and weights.eq(4).all(), weights
"""


@pytest.fixture
def environment(tmp_path: Path, gpus_of_computer: str | None) -> dict[str, str]:
    """The environment of processes that see the GPUs, and whose agent's folder is a temporary one."""
    variables = {**os.environ, "PYTHONPATH": str(REPO), "IMGNET_WORK": str(tmp_path / "000001")}
    (tmp_path / "000001").mkdir()
    del variables["CUDA_VISIBLE_DEVICES"]
    return variables if gpus_of_computer is None else {**variables, "CUDA_VISIBLE_DEVICES": gpus_of_computer}


def run_python(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def trainer_argv(images: Path, out: Path, *options: str) -> Sequence[str]:
    return ("-m", "train", str(RECIPE), "--data", str(images), "--out", str(out), "--procs", "1", *options)


def result_of(out: Path) -> Any:
    return json.loads((out / "result.json").read_text())


def test_run_that_is_killed_resumes_to_its_end(images: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    del environment["IMGNET_WORK"]
    out = tmp_path / "out"
    argv = [sys.executable, *trainer_argv(images, out, "--save-seconds", "0")]
    process = subprocess.Popen(argv, env=environment, start_new_session=True)
    while not list(out.glob("checkpoints/*/*.pt")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    completed = run_python(environment, *trainer_argv(images, out))
    assert completed.returncode == 0, completed.stderr
    assert result_of(out)["device"] == "cuda" and "resumed from" in completed.stdout


def test_two_processes_sum_by_nccl(images: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], env=environment, capture_output=True, text=True).stdout
    if listed.count("GPU ") < 2:
        pytest.skip("needs two GPUs: NCCL refuses two processes on one")
    del environment["IMGNET_WORK"]
    completed = run_python(environment, *trainer_argv(images, tmp_path / "out"), "--procs", "2")
    assert completed.returncode == 0, completed.stderr
    assert result_of(tmp_path / "out")["procs"] == 2 and "2 processes, by " in completed.stdout


def test_a_step_that_is_aborted_on_the_gpu_is_undone_and_the_process_joins_another_group(
    environment: dict[str, str],
) -> None:
    completed = run_python(environment, "-c", GUARD)
    assert completed.returncode == 0, completed.stderr


def test_cuda_error_is_told_by_its_telling_line(environment: dict[str, str], tmp_path: Path) -> None:
    assert run_python({**environment, "RANK": "0"}, "-c", FAILS_ON_THE_GPU).returncode == 1
    failure = json.loads((tmp_path / "000001/failed-0.json").read_text())
    assert failure["reason"].startswith("GPU 0: CUDA error: ") and failure["fault"] == "own"


def test_full_memory_is_told_in_one_line(environment: dict[str, str]) -> None:
    completed = run_python(environment, "-c", FILLS_THE_MEMORY)
    assert "TrainingError: a batch of 65536 images of 512 x 512 pixels needs more memory" in completed.stderr


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_graphs_train_as_without_them(precision: str, environment: dict[str, str]) -> None:
    """To the bit: gradients of several chunks, two shapes in one pool of memory, and a shape without a graph."""
    completed = run_python({**environment, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "-c", GRAPHS, precision)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_a_run_trains_by_graphs_and_says_so(
    precision: str, images: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The replays of its shapes have computed what passes without a graph do, without the deterministic kernels too."""
    del environment["IMGNET_WORK"]
    completed = run_python(environment, *trainer_argv(images, tmp_path / "out", "--precision", precision))
    assert completed.returncode == 0, completed.stderr
    assert "CUDA graphs: " in completed.stdout and "CUDA graphs are off" not in completed.stdout
    assert result_of(tmp_path / "out")["device"] == "cuda" and not [*(tmp_path / "out").glob("capturing-*")]


def test_a_network_that_waits_for_the_gpu_goes_on_without_graphs(environment: dict[str, str], tmp_path: Path) -> None:
    """Where torch finds the wait before the capture, and where the capture fails."""
    for number in range(2):
        completed = run_python(environment, "-c", WAITS, str(number))
        assert completed.returncode == 0 and "cannot be captured" in completed.stdout, completed.stderr
