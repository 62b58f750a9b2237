"""Adam, without loading PyTorch's compiler."""

import inspect

import torch
from torch import nn
from torch.optim import Adam, Optimizer


class LeanAdam(Adam):
    """The optimizer of ``training.optimizer.make_adam``, with which a run starts a second sooner.

    PyTorch's methods load its compiler, to keep themselves out of what it compiles. Nothing here
    compiles an optimizer, so these are the functions within those methods.

    Args:
        model: Its parameters are optimised; shared ones once.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)

    step = torch.no_grad()(inspect.unwrap(Adam.step))
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
