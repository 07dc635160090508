"""AlexNet with batch norm in place of local response norm.

Krizhevsky et al. 2012 in two groups, with a batch norm after each convolution (B. Ginsburg's AlexNet-BN, which You et
al. 2017 train) and one after pool5, where the values would otherwise grow as training goes on (Jia et al. 2018, section
3.2). The convolutions have no biases, because the norms behind them would cancel them.
"""

import torch
from torch import nn

POOLED_SIZE = 6  # side of the feature map that the first Linear takes: what images of 224 to 227 pixels become


def _conv_norm_relu(
    in_channels: int, out_channels: int, kernel: int, stride: int, padding: int, groups: int
) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


class AlexNet(nn.Module):
    """Maps images [n, 3, h, w] to scores [n, classes]. Designed for 224 pixels; h and w must be at least 63.

    At other sizes, adaptive pooling averages or repeats the last feature map to 6 x 6. At 224 it changes nothing.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv_norm_relu(3, 96, 11, 4, 2, 1),
            nn.MaxPool2d(3, 2),
            *_conv_norm_relu(96, 256, 5, 1, 2, 2),
            nn.MaxPool2d(3, 2),
            *_conv_norm_relu(256, 384, 3, 1, 1, 1),
            *_conv_norm_relu(384, 384, 3, 1, 1, 2),
            *_conv_norm_relu(384, 256, 3, 1, 1, 2),
            nn.MaxPool2d(3, 2),
            nn.BatchNorm2d(256),
        )
        self.pool = nn.AdaptiveAvgPool2d(POOLED_SIZE)
        self.hidden = nn.Sequential(
            *(nn.Linear(256 * POOLED_SIZE**2, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        )
        self.fc = nn.Linear(4096, classes)
        for layer in self.hidden:
            if isinstance(layer, nn.Linear):  # initial values of Krizhevsky et al. 2012, section 5, as Caffe has them
                nn.init.normal_(layer.weight, std=0.005)
                nn.init.constant_(layer.bias, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores [n, classes]."""
        return self.fc(self.hidden(self.pool(self.features(x)).flatten(1)))  # type: ignore[no-any-return]
