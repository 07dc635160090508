"""ResNets. Each ends in a pooling that takes any shape, so sizes and rectangles may change at any step.

`resnet18` to `resnet152` are He et al. 2015 in the v1.5 form: the stride of a bottleneck is in its 3x3 convolution
(Goyal et al. 2017, section 5.1; Gross and Wilber 2016). `resnet10_tiny` and `resnet10_cifar` have a quarter of
ResNet-10's width, for computers without a GPU; the stem halves the image, or keeps it where it has only 32 pixels.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, padded so that stride 1 keeps the shape."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside the identity: [n, inputs, h, w] to [n, width, h / stride, w / stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(in_channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_channels, width, stride)

    @property
    def last_norm(self) -> nn.Module:
        """The norm that ends the branch: with gamma 0 the block is the identity."""
        return self.norm2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y = torch.relu_(self.norm1(self.conv1(x)))
        return torch.relu_(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride) and 1x1 to four times the width, beside the identity."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(in_channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(in_channels, 4 * width, stride)

    @property
    def last_norm(self) -> nn.Module:
        """The norm that ends the branch: with gamma 0 the block is the identity."""
        return self.norm3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y = torch.relu_(self.norm1(self.conv1(x)))
        y = torch.relu_(self.norm2(self.conv2(y)))
        return torch.relu_(self.norm3(self.conv3(y)) + self.shortcut(x))


Block = type[BasicBlock] | type[Bottleneck]


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class ResNet(nn.Module):
    """Images [n, 3, h, w] to scores [n, classes], for any h and w of at least 16."""

    def __init__(
        self,
        block: Block,
        blocks: Sequence[int],
        widths: Sequence[int],
        stem: nn.Module,
        classes: int,
    ) -> None:
        super().__init__()
        self.stem, stages, inputs = stem, [], widths[0]
        for number, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for place in range(count):
                stages.append(block(inputs, width, 2 if number and not place else 1))
                inputs = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.fc(self.pool(self.stages(self.stem(x))).flatten(1))  # type: ignore[no-any-return]


def _imagenet_resnet(block: Block, blocks: Sequence[int], classes: int) -> ResNet:
    stem = nn.Sequential(
        convolution(3, 64, 7, 2),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )
    return ResNet(block, blocks, (64, 128, 256, 512), stem, classes)


def _small_resnet(stride: int, classes: int) -> ResNet:
    stem = nn.Sequential(convolution(3, 16, 3, stride), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    return ResNet(BasicBlock, (1, 1, 1, 1), (16, 32, 64, 128), stem, classes)


RESNET_BUILDERS: dict[str, Callable[[int], ResNet]] = {
    "resnet10_tiny": partial(_small_resnet, 2),
    "resnet10_cifar": partial(_small_resnet, 1),
    "resnet18": partial(_imagenet_resnet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(_imagenet_resnet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(_imagenet_resnet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(_imagenet_resnet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(_imagenet_resnet, Bottleneck, (3, 8, 36, 3)),
}

# What torchvision and timm call the same tensors: their ResNets have been of the v1.5 form since 2017.
TORCHVISION_KEYS = (
    (re.compile(r"^conv1\."), "stem.0."),
    (re.compile(r"^bn1\."), "stem.1."),
    (re.compile(r"^(layer\d+\.\d+)\.bn(\d)\."), r"\1.norm\2."),
    (re.compile(r"^(layer\d+\.\d+)\.downsample\."), r"\1.shortcut."),
)
STAGE_KEY = re.compile(r"^layer(\d+)\.(\d+)\.")


def convert_torchvision_keys(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a ResNet of torchvision or timm under the names that they have here, others as they are."""
    if "layer1.0.conv1.weight" not in state:
        return dict(state)
    blocks: dict[int, int] = {}  # of each stage, counted from 1
    for name in state:
        if found := STAGE_KEY.match(name):
            stage, place = map(int, found.groups())
            blocks[stage] = max(blocks.get(stage, 0), place + 1)

    def ours(name: str) -> str:
        for theirs, mine in TORCHVISION_KEYS:
            name = theirs.sub(mine, name)
        if not (found := STAGE_KEY.match(name)):
            return name
        stage, place = map(int, found.groups())
        before = sum(blocks.get(one, 0) for one in range(1, stage))
        return f"stages.{before + place}.{name[found.end() :]}"

    return {ours(name): one for name, one in state.items()}
