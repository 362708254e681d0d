"""Whole numbers of examples that a model or a loss uses as indices, checked before a run without arithmetic.

An embedding, a loss of classes or a gather raises IndexError, or ends the process on a GPU, at the step that meets the
first index without a row. Here whole-number tensors keep their values beside fake ones, so that one forward pass on
fake tensors finds it.
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
from thrifty.composition.explain import plain_on_fakes, without_log
from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.fake_branches import causal_masks_of_plain_rows
from thrifty.core.op_flops import call_operation, traced_device
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import preserved_draws
from thrifty.core.tensor_tracing import EagerTrace, one_thread, tensors_in

LARGEST = 1 << 26
"""Elements of a tensor whose values are followed."""
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Whole numbers for which torch has no minimum."""
ROWS = ("gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_")
"""Operations on (tensor, dimension, indices, …)."""
CLASSES = ("nll_loss_forward", "nll_loss2d_forward")
"""Operations on (logarithms, labels, weights, reduction, ignored label)."""


class IndexWithoutRow(UsageError):
    """An index for which a model or a loss has no row."""


def refuse_indices_without_row(plain: BaseRun, batches: Iterable[Batch]) -> None:
    """Raise IndexWithoutRow if a forward pass on one of the batches would use an index that is negative or too large.

    A batch whose whole numbers are within those of earlier ones is not looked at. A model that does not run on fake
    tensors is run on the batch itself. Any other error is left to the run, which reports it.
    """
    seen: dict[str, list[int]] = {}
    fake, model = FakeTensorMode(allow_non_fake_inputs=True), None
    with preserved_draws(), one_thread(), torch.no_grad(), without_log(), causal_masks_of_plain_rows():
        for batch in batches:
            if not _extends(seen, batch):
                continue
            passed = False
            with _other_errors_left():
                model = model or plain_on_fakes(plain, fake).build()
                with fake:
                    _pass(plain, model, batch, fake.from_tensor)
                passed = True
            if not passed and plain.has_values:
                with _other_errors_left():
                    _pass(plain, plain.build(), batch, Tensor.clone)


@contextmanager
def explain_missing_rows(plain: BaseRun, batches: Sequence[Batch]) -> Iterator[None]:
    """Raise IndexWithoutRow in place of the error of a step on one of the batches, if that is why it failed."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not is_out_of_memory(error):
            refuse_indices_without_row(plain, batches)
        raise


@contextmanager
def _other_errors_left() -> Iterator[None]:
    try:
        yield
    except IndexWithoutRow:
        raise
    except Exception:  # raised by the user's code; the run meets it again
        return


def _extends(seen: dict[str, list[int]], batch: Batch) -> bool:
    """Return True if a part of the batch has more columns, or larger or smaller whole numbers, than those before."""
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
    """While open, follows the values of whole-number tensors through all operations on them alone, with the parts of
    the batch that they come from, and refuses an index without a row."""

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
        for what, indices, rows, ignored, counts_back in _uses(func, args, self.names):
            with unset_fake_temporarily():
                self._refuse(what, indices, rows, ignored, counts_back)
        result = call_operation(func, args, kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if any(map(_is_whole, made)):
            self._follow(func, args, kwargs, made)
        return result

    def _follow(self, func: Callable, args: tuple, kwargs: dict[str, Any], made: list[Tensor]) -> None:
        given = tensors_in((args, kwargs))
        parts = {part for each in given for part in self.known.get(each, (None, ()))[1]}
        values: list[Any] = [None if isinstance(each, FakeTensor) else each for each in made]
        is_small = all(isinstance(each, FakeTensor) and each.numel() <= LARGEST for each in made)
        if is_small and all(self._value(each) is not None for each in given):
            with suppress(Exception), unset_fake_temporarily():
                values = tree_leaves(func(*tree_map_only(Tensor, self._value, args), **_on_cpu(kwargs, self._value)))
        for each, value in zip(made, values, strict=False):
            self.known.pop(each, None)
            if value is not None:
                self.know(each, value, parts)

    def _refuse(self, what: str, indices: Tensor, rows: int, ignored: int | None, counts_back: bool) -> None:
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
        raise IndexWithoutRow(*_words(what, wrong, rows, part))


def _words(what: str, wrong: int, rows: int, part: str | None) -> tuple[str, str]:
    """Return an error and its fix."""
    more = f"build it with at least {wrong + 1}" if wrong >= rows else f"leave {wrong} out of the data"
    if what == "the loss":
        label = f"{part!r} of the examples has the label {wrong}" if part else f"there is a label {wrong}"
        ignoring = f"leave out those of {wrong}: F.cross_entropy(…, ignore_index={wrong})"
        fix = ignoring if wrong < 0 else f"let the model return {wrong + 1} values for each label"
        return f"the loss is of {rows} classes, and {label}", f"give labels from 0 to {rows - 1}, or {fix}"
    if part:
        return (
            f"{what} has {rows} rows, and {part!r} of the examples has the value {wrong}",
            f"give values from 0 to {rows - 1}, or {more}",
        )
    return (
        f"{what} has {rows} rows, and the model asks for row {wrong}, such as of a position in an example",
        f"give shorter examples, of {rows} positions at most, or {more}",
    )


def _on_cpu(kwargs: dict[str, Any], value: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    moved = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
    return {**tree_map_only(Tensor, value, kwargs), **moved}


def _uses(func: Callable, args: tuple, names: dict[int, str]) -> Iterator[tuple[str, Tensor, int, int | None, bool]]:
    """Yield the indices of an operation: what reads them, the tensor, the rows that there are, the index that is
    ignored, and True if negative ones count from the end."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if name == "embedding":
        of = names.get(id(args[0]), "")
        yield (
            f"the embedding {of.removesuffix('.weight')!r}" if of else "an embedding",
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
