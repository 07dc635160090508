"""The parts of a recipe that hold for all of it: model, optimizer and loss, sums over processes, data."""

from dataclasses import dataclass

from . import validators

MODELS = (
    "resnet10_tiny", "resnet10_cifar", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "alexnet_bn",
)  # fmt: skip
OPTIMIZERS = ("sgd", "lars", "lamb", "adamw")
LOSSES = ("cross_entropy", "bce")
LR_SCALINGS = ("linear", "sqrt", "none")
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which network: a name of `MODELS`, `timm:NAME`, `torchvision:NAME`, or `package.module:function`, which is called
    with the number of classes and returns a module from images [n, 3, h, w] to scores [n, classes].

    `zero_gamma` starts the last norm of each residual block at 0, `fc_std` is the standard deviation of the
    classifier's first weights (both: Goyal et al. 2017, section 5.1); None leaves other people's models as they start.
    Classes are counted in the data. `weights`: a file of pretrained weights to start from (train/models/pretrained.py).
    `compile` trains through torch.compile, which takes its time for each shape before the first step; validation does
    not.
    """

    name: str
    zero_gamma: bool = True
    fc_std: float | None = 0.01
    weights: str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "name", validators.check_name_or_function("model", "name", self.name, MODELS, allow_libraries=True)
        )
        validators.check_bool("model", "zero_gamma", self.zero_gamma)
        if self.fc_std is not None:
            validators.check_number("model", "fc_std", self.fc_std)
        if self.weights is not None and (not isinstance(self.weights, str) or not self.weights):
            raise ValueError(f"model, weights: must be the name of a file, not {self.weights!r}")
        validators.check_bool("model", "compile", self.compile)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How weights are moved, and what is minimised.

    `name` is one of `OPTIMIZERS`, or `package.module:function`, called with (parameter groups, this object).
    `momentum` and `nesterov` hold for SGD and LARS, `betas` and `eps` for LAMB and AdamW; `trust` is LARS' eta.
    `norm_decay` and `bias_decay`: whether `weight_decay` holds for the norm layers' parameters and for the other
    biases too (Jia et al. 2018, section 3.2: neither); under LARS and LAMB it never does, it is their skip rule. `loss`
    is one of `LOSSES`, or `package.module:function`, called with (scores [n, classes], labels [n]), which returns each
    image's loss [n]; `label_smoothing` belongs to the loss.
    `scaling` is what happens to the rates on other than the nominal number of GPUs: "linear" (Goyal et al. 2017,
    section 2.1), "sqrt" (Krizhevsky 2014) or "none".
    """

    name: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    trust: float = 0.001
    weight_decay: float = 1e-4
    norm_decay: bool = False
    bias_decay: bool = True
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    scaling: str = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", validators.check_name_or_function("optim", "name", self.name, OPTIMIZERS))
        object.__setattr__(self, "loss", validators.check_name_or_function("optim", "loss", self.loss, LOSSES))
        for name in ("momentum", "label_smoothing"):
            validators.check_number("optim", name, getattr(self, name), 0.0, 1.0)
        for name in ("weight_decay", "eps", "trust"):
            validators.check_number("optim", name, getattr(self, name))
        if self.eps == 0:  # a gradient of 0, as behind a gamma of 0, would be divided by 0
            raise ValueError(f"optim, eps: must be above 0, not {self.eps!r}")
        if self.trust == 0:  # LARS takes a ratio of 0 for that of a layer of zeros, and its whole gradient
            raise ValueError(f"optim, trust: must be above 0, not {self.trust!r}")
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ValueError(f"optim, betas: must be a pair, not {self.betas!r}")
        for beta in self.betas:
            validators.check_number("optim", "betas", beta, 0.0, 1.0)
            if beta == 1:  # nothing of a gradient would ever be taken, and 1 - beta is divided by
                raise ValueError(f"optim, betas: must be below 1, not {beta!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("nesterov", "norm_decay", "bias_decay"):
            validators.check_bool("optim", name, getattr(self, name))
        validators.check_choice("optim", "scaling", self.scaling, LR_SCALINGS)
        if self.nesterov and self.momentum == 0:
            raise ValueError("optim, nesterov: needs a momentum above 0")
        if self.norm_decay and self.name in ("lars", "lamb"):
            raise ValueError(f"optim, norm_decay: {self.name} neither scales nor decays norms and biases")
        if self.label_smoothing and self.loss not in LOSSES:
            raise ValueError(f"optim, label_smoothing: {self.loss} is called without it; let it smooth by itself")


@dataclass(frozen=True, kw_only=True)
class Comm:
    """How gradients are added up over the processes: `hook` by its name in `HOOKS` (train/distributed/ddp.py), in buckets of
    `bucket` MB (1e6 bytes; 25 leaves it to torch: a first one of 1 MiB, then of 25 MiB), `overlap`ped with the backward
    pass or after it.
    """

    hook: str = "none"
    bucket: float = 25.0
    overlap: bool = True

    def __post_init__(self) -> None:
        validators.check_choice("comm", "hook", self.hook, COMM_HOOKS)
        validators.check_number("comm", "bucket", self.bucket, 0.001)
        validators.check_bool("comm", "overlap", self.overlap)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images. `train` and `val` count them for `plan`; a run counts the files themselves. `root` is where they
    lie unless `--data` says otherwise; prepared copies lie in `<root>-sz/<short side>`. The name "sample" is built in.
    """

    name: str
    train: int
    val: int
    root: str

    def __post_init__(self) -> None:
        for name in ("name", "root"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"data, {name}: must be a non-empty text, not {getattr(self, name)!r}")
        validators.check_int("data", "train", self.train, 1)
        validators.check_int("data", "val", self.val, 1)


IMAGENET = Data(name="imagenet", root="~/data/imagenet", train=1_281_167, val=50_000)
SAMPLE = Data(name="sample", root="data/sample", train=4_000, val=1_000)
