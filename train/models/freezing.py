"""Frozen phases: only the last layers are trained; all other weights, norm statistics and momenta stay as they are.

The last layers are the classifier or, with "fixres", the classifier and the norm before it. Touvron et al. 2019,
section 4: a random crop shows objects larger than the crop of the test does. These two layers, trained for a few epochs
on crops like those of the test, adapt the network to that.
"""

from torch import nn

from train.recipe.schema import FIXRES
from train.tools.errors import TrainingError

from . import registry
from .resnet import BasicBlock, Bottleneck


class Freezer:
    """Trains all of a network or its last layers only; never what had requires_grad=False from the start."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.frozen: bool | str = False
        self.trainable_parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def set_frozen(self, frozen: bool | str) -> None:
        """Compute gradients for the last layers only (`Phase.frozen`), or for all trainable parameters.

        All gradients are dropped, because they are views of the last DistributedDataParallel's buckets. An optimizer
        does not move a parameter without one. Raises `TrainingError` when the classifier is not known.
        """
        self.frozen = frozen
        last_ids = {id(parameter) for layer in self.last_layers() for parameter in layer.parameters()}
        for parameter in self.trainable_parameters:
            parameter.grad = None
            parameter.requires_grad_(not frozen or id(parameter) in last_ids)

    def set_train_mode(self) -> None:
        """Put what is trained into train mode. Frozen layers are in eval mode: fixed norm statistics, no dropout."""
        self.net.train(not self.frozen)
        for layer in self.last_layers():
            layer.train()

    def last_layers(self) -> list[nn.Module]:
        """Return the layers that are trained in a phase that is frozen, [] in another. Raises `TrainingError`."""
        if not self.frozen:
            return []
        classifier = registry.find_classifier(self.net)
        if classifier is None:
            raise TrainingError(
                f"phases, frozen: {type(self.net).__name__} has no trainable Linear or 1x1 convolution with one output "
                "per class, so there is no classifier to train alone; set frozen=False to train all of it"
            )
        last_norms = [block.last_norm for block in self.net.modules() if isinstance(block, BasicBlock | Bottleneck)]
        return [last_norms[-1], classifier] if self.frozen == FIXRES else [classifier]
