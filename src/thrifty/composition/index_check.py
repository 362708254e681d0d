"""Check of integer indices in the data before a run, without arithmetic on real tensors.

A step with an index out of range raises IndexError in an embedding, a classification loss or a gather; on a GPU it ends
the process. This check stores the values of integer tensors next to fake tensors. One forward pass on fake tensors then
finds such an index.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from thrifty.composition.compose import BaseRun
from thrifty.composition.fake_runs import plain_on_fakes, without_log
from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.fake_branches import causal_masks_of_plain_rows
from thrifty.core.op_flops import call_operation, traced_device
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import preserved_draws
from thrifty.core.tensor_tracing import EagerTrace, one_thread, tensors_in

LARGEST = 1 << 26
"""Maximum number of elements of a tensor whose values are tracked."""
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Integer types for which torch does not implement the minimum."""
ROWS = ("gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_")
"""Operations with arguments (tensor, dimension, indices, …)."""
CLASSES = ("nll_loss_forward", "nll_loss2d_forward")
"""Operations with arguments (log-probabilities, labels, weights, reduction, ignored label)."""


class IndexWithoutRow(UsageError):
    """Error for an index that is out of range for a model or a loss."""


def refuse_indices_without_row(plain: BaseRun, batches: Iterable[Batch]) -> None:
    """Raise IndexWithoutRow if a forward pass on one of the batches would use an index out of range. A batch is skipped
    if its integers are within the range of earlier batches. A model that does not run on fake tensors is run on the
    real batch. Other errors are ignored here, because the run reports them."""
    seen: dict[str, list[int]] = {}
    fake, model = FakeTensorMode(allow_non_fake_inputs=True), None
    with preserved_draws(), one_thread(), torch.no_grad(), without_log(), causal_masks_of_plain_rows():
        for batch in batches:
            if not _extends(seen, batch):
                continue
            is_checked = False
            with _other_errors_ignored():
                model = model or plain_on_fakes(plain, fake).build()
                with fake:
                    _pass(plain, model, batch, fake.from_tensor)
                is_checked = True
            if not is_checked and plain.has_values:
                with _other_errors_ignored():
                    _pass(plain, plain.build(), batch, Tensor.clone)


@contextmanager
def explain_missing_rows(plain: BaseRun, batches: Sequence[Batch]) -> Iterator[None]:
    """Raise IndexWithoutRow in place of a step's error if an index of one of the batches is the cause."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not is_out_of_memory(error):
            refuse_indices_without_row(plain, batches)
        raise


@contextmanager
def _other_errors_ignored() -> Iterator[None]:
    try:
        yield
    except IndexWithoutRow:
        raise
    except Exception:  # from the user's code; the run raises it again
        return


def _extends(seen: dict[str, list[int]], batch: Batch) -> bool:
    """Return True if a field of the batch has another shape, or larger or smaller integers, than in earlier batches."""
    extends = False
    for name, tensor in batch.fields.items():
        low, high = _range(tensor)
        now, before = [-low, high, *tensor.shape[1:]], seen.get(name, [])
        seen[name] = [max(pair) for pair in zip(now, before, strict=True)] if len(before) == len(now) else now
        extends |= seen[name] != before
    return extends


def _range(tensor: Tensor) -> tuple[int, int]:
    if not _is_whole(tensor) or not tensor.numel():
        return 0, 0
    tensor = tensor.long() if tensor.dtype in UNSIGNED else tensor
    return int(tensor.min()), int(tensor.max())


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _pass(plain: BaseRun, model: nn.Module, batch: Batch, copied: Callable[[Tensor], Tensor]) -> None:
    watch = _IndexWatch(model, batch)
    with unset_fake_temporarily():
        values = {name: tensor.clone() for name, tensor in batch.fields.items()}
    fields = {name: watch.know(copied(batch[name]), value, {name}) for name, value in values.items()}
    examples = replace(batch, fields=fields, weight=copied(batch.weight))
    with watch:
        plain.objective.losses(plain.objective.predict(model.train(), examples), examples)


class _IndexWatch(EagerTrace):
    """Mode that tracks the values of integer tensors, and the batch fields from which they are computed. Values are
    tracked only through operations on integer tensors. An index out of range raises IndexWithoutRow."""

    def __init__(self, model: nn.Module, batch: Batch):
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.batch = batch
        self.known: Any = WeakTensorKeyDictionary()

    def know(self, tensor: Tensor, value: Tensor, parts: set[str]) -> Tensor:
        if _is_whole(value):
            self.known[tensor] = value, parts
        return tensor

    def _value(self, tensor: Tensor) -> Tensor | None:
        is_real = _is_whole(tensor) and not isinstance(tensor, FakeTensor)
        return self.known.get(tensor, (tensor if is_real else None, set()))[0]

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if (device := traced_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        for reader, indices, rows, ignored, counts_back in _uses(func, args, self.names):
            with unset_fake_temporarily():
                self._refuse(reader, indices, rows, ignored, counts_back)
        result = call_operation(func, args, kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if any(map(_is_whole, outputs)):
            self._follow(func, args, kwargs, outputs)
        return result

    def _follow(self, func: Callable, args: tuple, kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        inputs = tensors_in((args, kwargs))
        parts = {part for each in inputs for part in self.known.get(each, (None, ()))[1]}
        values: list[Any] = [None if isinstance(each, FakeTensor) else each for each in outputs]
        is_small = all(isinstance(each, FakeTensor) and each.numel() <= LARGEST for each in outputs)
        if is_small and all(self._value(each) is not None for each in inputs):
            with suppress(Exception), unset_fake_temporarily():
                values = tree_leaves(func(*tree_map_only(Tensor, self._value, args), **_on_cpu(kwargs, self._value)))
        for each, value in zip(outputs, values, strict=False):
            self.known.pop(each, None)
            if value is not None:
                self.know(each, value, parts)

    def _refuse(self, reader: str, indices: Tensor, rows: int, ignored: int | None, counts_back: bool) -> None:
        value = self._value(indices)
        if value is None or value.dtype == torch.bool or not value.numel():
            return
        value = value if ignored is None else value[value != ignored]
        low, high = _range(value)
        if high < rows and low >= (-rows if counts_back else 0):
            return
        wrong = high if high >= rows else low
        parts = self.known.get(indices, (None, ()))[1]
        part = next((name for name in sorted(parts) if bool((self.batch[name] == wrong).any())), None)
        raise IndexWithoutRow(*_words(reader, wrong, rows, part))


def _words(reader: str, wrong: int, rows: int, part: str | None) -> tuple[str, str]:
    more = f"build it with at least {wrong + 1}" if wrong >= rows else f"remove {wrong} from the data"
    if reader == "the loss":
        label = f"{part!r} of the examples has the label {wrong}" if part else f"there is a label {wrong}"
        ignoring = f"ignore {wrong}: F.cross_entropy(…, ignore_index={wrong})"
        fix = ignoring if wrong < 0 else f"let the model return {wrong + 1} values for each label"
        return f"the loss has {rows} classes, and {label}", f"use labels from 0 to {rows - 1}, or {fix}"
    if part:
        return (
            f"{reader} has {rows} rows, and {part!r} of the examples has the value {wrong}",
            f"use values from 0 to {rows - 1}, or {more}",
        )
    return (
        f"{reader} has {rows} rows, and the model reads row {wrong}, for example for a position in an example",
        f"use examples of at most {rows} positions, or {more}",
    )


def _on_cpu(kwargs: dict[str, Any], value: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    moved = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
    return {**tree_map_only(Tensor, value, kwargs), **moved}


def _uses(func: Callable, args: tuple, names: dict[int, str]) -> Iterator[tuple[str, Tensor, int, int | None, bool]]:
    """Yield the index tensors of an operation. With each tensor, yield a name for messages, the number of rows, the
    ignored index, and True if negative indices count from the end."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if name == "embedding":
        weight = names.get(id(args[0]), "")
        yield (
            f"the embedding {weight.removesuffix('.weight')!r}" if weight else "an embedding",
            args[1],
            len(args[0]),
            None,
            False,
        )
    elif name in CLASSES:
        yield "the loss", args[1], args[0].shape[args[0].ndim > 1], args[4], False
    elif name in ROWS:
        yield f"torch.{name}", args[2], args[0].shape[args[1]] if args[0].ndim else 1, None, False
    elif name == "index" and not any(each is not None and each.dtype == torch.bool for each in args[1]):
        for dimension, indices in enumerate(args[1]):
            if indices is not None:
                yield "an index in brackets", indices, args[0].shape[dimension], None, True
