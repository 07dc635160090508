"""The cost of a step of LARS and LAMB. Their formulas are tested in tests/train/rules."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from train.optim import factory
from train.optim.lamb import Lamb
from train.optim.lars import Lars
from train.recipe import Optim


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_step_never_waits_for_the_device(kind: Any) -> None:
    """Fake tensors have no content: `.item()` or `if` on them, which would wait for the device, raises."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        optimizer = factory.build_optimizer(model, Optim(name=kind.__name__.lower(), weight_decay=0.1))
        assert isinstance(optimizer, kind)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            factory.set_lr(optimizer, 0.1)
            if step == 2:  # from now on with a loss scale, as `GradScaler.step` sets it
                optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
            optimizer.step()
        with pytest.raises(Exception, match=r"item|data-dependent|local_scalar"):
            bool(model.get_parameter("0.weight").sum() > 0)
