"""The parts of a recipe that hold for the whole run: `Model`, `Optim`, `Comm` and `Data`.

Every object is frozen, and is checked when it is built: a `ValueError` names the part, the field and the value.
"""

from dataclasses import dataclass

from . import validators

RESNETS = ("resnet10_tiny", "resnet10_cifar", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
MODELS = (*RESNETS, "alexnet_bn")
OPTIMIZERS = ("sgd", "lars", "lamb", "adamw")
LARS_FORMS = ("paper", "google")
LOSSES = ("cross_entropy", "bce")
LR_SCALINGS = ("linear", "sqrt", "none")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
GRAPHS = ("auto", "on", "off")
COMM_HOOKS = ("auto", "none", "fp16", "bf16", "powersgd", "hierarchical")
MAX_VAL_FRACTION = 0.9  # of the images of a class; the rest is trained on


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network and how its weights start.

    The number of classes is not stated: it is counted in the data set.

    Attributes:
        name: One of `MODELS`, `"timm:NAME"`, `"torchvision:NAME"`, or `"package.module:function"`. The function is
            called with the number of classes and returns a module that maps images [n, 3, height, width] to scores
            [n, classes]. A function of a module may be given itself; its name is stored.
        zero_gamma: Start the last norm of each residual block at 0, so that the block starts as its shortcut
            (Goyal et al. 2017, section 5.1). Default True. Set it to False for small networks and short runs.
        fc_std: Standard deviation of the classifier's initial weights, which are normal with mean 0 (Goyal et al. 2017,
            section 5.1). Default 0.01. None keeps the weights with which the model itself starts.
        weights: File of pretrained weights: a checkpoint of this trainer, a PyTorch state dict or safetensors
            (train/models/pretrained.py). Default None: start from random weights.
        blurpool: Blur the input of each strided convolution of a ResNet but the first, so that sampling every second
            pixel aliases less (Zhang 2019, as in FFCV's recipes; train/models/resnet.py). Default False.
        compile: Train through torch.compile. Compilation takes time for each image shape before the first step;
            validation is not compiled. Default False.
    """

    name: str
    zero_gamma: bool = True
    fc_std: float | None = 0.01
    weights: str | None = None
    compile: bool = False
    blurpool: bool = False

    def __post_init__(self) -> None:
        name = validators.check_name_or_function("model", "name", self.name, MODELS, allow_libraries=True)
        object.__setattr__(self, "name", name)
        validators.check_bool("model", "zero_gamma", self.zero_gamma)
        if self.fc_std is not None:
            validators.check_number("model", "fc_std", self.fc_std)
        if self.weights is not None and (not isinstance(self.weights, str) or not self.weights):
            raise ValueError(f"model, weights: must be the name of a file, not {self.weights!r}")
        validators.check_bool("model", "compile", self.compile)
        validators.check_bool("model", "blurpool", self.blurpool)
        if self.blurpool and self.name not in RESNETS:
            raise ValueError(
                f"model, blurpool: {self.name!r} is none of {', '.join(RESNETS)}; set it to False; timm has its own "
                'networks with a blur, such as "timm:resnetblur50"'
            )


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, its weight decay, the loss, and the rule that scales the learning rate.

    The learning rate itself belongs to each `Phase`.

    Attributes:
        name: One of `OPTIMIZERS`, or `"package.module:function"`. The function is called with (parameter groups, this
            object) and returns a `torch.optim.Optimizer`. Default "sgd".
        momentum: Momentum of SGD and LARS, from 0 to 1. Default 0.9.
        nesterov: Nesterov's form of momentum, for SGD and LARS. Default False.
        betas: Decay rates of the two moment estimates of LAMB and AdamW, each below 1. Default (0.9, 0.999).
        eps: Added to the denominator of LAMB and AdamW, above 0. Default 1e-6.
        trust: Trust coefficient (eta) of LARS, above 0 (You et al. 2017, equation 6). Default 0.001.
        lars_form: One of `LARS_FORMS`; `train.optim.layerwise.Lars` has the formulas of the paper's and of TensorFlow's
            form. Rates of one do not fit the other. Default "paper".
        weight_decay: Weight decay of the weights that are neither norms nor biases. Default 1e-4.
        norm_decay: Also decay the parameters of norm layers. Default False, as in Jia et al. 2018, section 3.2. Not
            allowed for LARS and LAMB, whose skip rule excludes norms and biases.
        bias_decay: Also decay the biases of other layers. Default True. LARS and LAMB never decay them.
        loss: One of `LOSSES`, or `"package.module:function"`. The function is called with (scores [n, classes],
            labels [n]) and returns one loss per image [n]. Default "cross_entropy".
        label_smoothing: Label smoothing of the built-in losses, from 0 to 1. Default 0.0.
        scaling: How learning rates change when the run has another than the nominal number of GPUs. With k = GPUs /
            nominal GPUs they are multiplied by k for "linear" (Goyal et al. 2017, section 2.1), by the square root of k
            for "sqrt" (Krizhevsky 2014), or left alone for "none". Default "linear".
        ema: Decay of an exponential moving average of the weights, above 0 and below 1. The average is validated and
            published; training goes on from the weights themselves. With k times the nominal number of GPUs the decay
            becomes its k-th power, unless `scaling` is "none" (train/optim/weight_average.py). Default None: no
            average.
        clip: Largest norm of the gradient of all weights together, above 0; a longer gradient is shortened to it, after
            the sum over all processes (torch.nn.utils.clip_grad_norm_). Default None: no limit.
        mixup: Mix the images and losses of pairs: parameter of the Beta distribution of their shares, such as 0.2
            (Zhang et al. 2018; train/optim/mixing.py). Default 0: none.
        cutmix: The same with a rectangle of the other image, such as 1.0 (Yun et al. 2019). With both, each batch of a
            GPU takes one of them. Default 0: none.
    """

    name: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    trust: float = 0.001
    lars_form: str = "paper"
    weight_decay: float = 1e-4
    norm_decay: bool = False
    bias_decay: bool = True
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    scaling: str = "linear"
    ema: float | None = None
    clip: float | None = None
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", validators.check_name_or_function("optim", "name", self.name, OPTIMIZERS))
        object.__setattr__(self, "loss", validators.check_name_or_function("optim", "loss", self.loss, LOSSES))
        for field in ("momentum", "label_smoothing"):
            validators.check_number("optim", field, getattr(self, field), 0.0, 1.0)
        for field in ("weight_decay", "mixup", "cutmix"):
            validators.check_number("optim", field, getattr(self, field))
        # Where a gradient is 0, as behind a gamma of 0, an eps of 0 would divide 0 by 0. LARS takes a ratio of 0 for
        # that of a layer of zeros, and would apply the whole gradient.
        for field in ("eps", "trust"):
            validators.check_number("optim", field, getattr(self, field), excluded=[0])
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ValueError(f"optim, betas: must be a pair, not {self.betas!r}")
        for beta in self.betas:  # with 1 gradients would never count, and the bias correction divides by 1 - beta
            validators.check_number("optim", "betas", beta, 0.0, 1.0, excluded=[1])
        object.__setattr__(self, "betas", tuple(self.betas))
        for field in ("nesterov", "norm_decay", "bias_decay"):
            validators.check_bool("optim", field, getattr(self, field))
        validators.check_choice("optim", "scaling", self.scaling, LR_SCALINGS)
        if self.ema is not None:
            validators.check_number("optim", "ema", self.ema, 0.0, 1.0, excluded=[0, 1])
        if self.clip is not None:
            validators.check_number("optim", "clip", self.clip, excluded=[0])
        validators.check_choice("optim", "lars_form", self.lars_form, LARS_FORMS)
        if self.nesterov and self.momentum == 0:
            raise ValueError("optim, nesterov: needs a momentum above 0")
        if self.norm_decay and self.name in ("lars", "lamb"):
            raise ValueError(
                f"optim, norm_decay: {self.name} neither scales nor decays norms and biases; set it to False"
            )
        if self.label_smoothing and self.loss not in LOSSES:
            raise ValueError(
                f"optim, label_smoothing: applies to built-in losses only; set it to 0 and smooth labels in {self.loss}"
            )


@dataclass(frozen=True, kw_only=True)
class Comm:
    """How gradients are summed over the processes.

    Attributes:
        hook: One of `COMM_HOOKS`, which train/distributed/ddp.py describes. "auto" is "bf16" where GPUs of several
            machines send over sockets, else "none". Default "auto".
        bucket: Size of the buckets that gradients are sent in, in MB (1e6 bytes). Default 25, which leaves it to
            torch: a first bucket of 1 MiB, then buckets of 25 MiB.
        overlap: Send each bucket during the backward pass, as soon as it is full; False: after the backward pass.
            Default True.
    """

    hook: str = "auto"
    bucket: float = 25.0
    overlap: bool = True

    def __post_init__(self) -> None:
        validators.check_choice("comm", "hook", self.hook, COMM_HOOKS)
        validators.check_number("comm", "bucket", self.bucket, 0.001)
        validators.check_bool("comm", "overlap", self.overlap)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data set: images in one folder per class, or the same images packed.

    Attributes:
        name: Name of the data set. "sample" is the built-in set of drawn shapes. For names that begin with "imagenet",
            the forecast uses its measured image sizes.
        train: Number of training images, for `plan`. A run counts the files itself.
        val: Number of validation images, for `plan`.
        root: Folder that contains train/ and val/; `--data` overrides it. Resized copies lie in
            `<root>-sz/<short side in pixels>`.
        val_fraction: Fraction of each class in train/ that is held out for validation, at most 0.9, for a folder that
            has no val/ (train/data/validation_split.py); `--val-fraction` overrides it. Default 0: the images of val/.
    """

    name: str
    train: int
    val: int
    root: str
    val_fraction: float = 0.0

    def __post_init__(self) -> None:
        for field in ("name", "root"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise ValueError(f"data, {field}: must be a non-empty text, not {getattr(self, field)!r}")
        validators.check_int("data", "train", self.train, 1)
        validators.check_int("data", "val", self.val, 1)
        validators.check_number("data", "val_fraction", self.val_fraction, 0.0, MAX_VAL_FRACTION)


IMAGENET = Data(name="imagenet", root="~/data/imagenet", train=1_281_167, val=50_000)
SAMPLE = Data(name="sample", root="data/sample", train=4_000, val=1_000)
