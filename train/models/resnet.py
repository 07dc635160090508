"""ResNets. Each ends in global pooling, so the image size and aspect ratio may change at any step.

`resnet18` to `resnet152` are He et al. 2015 in the v1.5 form: a bottleneck's stride is in its 3x3 convolution (Goyal et
al. 2017, section 5.1; Gross and Wilber 2016). `resnet10_tiny` and `resnet10_cifar` have a quarter of ResNet-10's width,
for computers without a GPU. The stem of `resnet10_tiny` halves the image; that of `resnet10_cifar` keeps its size,
because its images have only 32 pixels.

The modules have the names of torchvision and timm, whose ResNets have had the v1.5 form since 2017: the weights fit.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

MIN_BLURRED_CHANNELS = 16
BLUR_WEIGHTS = (1.0, 2.0, 1.0)


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, padded so that stride 1 keeps height and width."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions: [n, in_channels, h, w] to [n, width, h / stride, w / stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(in_channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)

    @property
    def last_norm(self) -> nn.Module:
        """The norm at the end of the residual branch. With its gamma at 0 the block is the identity."""
        return self.bn2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(branch(x) + shortcut(x))."""
        y = torch.relu_(self.bn1(self.conv1(x)))
        return torch.relu_(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """Residual block 1x1, 3x3 (with stride s), 1x1: [n, in_channels, h, w] to [n, 4 width, h / s, w / s]."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(in_channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(in_channels, 4 * width, stride)

    @property
    def last_norm(self) -> nn.Module:
        """The norm at the end of the residual branch. With its gamma at 0 the block is the identity."""
        return self.bn3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(branch(x) + shortcut(x))."""
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = torch.relu_(self.bn2(self.conv2(y)))
        return torch.relu_(self.bn3(self.conv3(y)) + self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class ResNet(nn.Module):
    """Maps images [n, 3, h, w] to scores [n, classes]. h and w must be at least 16.

    `block_counts` and `widths` are those of the four stages. Each stage but the first halves height and width.
    """

    def __init__(
        self,
        block: Block,
        block_counts: Sequence[int],
        widths: Sequence[int],
        conv1: nn.Conv2d,
        maxpool: nn.Module,
        classes: int,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1, self.maxpool = conv1, nn.BatchNorm2d(widths[0]), maxpool
        channels = widths[0]
        stages = []
        for number, (block_count, width) in enumerate(zip(block_counts, widths, strict=True)):
            blocks = []
            for position in range(block_count):
                blocks.append(block(channels, width, stride=2 if number and not position else 1))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def stages(self) -> list[nn.Sequential]:
        """Return the parts of the network in the order of its forward pass."""
        stem = nn.Sequential(self.conv1, self.bn1, nn.ReLU(inplace=True), self.maxpool)
        head = nn.Sequential(self.avgpool, nn.Flatten(), self.fc)
        return [stem, self.layer1, self.layer2, self.layer3, self.layer4, head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores [n, classes]."""
        x = self.maxpool(torch.relu_(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


def _imagenet_resnet(block: Block, block_counts: Sequence[int], classes: int) -> ResNet:
    stem = convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1)
    return ResNet(block, block_counts, (64, 128, 256, 512), *stem, classes)


def _small_resnet(stem_stride: int, classes: int) -> ResNet:
    stem = convolution(3, 16, 3, stem_stride), nn.Identity()
    return ResNet(BasicBlock, (1, 1, 1, 1), (16, 32, 64, 128), *stem, classes)


RESNET_BUILDERS: dict[str, Callable[[int], ResNet]] = {
    "resnet10_tiny": partial(_small_resnet, 2),
    "resnet10_cifar": partial(_small_resnet, 1),
    "resnet18": partial(_imagenet_resnet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(_imagenet_resnet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(_imagenet_resnet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(_imagenet_resnet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(_imagenet_resnet, Bottleneck, (3, 8, 36, 3)),
}

# Those that torchvision and timm have too, under the same names.
PUBLISHED_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def blur_kernel() -> torch.Tensor:
    """Return the filter Tri-3: [3, 3], of sum 1."""
    weights = torch.tensor(BLUR_WEIGHTS)
    kernel = torch.outer(weights, weights)
    return kernel / kernel.sum()


class BlurredConvolution(nn.Conv2d):
    """A strided convolution without bias that blurs its input first. Its state dict is that of the convolution."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__(
            convolution.in_channels,
            convolution.out_channels,
            convolution.kernel_size,  # type: ignore[arg-type]
            convolution.stride,  # type: ignore[arg-type]
            convolution.padding,  # type: ignore[arg-type]
            bias=False,
            device="meta",  # no memory, and no random numbers: the weight is that of the convolution
        )
        self.weight = convolution.weight
        kernel = blur_kernel().to(convolution.weight.device).expand(convolution.in_channels, 1, 3, 3).contiguous()
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Blur the input, then convolve it. Shapes as in `nn.Conv2d`: (N, C, H, W)."""
        kernel = self.get_buffer("kernel")
        return super().forward(nn.functional.conv2d(x, kernel, padding=1, groups=self.in_channels))


def blur_strided_convolutions(net: nn.Module) -> None:
    """Replace strided convolutions of at least `MIN_BLURRED_CHANNELS` input channels by blurred ones, against aliasing.

    Zhang 2019, "Making convolutional networks shift-invariant again", section 3.2, with the filter "Tri-3": the outer
    product of [1, 2, 1] / 4 with itself. Section 3.3 blurs after the convolution, which then has stride 1. As in FFCV
    (`BlurPoolConv2d` of ffcv-imagenet) and Composer (`blur_first`), here its input is blurred, which leaves it a
    quarter of the pixels, and padded with zeros; the first convolution and the max pooling stay as they are.
    """
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and max(child.stride) > 1 and child.in_channels >= MIN_BLURRED_CHANNELS:
                setattr(parent, name, BlurredConvolution(child))
