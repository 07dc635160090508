"""Run torchvision's ResNets.

torchvision_resnet.py shapes NAME ...             print the shapes of all tensors by network
torchvision_resnet.py run NAME INPUT.pt OUTPUT.pt
"""

import json
import sys

import torch
import without_operators  # noqa: F401
from torchvision import models

if sys.argv[1] == "shapes":
    with torch.device("meta"):
        states = {name: models.get_model(name).state_dict() for name in sys.argv[2:]}
    shapes = {name: {key: list(tensor.shape) for key, tensor in state.items()} for name, state in states.items()}
    print(json.dumps(shapes))
else:
    name, *files = sys.argv[2:]
    images = torch.load(files[0], weights_only=True)
    torch.manual_seed(0)
    net = models.get_model(name)
    weights = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    net.eval()
    with torch.no_grad():
        eval_scores = [net(batch) for batch in images]
    net.train()
    train_scores = net(images[0])
    train_scores.logsumexp(1).sum().backward()
    torch.save(
        {
            "weights": weights,
            "eval_scores": eval_scores,
            "train_scores": train_scores.detach(),
            "gradients": {key: parameter.grad for key, parameter in net.named_parameters()},
            "buffers": dict(net.named_buffers()),
        },
        files[1],
    )
