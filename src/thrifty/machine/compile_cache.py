"""torch.compile's cache on disk: for graphs with autograd functions and autocast regions, and for one kind of CPU.

By default, torch (2.11 to 2.14) does not keep the traced backward pass of such a graph, although Dynamo traces both
passes of an autograd function into the graph, and both are in the cache's key. The instructions of the CPU are not in
the key, and a graph that was compiled for AVX512 computes wrong gradients of attention where torch uses AVX2, such as
on another node with the same home directory.
"""

import torch

_AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


def prepare_compile_cache() -> None:
    """Keep compiled graphs with autograd functions and autocast regions in torch.compile's cache on disk, apart from
    those of other kinds of CPUs."""
    import torch._functorch.config as tracing  # slow imports
    import torch._inductor.config as inductor

    tracing.autograd_cache_allow_custom_autograd_functions = True
    # the marked names are in the cache's key, so one of no function tells the CPUs apart
    marked = dict.fromkeys((*_AUTOCAST, f"cpu.{torch.backends.cpu.get_cpu_capability()}"), torch.__version__)
    inductor.unsafe_marked_cacheable_functions = inductor.unsafe_marked_cacheable_functions | marked
