"""Collectives that torch.compile can trace, under their names in torch 2.13.

The gradient of `all_gather_single_autograd` is reduced over the ranks, like `reduce_scatter_single` with "sum".
"""

try:
    from torch.distributed._functional_collectives import (
        all_gather_single,
        all_gather_single_autograd,
        reduce_scatter_single,
    )
except ImportError:
    from torch.distributed._functional_collectives import all_gather_tensor as all_gather_single
    from torch.distributed._functional_collectives import all_gather_tensor_autograd as all_gather_single_autograd
    from torch.distributed._functional_collectives import reduce_scatter_tensor as reduce_scatter_single

__all__ = ["all_gather_single", "all_gather_single_autograd", "reduce_scatter_single"]
