"""What a report shows of one job. `cluster/report/facts.py` collects it, page and charts show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.state.job_result import JobResult
from cluster.state.status import JobStatus
from cluster.state.timeline import AttemptRow
from infra.costs import MachineCost
from train.forecast import Forecast, TermComparison
from train.metrics.confusion import ConfusedPair, Confusion
from train.recipe.history import EpochResult
from train.recipe.schedule import PhaseRow


class Activity(StrEnum):
    """What a machine did, as the chart of machines shows it."""

    GETTING_READY = "getting ready"
    TRAINING = "training"
    VALIDATING = "validating"
    WAITING = "waiting"
    LOST = "lost"


ActivitySpan = tuple[Activity, float, float]  # with begin and end in seconds
SpansByMachine = Mapping[str, Sequence[ActivitySpan]]
RelativeBox = tuple[float, float, float, float]  # left, top, width, height as fractions of an image
PixelSize = tuple[int, int]  # width, height


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A moment of a curve: the seconds at work, and the images seen until then."""

    seconds: float
    images: int


@dataclass(frozen=True, kw_only=True)
class StepPoint(CurvePoint):
    """What was measured about once a second; None for what was not."""

    attempt: int
    loss: float | None = None
    lr: float | None = None
    image_size: float | None = None
    global_batch: float | None = None
    images_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class EpochPoint(CurvePoint):
    """The end of an epoch, and what the epoch measured."""

    result: EpochResult


@dataclass(frozen=True, kw_only=True)
class TimelineRow(AttemptRow):
    """One attempt, with the seconds at work when it was agreed on."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class CostFacts:
    """What a job has cost.

    `total` is in dollars, `machines` has a row for each rented machine, `over_time` has points (seconds since the first
    launch, dollars until then), and `unknown` names the machines without a known price, which are in no sum.
    """

    total: float
    machines: Sequence[MachineCost] = ()
    over_time: Sequence[tuple[float, float]] = ()
    unknown: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class SampleImage:
    """A validation image as a thumbnail, with the part of it that the validation sees.

    `src` is a data URI, `size` that of the image, `shown` that of the thumbnail, `pixels` that of the crop. `square`
    and `rectangle` are the crops; `rectangle` is None when the phase does not use it.
    """

    label: str
    src: str
    size: PixelSize
    shown: PixelSize
    square: RelativeBox
    rectangle: RelativeBox | None
    pixels: PixelSize


@dataclass(frozen=True, kw_only=True)
class ConfusedClasses:
    """A frequent error, with an image of the true class and one of the class that the network named, as data URIs."""

    pair: ConfusedPair
    true_src: str
    predicted_src: str


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """All that a report shows of a job, in any state. Times are in seconds at work.

    `schedule`, `forecast` and `forecast_comparison` are those of the result or, before it, of the plan. `settings` are
    those worth comparing with other jobs, None where a value would mislead. `losses` are (machine, moment).
    `provenance` is what is needed to reproduce the numbers.
    """

    job: str
    status: JobStatus
    result: JobResult | None
    model: str
    settings: Mapping[str, str | int | float | None]
    data: str
    backend: str
    machines: int
    processes: int
    epochs: Sequence[EpochPoint]
    steps: Sequence[StepPoint]
    schedule: Sequence[PhaseRow]
    timeline: Sequence[TimelineRow]
    activity: SpansByMachine
    losses: Sequence[tuple[str, float]]
    hosts: Mapping[str, str]
    forecast: Forecast | None
    forecast_comparison: Sequence[TermComparison]
    cost: CostFacts
    sample_images: Sequence[SampleImage]
    confusion: Confusion | None  # of the last validation; None before the job is done
    confused_classes: Sequence[ConfusedClasses]
    provenance: Sequence[tuple[str, str]]
