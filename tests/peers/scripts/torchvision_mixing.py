"""torchvision_mixing.py INPUT.pt OUTPUT.pt: images, labels, scores, a share, and the middle (x, y) of a rectangle.

Writes for mixup and CutMix the mixed images, and the cross entropy of the scores against the mixed labels.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import torch
import without_operators  # noqa: F401
from torchvision.transforms import v2

case = torch.load(sys.argv[1], weights_only=True)
results = {}
for name, transform_class in (("mixup", v2.MixUp), ("cutmix", v2.CutMix)):
    transform = transform_class(num_classes=case["scores"].shape[1])
    transform._dist = SimpleNamespace(sample=lambda _: case["share"])
    draws = [torch.tensor([number]) for number in case["middle"]]
    with mock.patch("torch.randint", side_effect=draws):
        images, targets = transform(case["images"], case["labels"])
    results[name] = (images, torch.nn.functional.cross_entropy(case["scores"], targets, reduction="none"))
torch.save(results, sys.argv[2])
