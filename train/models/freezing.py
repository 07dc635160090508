"""Frozen phases: only the classifier is trained; all other weights, norm statistics and momenta stay as they are."""

from collections.abc import Sequence
from itertools import takewhile

from torch import nn

from train.recipe.schedule import Epoch
from train.tools.errors import TrainingError

from . import registry


class Freezer:
    """Switches a network between training all of it and training the classifier only.

    Parameters that had requires_grad=False from the start are never trained.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.frozen = False
        self.trainable_parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def set_frozen(self, frozen: bool) -> None:
        """Compute gradients for the classifier only (`frozen`), or for all trainable parameters.

        All gradients are dropped, because they are views of the buckets of the last DistributedDataParallel. An
        optimizer does not move a parameter without a gradient at all. Raises `TrainingError` when the classifier is
        not known.
        """
        classifier_ids = {id(parameter) for parameter in self.classifier().parameters()} if frozen else set()
        for parameter in self.trainable_parameters:
            parameter.grad = None
            parameter.requires_grad_(not frozen or id(parameter) in classifier_ids)
        self.frozen = frozen

    def set_train_mode(self) -> None:
        """Put what is trained into train mode. Frozen layers are in eval mode: fixed norm statistics, no dropout."""
        self.net.train(not self.frozen)
        if self.frozen:
            self.classifier().train()

    def classifier(self) -> nn.Module:
        """Return the layer that is trained in a frozen phase. Raises `TrainingError` when it is not known."""
        classifier = registry.find_classifier(self.net)
        if classifier is None:
            raise TrainingError(
                f"phases, frozen: {type(self.net).__name__} has no trainable Linear or 1x1 convolution with one output "
                "per class, so there is no classifier to train alone; set frozen=False to train all of it"
            )
        return classifier


def epochs_until_freezing_changes(epochs: Sequence[Epoch], first_epoch: Epoch) -> list[Epoch]:
    """Return the consecutive epochs from `first_epoch` on that train the same parameters."""
    frozen = first_epoch.scheduled_phase.phase.frozen
    remaining = epochs[epochs.index(first_epoch) :]
    return list(takewhile(lambda epoch: epoch.scheduled_phase.phase.frozen == frozen, remaining))
