"""A training run as plain data: a recipe is phases, a model, a data set and an optimizer.

    recipe = Recipe(
        name="small",
        data=Data(name="cifar10", root="data/cifar10", train=50_000, val=10_000),
        model=Model(name="resnet10_cifar"),
        gpus=1,
        phases=[
            Phase(epochs=(0, 4), size=32, batch=64, lr=(0.05, 0.2)),
            Phase(epochs=(4, 8), size=32, batch=64, lr=(0.2, 0.0)),
        ],
    )

Every object is frozen, takes keyword arguments only, and is checked when it is built: a `ValueError` names the row, the
field and the value. This module imports neither torch nor boto3, so that `plan` and `--help` answer at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from . import validators
from .components import GRAPHS, PRECISIONS, RESNETS, Comm, Data, Model, Optim

LR_SHAPES = ("linear", "cosine", "polynomial", "one_cycle", "gradual_warmup", "constant_warmup")
SINGLE_LR_SHAPES = ("one_cycle", "gradual_warmup", "constant_warmup")  # shapes that take one number, their peak
FIXRES = "fixres"  # a value of `frozen`
TRIVIAL = "trivial"  # a value of `augment`
VALIDATION_POLICIES = ("each", "last", "near", "never")
SIZE_STEP = 32  # pixels: networks halve the image five times; the step of ffcv-imagenet
REFERENCE_BATCH = 256  # images: Goyal et al. 2017, section 2.1, state learning rates per 256 images
MACHINE_TYPE_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # p4d.24xlarge, a3-highgpu-8g
FULL_SIZE = "full"  # the name of the full-size images where resized copies are named by their short side


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One row of the schedule: consecutive epochs with the same image size, batch and learning-rate shape.

    A phase is complete in itself: nothing is inherited from the row above.

    Attributes:
        epochs: (start, end), counted from 0, end excluded. Rows must follow each other without gap or overlap.
        size: Side of the square training crop in pixels, at least 16. Or a pair (first, last) of multiples of 32: the
            side grows with the epochs of the phase on a straight line from its first epoch to its last (Tan and Le
            2021, "EfficientNetV2", algorithm 1), rounded to the nearest multiple of 32 as in the recipes of FFCV
            (`get_resolution` of ffcv-imagenet). An epoch is validated at its own size.
        batch: Images per GPU and step. The global batch is `batch` times the number of GPUs.
        lr: Learning rate for the nominal number of GPUs: one number, or (rate of the first step, rate of the last
            step).
        shape: How the learning rate goes from the first step to the last. Default "linear".
            "linear": a straight line, step by step.
            "cosine": half a period of a cosine.
            "polynomial": power 2, as LARS uses it (You et al. 2017).
            "one_cycle": takes one number, the peak. From peak / 25 up to the peak over the first three tenths, then
            down to peak / 250,000, both by half a cosine (Smith and Topin 2017).
            "gradual_warmup": takes one number. A straight line from lr / k to lr, where k = global batch / 256, at
            least 1 (Goyal et al. 2017, section 2.2).
            "constant_warmup": takes one number. Holds lr / k (the same section).
        min_scale: Smallest fraction of the image's area that a random crop covers, above 0 and at most 1. Default 0.08
            (Szegedy et al. 2014, section 6).
        augment: Random crops of varying area and aspect ratio. False: crops of one size, as large as in validation, at
            a random place, and no `transform` of the recipe. Mirroring stays. "trivial": the crops of True, then one
            random operation on colours or shape (TrivialAugmentWide; train/data/loading/augment.py). Default True.
        copy: Short side in pixels of the resized copies to read, at least 32. Default None: the full-size images.
        rect_val: Validate on whole rectangles; the result of the square centre crop is reported beside it.
            Default False.
        rect_train: Train on rectangles of about size x size pixels; all images of a step have one shape
            (train/data/order/rect_train.py). Default False.
        frozen: Train the classifier only. The other layers keep their weights and their batch-norm statistics.
            "fixres": train the last batch norm too, for last epochs at the size of the test (Touvron et al. 2019,
            "Fixing the train-test resolution discrepancy", section 4); only this project's ResNets. Default False.
        validate: After which epochs to validate (train/recipe/validation_policy.py). "each": after every epoch.
            "last": after the last epoch of the phase. "near": once the recipe's `target` is near. "never". The last
            epoch of the run is validated in any case. Default "each".
    """

    epochs: tuple[int, int]
    size: int | tuple[int, int]
    batch: int
    lr: float | tuple[float, float]
    shape: str = "linear"
    min_scale: float = 0.08
    augment: bool | str = True
    copy: int | None = None
    rect_val: bool = False
    rect_train: bool = False
    frozen: bool | str = False
    validate: str = "each"

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, tuple | list) or len(self.epochs) != 2:
            raise ValueError(f"phase {self.epochs!r}, epochs: must be a pair (start, end)")
        start, end = self.epochs
        where = f"phase {start}-{end}"
        validators.check_int(where, "epochs start", start, 0)
        validators.check_int(where, "epochs end", end, 1)
        if start >= end:
            raise ValueError(f"{where}, epochs: must end after they start")
        object.__setattr__(self, "epochs", (start, end))
        if isinstance(self.size, tuple | list):
            object.__setattr__(self, "size", _check_growing_size(where, self.size, end - start))
        else:
            validators.check_int(where, "size", self.size, 16)
        validators.check_int(where, "batch", self.batch, 1)
        validators.check_choice(where, "shape", self.shape, LR_SHAPES)
        if isinstance(self.lr, tuple | list):
            if len(self.lr) != 2:
                raise ValueError(f"{where}, lr: must be a number or a pair (first, last), not {self.lr!r}")
            object.__setattr__(self, "lr", tuple(self.lr))
        for lr in self.lr_endpoints:
            validators.check_number(where, "lr", lr)
        if self.shape in SINGLE_LR_SHAPES and not isinstance(self.lr, int | float):
            raise ValueError(f"{where}, lr: {self.shape} takes one number, its target, not {self.lr!r}")
        validators.check_number(where, "min_scale", self.min_scale, 0.0, 1.0, excluded=[0])
        if self.copy is not None:
            validators.check_int(where, "copy", self.copy, 32)
        for name, word in (("frozen", FIXRES), ("augment", TRIVIAL), ("rect_val", None), ("rect_train", None)):
            validators.check_bool(where, name, getattr(self, name), word)
        validators.check_choice(where, "validate", self.validate, VALIDATION_POLICIES)

    @property
    def lr_endpoints(self) -> tuple[float, float]:
        """`lr` as a pair (first, last). For the shapes that take one number, both are that number."""
        return self.lr if isinstance(self.lr, tuple) else (self.lr, self.lr)

    @property
    def final_size(self) -> int:
        """Side of the training crop in the last epoch of the phase, in pixels."""
        return self.size_in_epoch(self.epochs[1] - 1)

    def size_in_epoch(self, epoch: int) -> int:
        """Return the side of the training crop in an epoch of the phase, counted from the start of the run."""
        if isinstance(self.size, int):
            return self.size
        first_size, last_size = self.size
        start, end = self.epochs
        size = first_size + (last_size - first_size) * (epoch - start) / (end - 1 - start)
        return round(size / SIZE_STEP) * SIZE_STEP


def _check_growing_size(where: str, size: Sequence[object], epochs: int) -> tuple[int, int]:
    """Return the first and the last image size of a phase whose size grows. Raises `ValueError` for a wrong pair."""
    is_pair = len(size) == 2 and all(isinstance(side, int) and not isinstance(side, bool) for side in size)
    first, last = (int(str(side)) for side in size) if is_pair else (0, 0)
    if not 0 < first < last or first % SIZE_STEP or last % SIZE_STEP:
        raise ValueError(
            f"{where}, size: a pair must be two multiples of {SIZE_STEP}, the smaller first, such as (160, 192), "
            f"not {size!r}"
        )
    if epochs < 2:
        raise ValueError(f"{where}, size: {first} cannot grow to {last} in one epoch; give one number")
    return first, last


def check_machine_types(where: str, types: object) -> tuple[str, ...]:
    """Return the machine types as a tuple. Raises `ValueError` when one cannot be a type, or is listed twice."""
    if not isinstance(types, tuple | list):
        raise ValueError(f"{where}, types: must be a list of machine types such as 'p4d.24xlarge', not {types!r}")
    for machine_type in types:
        if not isinstance(machine_type, str) or not MACHINE_TYPE_PATTERN.fullmatch(machine_type):
            raise ValueError(f"{where}, types: {machine_type!r} is no machine type; they look like 'p4d.24xlarge'")
        if types.count(machine_type) > 1:
            raise ValueError(f"{where}, types: {machine_type!r} is listed twice")
    return tuple(types)


def _check_phases(where: str, phases: Sequence[Phase]) -> None:
    """Check that phases follow each other from epoch 0. Raises `ValueError` with `where` and the row, from 1."""
    if not isinstance(phases, Sequence):
        raise ValueError(f"{where}, phases: must be a list of Phase, not {phases!r}")
    if not phases:
        raise ValueError(f"{where}, phases: the list is empty; give at least one Phase")
    end = 0
    for number, phase in enumerate(phases, 1):
        if not isinstance(phase, Phase):
            raise ValueError(f"{where}, row {number}: must be a Phase, not {phase!r}")
        start = phase.epochs[0]
        if start != end:
            kind = "gap" if start > end else "overlap"
            raise ValueError(f"{where}, row {number}, epochs: starts at {start}, but must start at {end} ({kind})")
        end = phase.epochs[1]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete training run: what to train, on which data, and how.

    Give either `phases`, or `tables` with one list of phases for each number of machines that has its own schedule.

    Attributes:
        name: Name of the recipe, shown everywhere. No slashes.
        data: The data set.
        model: The network.
        phases: The schedule. With `tables` it is filled in from the table for `machines`.
        optim: Optimizer and loss. Default `Optim()`: SGD with momentum 0.9.
        machines: Nominal number of machines. The learning rates are stated for `machines` x `gpus` GPUs. Default 1.
        gpus: Nominal number of GPUs in each machine. Default 8.
        seed: Seed of all random numbers, 0 to 2**63 - 1; `--seed` overrides it. Default 0.
        types: Machine types to rent, in order of preference, by their names at the cloud, such as "p4d.24xlarge". The
            backend decides which of them it knows. Default (): none is preferred.
        comm: How gradients are summed over the processes: a `Comm`, or the name of its hook. Default `Comm()`.
        precision: One of `PRECISIONS`: what a GPU computes in; weights and their updates are float32 in any case.
            "auto": bfloat16 where the GPU computes it natively (A100 and newer), float16 on older ones (V100, T4).
            "fp32" leaves cuDNN's convolutions in TF32 on A100 and newer, as torch does. A CPU computes in float32
            always. `--precision` overrides it. Default "auto".
        kernel_search: Let cuDNN try all its kernels for each image shape of a phase before the first step with it. That
            takes some 20 s for each on a GPU; its heuristic's choice was as fast on an H100. Default False.
        graphs: One of `GRAPHS`: whether GPUs replay the network's training as CUDA graphs, captured for each full shape
            of batch (train/distributed/cuda_graphs.py). "auto": where one process trains a network of this project.
            "on": also with several processes, which has never run, and for custom models. Default "auto".
        max_bad: Number of broken images that a run may meet. Each is named, and replaced by the next of its class. One
            more ends the run. `--max-bad` overrides it. Default 10.
        target: Top-5 accuracy in percent that the run is for. It is reported, and phases with `validate="near"` need
            it; training ends there only with `--target`. Default None.
        patience: End training after so many validations in a row without a higher top-1 than before them. Default
            None: train to the end of the schedule.
        transform: `"package.module:function"`, a function that changes each training image after its crop and mirroring
            and before its normalization, in phases that augment. It is called with (uint8 array [height, width, 3],
            numpy.random.Generator) and returns an array of the same type and shape. Default None.
        tables: Phases by number of machines. Default {}: `phases` holds on any number of machines.
    """

    name: str
    data: Data
    model: Model
    optim: Optim = field(default_factory=Optim)
    comm: Comm = field(default_factory=Comm)
    phases: Sequence[Phase] = ()
    tables: Mapping[int, Sequence[Phase]] = field(default_factory=dict)
    machines: int = 1
    gpus: int = 8
    seed: int = 0
    types: tuple[str, ...] = ()
    precision: str = "auto"
    kernel_search: bool = False
    graphs: str = "auto"
    max_bad: int = 10
    target: float | None = None
    patience: int | None = None
    transform: str | None = None

    def __post_init__(self) -> None:
        where = f"recipe {self.name!r}"
        if not isinstance(self.name, str) or not self.name or any(character in "/\\\0\n" for character in self.name):
            raise ValueError(f"{where}, name: must be a text without slashes or line ends")
        if isinstance(self.comm, str):
            object.__setattr__(self, "comm", Comm(hook=self.comm))
        for name, kind in (("data", Data), ("model", Model), ("optim", Optim), ("comm", Comm)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{where}, {name}: must be a {kind.__name__}, not {getattr(self, name)!r}")
        for name, minimum in (("machines", 1), ("gpus", 1), ("seed", 0), ("max_bad", 0)):
            validators.check_int(where, name, getattr(self, name), minimum)
        if self.seed >= 2**63:
            raise ValueError(f"{where}, seed: must be below 2**63, not {self.seed}")
        object.__setattr__(self, "types", check_machine_types(where, self.types))
        validators.check_choice(where, "precision", self.precision, PRECISIONS)
        validators.check_bool(where, "kernel_search", self.kernel_search)
        validators.check_choice(where, "graphs", self.graphs, GRAPHS)
        if self.target is not None:
            validators.check_number(where, "target", self.target, 0.0, 100.0)
        if self.patience is not None:
            validators.check_int(where, "patience", self.patience, 1)
        if self.transform is not None:
            name = validators.check_name_or_function(where, "transform", self.transform, ())
            object.__setattr__(self, "transform", name)
        if not isinstance(self.tables, Mapping):
            raise ValueError(f"{where}, tables: must be phases by number of machines, not {self.tables!r}")
        for machines, rows in self.tables.items():
            validators.check_int(where, "tables, machines", machines, 1)
            _check_phases(f"{where}, table for {machines} machines", rows)
        tables = {machines: tuple(rows) for machines, rows in self.tables.items()}
        if tables and self.machines not in tables:
            raise ValueError(f"{where}, machines: no table for {self.machines}; there are {sorted(tables)}")
        phases = tables[self.machines] if tables else self.phases
        _check_phases(where, phases)
        if self.target is None and any(phase.validate == "near" for phase in phases):
            raise ValueError(
                f'{where}, target: missing, but a phase has validate="near"; give it in percent, as in target=93.0'
            )
        if self.model.name not in RESNETS and any(phase.frozen == FIXRES for phase in phases):
            raise ValueError(
                f"{where}, frozen: the last norm of {self.model.name!r} is not known; set frozen=True instead of "
                f'"{FIXRES}", to train the classifier only'
            )
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "phases", tuple(phases))

    @property
    def nominal_gpus(self) -> int:
        """Number of GPUs for which the phases state their learning rates: `machines` x `gpus`."""
        return self.machines * self.gpus

    @property
    def epochs(self) -> int:
        """Number of epochs of all phases together."""
        return self.phases[-1].epochs[1]

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """The resized copies that the phases read, by their short side in pixels, ascending."""
        return tuple(sorted({phase.copy for phase in self.phases if phase.copy is not None}))

    def for_machines(self, machines: int) -> Self:
        """Return the recipe with the table for a number of machines, else the next smaller or the smallest table."""
        if not self.tables:
            return self
        chosen = max((count for count in self.tables if count <= machines), default=min(self.tables))
        return replace(self, machines=chosen)

    def to_json(self) -> dict[str, Any]:  # Any: JSON of any shape
        """Return plain data from which `from_json` builds an equal recipe, without the tables that are not used."""
        return asdict(replace(self, tables={}))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:  # Any: JSON that may be damaged
        """Build a recipe from what `to_json` returned; fields with a default may be missing. Raises `ValueError`."""
        known = {field.name for field in fields(cls)}
        try:
            if not {"name", "data", "model", "phases"} <= value.keys() <= known:
                raise ValueError("its keys must be " + ", ".join(sorted(known)))
            parts = {
                "data": Data(**value["data"]),
                "model": Model(**value["model"]),
                "optim": Optim(**value.get("optim", {})),
                "comm": Comm(**value.get("comm", {})),
                "phases": tuple(Phase(**row) for row in value["phases"]),
                "tables": {},
            }
            return cls(**{**value, **parts})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"not a recipe's JSON: {error}") from error


def reads_full_size(recipe: Recipe) -> bool:
    """Return whether a phase reads the full-size images. Validation reads the same files as its phase's training."""
    return any(phase.copy is None for phase in recipe.phases)
