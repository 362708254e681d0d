"""Traces of allocated bytes and FLOPs. A trace on fake tensors allocates and computes nothing."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import reduce
from math import inf
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thrifty.core.kernel_workspace import workspace_bytes
from thrifty.core.op_flops import FLOPS_OF, call_operation, traced_device


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in list(tensors)}.values())


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def fillable(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as a vector, since torch refuses to fill expanded tensors, whose elements
    overlap."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Run the block without the cyclic garbage collector, so that repeated counts are equal."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_is_settled = False


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude objects that exist before the block from garbage collection inside the block. Otherwise each trace would
    scan all imported objects, which takes tenths of a second."""
    global _is_settled
    # an outer block has frozen the objects; the flag is first, because get_freeze_count is slow
    if _is_settled or gc.get_freeze_count():
        yield
        return
    _is_settled = True
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _is_settled = False


_threads: int | None = None
"""Number of threads before the outermost `one_thread` block; None outside such a block."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one thread, because a trace records only its own thread."""
    global _threads
    before, outer = torch.get_num_threads(), _threads
    _threads = outer or before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _threads = outer


class EagerTrace(TorchDispatchMode):
    """Dispatch mode in which compiled functions run eagerly. Otherwise Dynamo would refuse frames under a dispatch mode
    and mark their code as skipped, so that later calls stay uncompiled too."""

    def __init__(self) -> None:
        super().__init__()
        self._stances: list[ExitStack] = []

    def __enter__(self) -> Self:
        self._stances.append(stance := ExitStack())
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import is slow
            stance.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stances.pop().close()


_open_traces: "list[StepTrace]" = []


class StepTrace(EagerTrace):
    """Trace of live and peak bytes of storages, and of the FLOPs of matrix products and attention.

    The trace follows every storage from the operation that creates it until it is freed. It raises MemoryError if more
    than `limit` bytes are alive. With `casts`, elementwise operations cast their arguments in memory and convolutions
    copy their arguments, as on a CPU.
    """

    def __init__(self, *known: Tensor, limit: float = inf, casts: bool = True):
        super().__init__()
        self.now, self.peak, self.flops = 0, 0, 0
        self.limit, self.casts = limit, casts
        self.paused = False
        self.watch: Callable[[int], None] | None = None
        """Callback that receives the peak bytes of each operation: bytes alive plus temporary bytes inside it."""
        self._alive: dict[int, int] = {}
        """Bytes of each storage that is alive."""
        self._watches: dict[int, weakref.finalize] = {}
        self.know(*known)

    def know(self, *tensors: Tensor) -> None:
        """Register existing tensors, such as parameters or the batch. Their bytes do not count for the step."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), 0)

    def held_besides(self, tensors: Iterable[Tensor], storages: Set[int] = frozenset()) -> int:
        """Return the bytes alive, including registered tensors, except the bytes of these tensors and storages."""
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(size for key, size in self._alive.items() if key not in own and key not in storages)

    def storages(self) -> Set[int]:
        """Return the keys of the storages that are alive."""
        return frozenset(self._alive)

    def __enter__(self) -> Self:
        _open_traces.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _open_traces.remove(self)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if (device := traced_device(func, args)) is not None:
            return device
        result = call_operation(func, args, kwargs or {})
        if self.paused:
            return result
        formula = FLOPS_OF.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                for part in (tensor,) if tensor.layout == torch.strided else _parts_of(tensor):
                    self._see(part.untyped_storage(), args)
        if not _replaces_gradient(func):
            most = self.now + (self._inside(func, args, kwargs or {}, result) if self.casts else 0)
            self.peak = max(self.peak, most)
            if self.watch is not None:
                self.watch(most)
            if self.now > self.limit:
                raise MemoryError(f"{self.now:,} bytes are alive; the limit is {self.limit:,.0f}")
        return result

    def _inside(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> int:
        """Return the temporary bytes that a CPU kernel allocates and frees."""
        workspace = workspace_bytes(func, args, kwargs, _threads or torch.get_num_threads())
        return workspace or cast_bytes(func, args, result)

    def _see(self, storage: torch.UntypedStorage, args: tuple) -> None:
        """Follow the storage of a result, unless an argument from outside owns the storage, such as a model to copy."""
        key = storage._cdata
        if key not in self._alive and not any(
            isinstance(each, Tensor) and each.layout == torch.strided and each.untyped_storage()._cdata == key
            for each in args
        ):
            self._follow(storage, storage.nbytes())

    def _follow(self, storage: torch.UntypedStorage, own: int) -> None:
        """Follow a storage until it is freed; `own` of its bytes belong to the step."""
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self._watches[key] = weakref.finalize(storage, self._forget, key, own)
        self.now += own

    def _forget(self, key: int, own: int) -> None:
        self._alive.pop(key, None)
        self._watches.pop(key, None)
        self.now -= own


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the component tensors of a sparse tensor; none for types of other libraries."""
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()


def cast_bytes(func: Any, args: tuple, result: Any) -> int:
    """Return the temporary bytes of an elementwise operation on arguments of mixed precision. Arguments of lower
    precision are cast, and so is a result that overwrites such an argument."""
    if torch.Tag.pointwise not in func.tags:
        return 0
    inputs = [value for value in args if isinstance(value, Tensor) and value.is_floating_point() and value.ndim]
    if len({value.dtype for value in inputs}) < 2:
        return 0
    common = reduce(torch.promote_types, (value.dtype for value in inputs))
    cast = [value for value in [*inputs, *(v for v in inputs[:1] if v is result)] if value.dtype != common]
    return sum(value.numel() * common.itemsize for value in cast)


_OUT_OF_PLACE = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter_add.default,
}
"""Operations that autograd usually runs in place, but under a dispatch mode in new memory. They add two gradients of a
tensor, or compute gradients of indexing."""


def _replaces_gradient(func: Any) -> bool:
    """Return True if autograd runs `func`. Autograd then frees the first argument before the next operation."""
    return func in _OUT_OF_PLACE and not torch.is_grad_enabled() and torch._C._current_autograd_node() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Exclude the block from the open traces. The block must leave no memory allocated on the device."""
    paused = [trace for trace in _open_traces if not trace.paused]
    for trace in paused:
        trace.paused = True
    try:
        yield
    finally:
        for trace in paused:
            trace.paused = False


@contextmanager
def track_running_module(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the name of the innermost running module, or "" outside of all modules."""
    names, running = {id(module): name for name, module in model.named_modules()}, [""]

    def enter(module: nn.Module, args: tuple) -> None:
        running.append(names.get(id(module), running[-1]))

    def leave(module: nn.Module, args: tuple, result: Any) -> None:
        running.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield lambda: running[-1]
    finally:
        for hook in hooks:
            hook.remove()
