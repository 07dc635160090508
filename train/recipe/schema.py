"""How to train, as plain data: a recipe is phases, a model, a data set and an optimizer.

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

Every object is frozen and checked when it is made: a `ValueError` names the row and the field. Imports neither torch
nor boto3, so that `plan` and `--help` are instant.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from . import validators
from .components import Comm, Data, Model, Optim

LR_SHAPES = ("linear", "cosine", "polynomial", "one_cycle", "gradual_warmup", "constant_warmup")
SINGLE_RATE_SHAPES = (
    "one_cycle",
    "gradual_warmup",
    "constant_warmup",
)  # shapes that take one number, the rate they lead to
VALIDATION_POLICIES = ("each", "last", "near", "never")
REFERENCE_BATCH = 256  # Goyal et al. 2017, section 2.1: rates are compared per 256 images
EC2_TYPE_PATTERN = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")  # p4d.24xlarge


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One row of the schedule. Complete in itself: nothing is inherited from the row above.

    `epochs` (start, end), end excluded; `size` the side of the square crop in pixels; `batch` images per GPU; `lr` a
    number, or (first step's, last step's) joined by `shape`; `min_scale` the smallest part of an image's area that a
    crop may take; `copy` the short side in pixels of the prepared copy to read, None for the full-size images;
    `rect_val` validates on whole rectangles, with the square centre crop beside it; `validate` says after which epochs:
    "each", the phase's "last", "never", or "near": once the recipe's target is near (train/recipe/validation_policy.py). The run's last
    epoch is validated in any case. `reached`: after so many epochs the recipe's source had met the target.
    `rect_train` trains on rectangles of about size x size pixels, each step of one shape (train/data/order/rect_train.py).
    `augment` False: crops of one size, as large as validation's, at a random place; mirrored or not all the same.
    `frozen` trains the classifier only: the rest keeps its weights and its norms' statistics.

    Shapes: "linear" per step, "cosine" (half a period), "polynomial" (power 2: LARS), "one_cycle" (Smith and Topin
    2017: up to lr over the first 3 tenths, then to nearly 0, both by a cosine), and Goyal et al. 2017, section
    2.2: "gradual_warmup" ramps from lr / k to lr and "constant_warmup" holds lr / k, where k = global batch / 256.
    """

    epochs: tuple[int, int]
    size: int
    batch: int
    lr: float | tuple[float, float]
    shape: str = "linear"
    min_scale: float = 0.08
    augment: bool = True
    copy: int | None = None
    rect_val: bool = False
    rect_train: bool = False
    frozen: bool = False
    validate: str = "each"
    reached: int | None = None

    def __post_init__(self) -> None:
        where = f"phase {self.epochs!r}"
        pair = self.epochs
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{where}, epochs: must be a pair (start, end)")
        where = f"phase {pair[0]}-{pair[1]}"
        validators.check_int(where, "epochs start", pair[0], 0)
        validators.check_int(where, "epochs end", pair[1], 1)
        if pair[0] >= pair[1]:
            raise ValueError(f"{where}, epochs: must end after they start")
        object.__setattr__(self, "epochs", tuple(pair))
        validators.check_int(where, "size", self.size, 16)
        validators.check_int(where, "batch", self.batch, 1)
        validators.check_choice(where, "shape", self.shape, LR_SHAPES)
        if isinstance(self.lr, tuple | list):
            if len(self.lr) != 2:
                raise ValueError(f"{where}, lr: must be a number or a pair (first, last), not {self.lr!r}")
            object.__setattr__(self, "lr", tuple(self.lr))
        for rate in self.lr_endpoints:
            validators.check_number(where, "lr", rate)
        if self.shape in SINGLE_RATE_SHAPES and not isinstance(self.lr, int | float):
            raise ValueError(f"{where}, lr: {self.shape} takes one number, the rate it leads to")
        validators.check_number(where, "min_scale", self.min_scale, 0.0, 1.0)
        if self.min_scale == 0:
            raise ValueError(
                f"{where}, min_scale: must be above 0: it is the smallest part of the image that a crop takes"
            )
        if self.copy is not None:
            validators.check_int(where, "copy", self.copy, 32)
        for name in ("augment", "rect_val", "rect_train", "frozen"):
            validators.check_bool(where, name, getattr(self, name))
        validators.check_choice(where, "validate", self.validate, VALIDATION_POLICIES)
        if self.reached is not None:
            validators.check_int(where, "reached", self.reached, 1)

    @property
    def lr_endpoints(self) -> tuple[float, float]:
        """The rate as stated, as (first, last)."""
        return self.lr if isinstance(self.lr, tuple) else (self.lr, self.lr)


def _check_machine_types(where: str, types: object) -> tuple[str, ...]:
    if not isinstance(types, tuple | list):
        raise ValueError(f"{where}, types: must be a list of EC2 types such as 'p4d.24xlarge', not {types!r}")
    for one in types:
        if not isinstance(one, str) or not EC2_TYPE_PATTERN.fullmatch(one):
            raise ValueError(f"{where}, types: {one!r} is no EC2 type; they look like 'p4d.24xlarge'")
        if types.count(one) > 1:
            raise ValueError(f"{where}, types: {one!r} stands there twice")
    return tuple(types)


def check_phases(where: str, phases: Sequence[Phase]) -> None:
    """Raise `ValueError` unless the rows start at epoch 0 and follow each other without gap or overlap."""
    if not isinstance(phases, Sequence):
        raise ValueError(f"{where}, phases: must be a list of Phase, not {phases!r}")
    if not phases:
        raise ValueError(f"{where}, phases: there are none")
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
    """A whole experiment. `machines` x `gpus` is the nominal number of GPUs for which the rates are stated.

    Give `phases`, or `tables`: one list of phases for each number of machines that has its own schedule, `machines`
    naming the default. `at(n)` takes the table for n machines. `types` are the machines to rent at EC2 when the job
    goes there, in order of preference. `comm` is a `Comm`, or the name of its hook. `target` is the top-5 in percent
    for which this is done, None without one.
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
    target: float | None = None

    def __post_init__(self) -> None:
        where = f"recipe {self.name!r}"
        if not isinstance(self.name, str) or not self.name or any(c in "/\\\0\n" for c in self.name):
            raise ValueError(f"{where}, name: must be a text without slashes or line ends")
        if isinstance(self.comm, str):
            object.__setattr__(self, "comm", Comm(hook=self.comm))
        for name, kind in (("data", Data), ("model", Model), ("optim", Optim), ("comm", Comm)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{where}, {name}: must be a {kind.__name__}, not {getattr(self, name)!r}")
        for name, least in (("machines", 1), ("gpus", 1), ("seed", 0)):
            validators.check_int(where, name, getattr(self, name), least)
        if self.seed >= 2**63:
            raise ValueError(f"{where}, seed: must be below 2**63, not {self.seed}")
        object.__setattr__(self, "types", _check_machine_types(where, self.types))
        if self.target is not None:
            validators.check_number(where, "target", self.target, 0.0, 100.0)
        if not isinstance(self.tables, Mapping):
            raise ValueError(f"{where}, tables: must be phases by number of machines, not {self.tables!r}")
        for machines, rows in self.tables.items():
            validators.check_int(where, "tables, machines", machines, 1)
            check_phases(f"{where}, table for {machines} machines", rows)
        tables = {machines: tuple(rows) for machines, rows in self.tables.items()}
        if tables and self.machines not in tables:
            raise ValueError(f"{where}, machines: no table for {self.machines}; there are {sorted(tables)}")
        phases = tables[self.machines] if tables else self.phases
        check_phases(where, phases)
        if self.target is None and any(phase.validate == "near" for phase in phases):
            raise ValueError(f"{where}, target: a phase validates near it, but there is none; such as target=93.0")
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "phases", tuple(phases))

    @property
    def nominal_gpus(self) -> int:
        """The number of GPUs for which the phases state their rates."""
        return self.machines * self.gpus

    @property
    def epochs(self) -> int:
        """How many epochs the phases make together."""
        return self.phases[-1].epochs[1]

    @property
    def source_target_epoch(self) -> int | None:
        """After how many epochs the recipe's source had met the target, None where no phase of these says it."""
        told = ((phase.reached, phase.epochs) for phase in self.phases if phase.reached is not None)
        return next((epoch for epoch, (start, end) in told if start < epoch <= end), None)

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        """The prepared copies that the phases read, by their short side in pixels."""
        return tuple(sorted({phase.copy for phase in self.phases if phase.copy is not None}))

    def for_machines(self, machines: int) -> Self:
        """Return the recipe with the table for so many machines: its own, the next smaller one's, or the first."""
        if not self.tables:
            return self
        nearest = max((n for n in self.tables if n <= machines), default=min(self.tables))
        return replace(self, machines=nearest)

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes an equal recipe, without the other tables."""
        return asdict(replace(self, tables={}))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the recipe that `to_json` described. Raises `ValueError` where it is not one."""
        known = {one.name for one in fields(cls)}
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


FULL_SIZE = "full"


def reads_full_size(recipe: Recipe) -> bool:
    """Whether a phase reads the full-size images; its validation reads what its training does."""
    return any(phase.copy is None for phase in recipe.phases)
