"""Adam, without loading PyTorch's compiler."""

import inspect

import torch
from torch import nn


class _LeanAdam(torch.optim.Adam):
    """Adam whose methods are the functions within PyTorch's.

    Those load the compiler, to keep themselves out of what it compiles. Nothing here compiles them.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)


def lean_adam(model: nn.Module) -> torch.optim.Adam:
    """Return ``training.optimizer.make_adam(model)``, with which a run starts a second sooner."""
    return _LeanAdam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
