"""torch.compile's cache on disk, for graphs with autograd functions and autocast regions.

By default, torch (2.11 to 2.14) does not keep the traced backward pass of such a graph, although Dynamo traces both
passes of an autograd function into the graph, and both are in the cache's key.
"""

import torch

_AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


def cache_custom_functions() -> None:
    """Keep compiled graphs with autograd functions and autocast regions in torch.compile's cache on disk."""
    import torch._functorch.config as tracing  # slow imports
    import torch._inductor.config as inductor

    tracing.autograd_cache_allow_custom_autograd_functions = True
    marked = dict.fromkeys(_AUTOCAST, torch.__version__)
    inductor.unsafe_marked_cacheable_functions = inductor.unsafe_marked_cacheable_functions | marked
