"""Phases in which only the classifier is trained: the rest keeps its weights, its norms' statistics, its momentum."""

from collections.abc import Sequence
from itertools import takewhile

from torch import nn

from train.recipe.schedule import Epoch
from train.tools.errors import TrainingError

from . import registry


class Freezer:
    """What of a network is trained now. All of it at first, but for what never was."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.frozen = net, False
        self.trainable_parameters = [one for one in net.parameters() if one.requires_grad]

    def set_frozen(self, frozen: bool) -> None:
        """Let gradients be computed for the classifier only, or for all; without one a parameter is not moved at all.

        All gradients are forgotten: they are views of the last DistributedDataParallel's buckets. Raises `Expected`
        where the classifier is not known.
        """
        own = {id(one) for one in self.classifier().parameters()} if frozen else set()
        for one in self.trainable_parameters:
            one.grad = None
            one.requires_grad_(not frozen or id(one) in own)
        self.frozen = frozen

    def set_train_mode(self) -> None:
        """Let the network train; what is frozen uses its norms' statistics as they are, and drops nothing out."""
        self.net.train(not self.frozen)
        if self.frozen:
            self.classifier().train()

    def classifier(self) -> nn.Module:
        """Return the layer that learns in a frozen phase. Raises `Expected` where it is not known."""
        found = registry.find_classifier(self.net)
        if found is None:
            raise TrainingError(
                f"phases, frozen: {type(self.net).__name__} has no Linear and no 1x1 convolution that learns and makes "
                "one score for each class, so there is no classifier to train alone; frozen=False trains all of it"
            )
        return found


def epochs_until_freezing_changes(epochs: Sequence[Epoch], first_epoch: Epoch) -> list[Epoch]:
    """Return the epochs from `first` on, as far as they train the same parts."""
    later = epochs[epochs.index(first_epoch) :]
    return list(
        takewhile(lambda epoch: epoch.scheduled_phase.phase.frozen == first_epoch.scheduled_phase.phase.frozen, later)
    )
