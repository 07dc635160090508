"""Train with timm's LARS or LAMB: timm_optimizers.py INPUT.pt OUTPUT.pt.

The input has the optimizer's name and options, the parameters and whether each decays, rates, and gradients.
"""

import sys

import torch
import without_operators  # noqa: F401
from timm.optim.lamb import Lamb
from timm.optim.lars import Lars

case = torch.load(sys.argv[1], weights_only=True)
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
torch.save([parameter.detach() for parameter in parameters], sys.argv[2])
