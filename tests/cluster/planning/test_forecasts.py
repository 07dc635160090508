"""Candidates for a launch, and constants measured by jobs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.specs import TINY
from support.train_records import make_epoch, make_result

from cluster.backends.aws.shipped_tables import MachineType
from cluster.errors import BadInput
from cluster.planning import forecasts
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes, plan
from cluster.state import result as state_result
from cluster.state.result import write_result
from cluster.state.states import JobState
from cluster.state.status import JobResult
from infra.aws.market.instance_types import BUILTIN_TYPES, ON_DEMAND_PRICES, RETIREMENT_REASONS
from train.forecast import DEFAULT_CONSTANTS, Constants, Forecast, forecast
from train.recipe import Model
from train.recipe.schedule import Schedule
from train.tools.records import encode

(LARGE,) = load_recipes("recipes/resnet50_18min.py")
A100 = forecasts.get_machine_type("p4d.24xlarge")
H100 = forecasts.get_machine_type("p5.48xlarge")
OWN_CPU = MachineType("machine of job-3", 2, "CPU", 0.0, None, 0.0)
OWN_GPU = replace(OWN_CPU, gpu="")


@pytest.fixture(autouse=True)
def isolated_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def test_candidate_has_the_forecast_and_the_price_of_its_builtin_type() -> None:
    builtin = BUILTIN_TYPES[A100.name]
    planned = plan(LARGE, make_launch_options(backend="plan", machines=4, procs=8))
    row = forecasts.make_candidate(planned, A100, DEFAULT_CONSTANTS)
    machine: dict[str, Any] = {"gpu": builtin.gpu, "gbit": builtin.network_gbps, "vcpus": builtin.vcpus}
    expected = forecast(planned.recipe_schedule, gpus=8, machines=4, **machine)
    assert expected and row.forecast == expected and row.machines == 4
    assert row.dollars == pytest.approx(ON_DEMAND_PRICES[A100.name] * 4 * expected.minutes / 60)


def test_machine_types_by_name_and_by_recipe() -> None:
    assert forecasts.get_machine_type("p3.16xlarge").retired_reason == RETIREMENT_REASONS["p3.16xlarge"]
    assert LARGE.types[0] == "p3.16xlarge" and forecasts.default_machine_type(LARGE) == A100
    unknown = forecasts.default_machine_type(replace(LARGE, types=("p3.16xlarge",)))
    assert (unknown.gpus, unknown.gpu, unknown.on_demand_price) == (LARGE.gpus, "", None)


def test_write_result_adds_constants_and_forecast_errors(hand_made: Any) -> None:
    recipe = replace(TINY, model=Model(name="resnet18"), phases=[replace(TINY.phases[0], epochs=(0, 1))])
    schedule = Schedule(recipe, 60, 1)
    planned = forecast(schedule, gpus=1, gpu="V100", gbit=1.0, machines=1)
    assert planned
    run = hand_made(forecast=planned)
    epoch = make_epoch(steps=8, train_images=60, val_images=20, where={"steps": 1.5, "validation": 0.5})
    run.write_shared("result.json", json.dumps(encode(make_result(epoch, schedule=tuple(schedule.table())))))
    write_result(run.job.run, run.job.backend)
    result = run.job.result
    assert result.forecast == planned
    compared = {row.term: row for row in result.against}
    assert compared["steps"].actual == 1.5
    assert compared["steps"].forecast == pytest.approx(
        sum(planned.terms[term] for term in ("compute", "all-reduce", "optimizer"))
    )
    constants = forecasts.measured_constants("job-1", result)
    assert constants.batch_timings == ((32, 8, pytest.approx(0.2)),) and constants.source == "job-1"


def test_result_that_lacks_measurements_has_no_constants(hand_made: Any) -> None:
    planned = Forecast(minutes=1.0, terms={})
    run = hand_made(forecast=planned)
    write_result(run.job.run, run.job.backend, end_reason="it fell", end_state=JobState.FAILED)
    failed = run.job.result
    assert failed.state == "failed" and (failed.forecast, failed.against, failed.constants) == (None, None, None)
    no_schedule = JobResult(state=JobState.DONE, reason="", epochs=(), attempts=1)
    no_steps = replace(no_schedule, schedule=(), schedule_gpus=1)
    for useless in (no_schedule, no_steps):
        assert state_result.with_forecast(useless, planned) == useless
    for result in (None, failed, no_steps):
        with pytest.raises(BadInput, match=r"^--from job-1: .*; name one that is done: imgnet-cluster ls$"):
            forecasts.measured_constants("job-1", result)


OWN = Constants(source="job-3", batch_timings=((224, 64, 1.0),), epoch_seconds=3.0, startup_seconds=9.0)
OWN_WITH_BOOT = replace(
    OWN,
    boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
    setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
    fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
)
RENTED_CPU = replace(OWN_CPU, name="c7i.2xlarge", on_demand_price=0.4)


@pytest.mark.parametrize(("job_type", "machine_type", "expected", "note"), [
    (A100, A100, OWN, ""),
    (OWN_GPU, OWN_GPU, OWN, ""),
    (OWN_GPU, H100, OWN_WITH_BOOT, "p5.48xlarge is assumed to be as fast as the machines of job-3"),
    (A100, replace(A100, name="p4de.24xlarge"), OWN, "assumed to be as fast"),
    (OWN_CPU, RENTED_CPU, OWN_WITH_BOOT, "assumed to be as fast"),
    (A100, H100, DEFAULT_CONSTANTS, "job-3 ran on A100: the speed of H100 is the preset's"),
    (OWN_CPU, A100, DEFAULT_CONSTANTS, "job-3 ran on CPU: the speed of A100 is the preset's"),
    (OWN_GPU, RENTED_CPU, DEFAULT_CONSTANTS, "job-3 ran on GPUs: the speed of CPU is the preset's"),
])  # fmt: skip
def test_constants_for_another_machine_type(
    job_type: MachineType, machine_type: MachineType, expected: Constants, note: str
) -> None:
    constants, note_given = forecasts.constants_for_type(OWN, job_type, machine_type)
    assert constants == expected and note in note_given and bool(note) == bool(note_given)


def test_job_machine_type_of_rented_and_own_machines(hand_made: Any) -> None:
    spec = hand_made(procs=2).spec
    on_cpu = JobResult(state=JobState.DONE, reason="", epochs=(), attempts=1, device="cpu")
    assert forecasts.job_machine_type(spec, on_cpu) == replace(OWN_CPU, name=f"machine of {spec.name}")
    assert forecasts.job_machine_type(spec, None) == replace(OWN_GPU, name=f"machine of {spec.name}")
    rented = replace(spec, cloud={"places": [{"type": H100.name}, {"type": A100.name}]})
    assert forecasts.job_machine_type(rented, None, A100.name) == A100, "not the type that was tried first"
