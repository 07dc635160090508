"""Load an exported ResNet into a library's: load_exported.py torchvision|timm NAME CLASSES WEIGHTS INPUT OUTPUT.

Needs nothing of this project. Saves the scores; fails unless every name and shape fits.
"""

import contextlib
import sys

import torch
import without_operators  # noqa: F401

library, name, classes, weights, images, output = sys.argv[1:]
if library == "timm":
    with contextlib.redirect_stdout(sys.stderr):  # it may say there that an optional package is missing
        import timm

    net = timm.create_model(name, num_classes=int(classes))
else:
    from torchvision import models

    net = models.get_model(name, num_classes=int(classes))
net.load_state_dict(torch.load(weights, weights_only=True), strict=True)
net.eval()
with torch.no_grad():
    torch.save([net(batch) for batch in torch.load(images, weights_only=True)], output)
