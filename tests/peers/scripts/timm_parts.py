"""Run parts of timm.

timm_parts.py blurpool INPUT.pt OUTPUT.pt   images, and what BlurPool2d with stride 2 makes of them
timm_parts.py optimizer INPUT.pt OUTPUT.pt  LARS or LAMB: its name and options, the parameters and whether each decays,
                                            rates, and gradients; and the parameters after these steps
"""

import sys

import torch
import without_operators  # noqa: F401
from timm.layers import BlurPool2d
from timm.optim.lamb import Lamb
from timm.optim.lars import Lars

case = torch.load(sys.argv[2], weights_only=True)
if sys.argv[1] == "blurpool":
    results = BlurPool2d(case.shape[1], filt_size=3, stride=2, pad_mode="constant")(case)
else:
    parameters = [torch.nn.Parameter(weight) for weight in case["weights"]]
    with_decay = [parameter for parameter, decays in zip(parameters, case["decays"], strict=True) if decays]
    without_decay = [parameter for parameter, decays in zip(parameters, case["decays"], strict=True) if not decays]
    groups = [{"params": with_decay}, {"params": without_decay, "weight_decay": 0.0}]
    optimizer = {"lars": Lars, "lamb": Lamb}[case["name"]](groups, lr=1.0, **case["options"])
    for rate, gradients in zip(case["rates"], case["gradients"], strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    results = [parameter.detach() for parameter in parameters]
torch.save(results, sys.argv[3])
