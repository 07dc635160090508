"""Writes a new project: a recipe with its own model and loss, which trains at once on the built-in data set."""

import re
from pathlib import Path

from cluster.errors import BadInput, ClusterError

RECIPE = '''\
"""A small network of our own on the built-in data set of drawn shapes.

    imgnet-cluster launch --local recipe.py

For images of your own, replace SAMPLE by Data(name="photos", root="~/data/photos", train=5_000, val=1_000).
"""

from train.recipe import SAMPLE, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="NAME",
    data=SAMPLE,
    model=Model(name="nets:small"),
    optim=Optim(loss="losses:smoothed", momentum=0.9, nesterov=True, weight_decay=5e-4),
    machines=1,
    gpus=1,
    types=("g6.xlarge", "g5.xlarge"),
    phases=[
        Phase(epochs=(0, 2), size=64, batch=32, lr=(0.005, 0.05), min_scale=0.35, copy=80),
        Phase(epochs=(2, 6), size=64, batch=64, lr=(0.1, 0.0), min_scale=0.35, copy=80),
    ],
)
'''

NETS = '''\
"""Networks. The recipe names them as "nets:small"."""

from torch import nn


def small(classes: int) -> nn.Module:
    """Return a network that maps images [n, 3, height, width] to scores [n, classes]."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
'''

LOSSES = '''\
"""Losses. The recipe names them as "losses:smoothed"."""

import torch
from torch.nn import functional


def smoothed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each image [n], not their mean, for scores [n, classes] and labels [n]."""
    return functional.cross_entropy(scores, labels, label_smoothing=0.1, reduction="none")
'''

README = """\
# A project for imgnet-cluster

| file | |
|---|---|
| recipe.py | what is trained: data, model, loss, phases |
| nets.py | the network |
| losses.py | the loss |

```sh
imgnet-cluster launch --local recipe.py                  # this computer; draws the built-in data set first
imgnet-cluster status job-1
imgnet-cluster predict job-1 data/sample/val/disc/*.JPEG
imgnet-cluster launch --ssh hosts.toml recipe.py         # your own machines
imgnet-cluster launch --dry-run recipe.py                # what machines of AWS would cost
```

A launch copies this folder for its job and sends the copy to the machines. In a git repository (`git init`) these are
the files that git does not ignore. Images, weights and results belong in .gitignore.
"""

GITIGNORE = """\
__pycache__/
data/
runs/
*.pt
*.safetensors
*.onnx
*.classes.json
"""

FILES = {"recipe.py": RECIPE, "nets.py": NETS, "losses.py": LOSSES, "README.md": README, ".gitignore": GITIGNORE}


def write_project(folder: Path) -> list[Path]:
    """Write a project named after its folder; return its files. Raises `BadInput` if one exists, `ClusterError`."""
    paths = [folder / name for name in FILES]
    for path in paths:
        if path.exists() or path.is_symlink():
            raise BadInput(
                f"{path}: exists already, and nothing was written; name a new folder: imgnet-cluster init DIR"
            )
    folder_name = folder.absolute().name
    name = folder_name if re.fullmatch(r"[A-Za-z0-9][\w.-]*", folder_name, re.ASCII) else "own"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, FILES.values(), strict=True):
            with path.open("x") as file:
                file.write(content.replace('name="NAME"', f'name="{name}"'))
    except OSError as error:
        raise ClusterError(f"{error.filename or folder}: {error.strerror or error}") from None
    return paths
