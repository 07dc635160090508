"""BlurPool: a blur before each strided convolution of a ResNet, against aliasing.

Zhang 2019, "Making convolutional networks shift-invariant again": to take every second pixel of a feature map is to
sample it below its Nyquist rate. Section 3.2 blurs first, with the filter "Tri-3", the outer product of [1, 2, 1] / 4
with itself. Section 3.3 replaces a strided convolution by the convolution with stride 1, its ReLU, the blur, and the
sampling. The recipes of FFCV (`BlurPoolConv2d` of ffcv-imagenet) and Composer's `blur_first` blur the input of the
strided convolution instead, which leaves the convolution a quarter of the pixels. That form is here, with FFCV's rules:
the input is padded with zeros, convolutions of fewer than 16 input channels (the first one) and the max pooling of the
stem stay as they are.
"""

import torch
from torch import nn
from torch.nn import functional

MIN_CHANNELS = 16
BLUR_WEIGHTS = (1.0, 2.0, 1.0)


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
        return super().forward(functional.conv2d(x, kernel, padding=1, groups=self.in_channels))


def blur_strided_convolutions(net: nn.Module) -> None:
    """Replace the strided convolutions of at least `MIN_CHANNELS` input channels by blurred ones with their weights."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and max(child.stride) > 1 and child.in_channels >= MIN_CHANNELS:
                setattr(parent, name, BlurredConvolution(child))
