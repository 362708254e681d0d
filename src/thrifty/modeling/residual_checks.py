"""Whether the blocks of a model add to a stream and do nothing else to it: without what their branches give they are
the identity. So it is with the norm in front of each branch, and not with the norm behind the sum. And whether what
they add is what their branches give: a norm behind a branch makes it of one size, whatever it is multiplied by."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import preserved_draws
from thrifty.core.run_notes import add_note
from thrifty.core.tensor_tracing import untraced
from thrifty.modeling.module_surgery import change_first, find_stacks
from thrifty.modeling.residual_branches import ResidualBranch, find_branches, in_width, is_decoder

TOKENS = 4
"""Of the stream that is given to a block to see what it does."""
CANNOT_RUN = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What a block or a model raises that misses something it needs."""


def refuse_normed_sums(model: nn.Module, why: str) -> None:
    """Raises RefusedError where a block whose branches give nothing changes the stream; `why` is what that would break.

    The first block of each stack is tried: on random hidden states alone, or, where it takes more (positions, say), on
    what a forward pass of the model gives it. One that cannot be tried is noted; fake tensors have nothing to compare.
    """
    for stack, trial in _trials(model).items():
        stays = trial.keeps_the_stream()
        if stays is None:
            add_note(f"blocks of {stack or 'the model'} could not be tried alone; they are taken to be pre-norm")
        elif not stays:
            raise RefusedError(
                f"{type(trial.block).__name__} has a norm behind its sums: {why}",
                fix="take a pre-norm model, for instance --set model.preset=llama-nano",
            )


def refuse_normed_branches(model: nn.Module, why: str) -> None:
    """Raises RefusedError where twice as much of a branch is not twice as much in the stream; `why` is what that would
    break. Blocks are tried as by `refuse_normed_sums`."""
    for trial in _trials(model).values():
        for branch in trial.branches:
            if trial.adds_in_proportion(branch) is False:
                raise _normed_branch(trial.block, branch, why)


def refuse_undone_gains(model: nn.Module, where: str, why: str) -> None:
    """Raises RefusedError where twice as much of a branch is as much in the stream: a norm behind it undoes what it is
    multiplied by. `where` as in `find_branches`; blocks are tried as by `refuse_normed_sums`."""
    for trial in _trials(model, where).values():
        for branch in trial.branches:
            if trial.undoes_factors(branch):
                raise _normed_branch(trial.block, branch, why)


def _normed_branch(block: nn.Module, branch: ResidualBranch, why: str) -> RefusedError:
    return RefusedError(
        f"{type(block).__name__} has a norm behind {branch.name}: {why}",
        fix="take a model with norms in front of its branches alone, such as model.preset=llama-nano",
    )


class _BlockTrial(NamedTuple):
    """A block, and what it is given."""

    block: nn.Module
    branches: list[ResidualBranch]
    args: Sequence[Any]
    """The first is the stream."""
    kwargs: Mapping[str, Any]

    def keeps_the_stream(self) -> bool | None:
        """Without its branches; None where the block cannot be run."""
        output = self._run({})
        return None if output is None else torch.equal(output, self.args[0])

    def adds_in_proportion(self, branch: ResidualBranch) -> bool | None:
        """What a branch gives; None where the block cannot be run."""
        once, twice = (self._run({branch.name: factor}) for factor in (1.0, 2.0))
        if once is None or twice is None:
            return None
        x = self.args[0]
        return torch.allclose(twice - x, 2 * (once - x), rtol=1e-2, atol=1e-2 * float((once - x).abs().max()))

    def undoes_factors(self, branch: ResidualBranch) -> bool | None:
        """Whether a branch tells in the stream, and how much of it there is does not; None where it cannot be run."""
        none, once, twice = (self._run({branch.name: factor}) for factor in (0.0, 1.0, 2.0))
        if none is None or once is None or twice is None:
            return None
        moved = float((once - none).abs().max())
        return moved > 0 and float((twice - once).abs().max()) < 1e-2 * moved

    def _run(self, factors: Mapping[str, float]) -> Tensor | None:
        """With so much of random numbers in the place of what each branch gives."""
        like = next(self.block.parameters())
        with untraced(), torch.no_grad(), preserved_draws([like]), _giving(self.branches, factors):
            try:
                output = self.block(*self.args, **self.kwargs)
            except CANNOT_RUN:
                return None
        return output[0] if isinstance(output, tuple) else output


def _trials(model: nn.Module, where: str = "") -> dict[str, _BlockTrial]:
    """Of the first block of each stack whose parameters have values."""
    stacks, trials = find_stacks(model), {}
    for stack, branches in find_branches(model, where).items():
        block = stacks[stack][0]
        if not any(is_fake(parameter) for parameter in block.parameters()):
            trials[stack] = _trial(model, block, branches[0], is_decoder(branches))
    return trials


def _trial(model: nn.Module, block: nn.Module, branches: list[ResidualBranch], is_decoder: bool) -> _BlockTrial:
    like = next(block.parameters())
    width = in_width(next(iter(branches[0].inner.values())))
    x = torch.randn(1, TOKENS, width, device="cpu", generator=torch.Generator().manual_seed(0)).to(like)
    alone = _BlockTrial(block, branches, (x, None, x) if is_decoder else (x,), {})
    if alone.keeps_the_stream() is None and (inputs := _given(model, block)) is not None:
        return _BlockTrial(block, branches, *inputs)
    return alone


def _given(model: nn.Module, block: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """What a forward pass of a whole model gives a block; None where it does not come to that."""
    like, seen = next(model.parameters()), []
    tokens = torch.arange(TOKENS, device=like.device)[None]
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    try:
        with untraced(), torch.no_grad(), preserved_draws([like]):
            if (example := getattr(model, "example", None)) is not None:  # ours, of images
                model(example(like.device))
            else:  # those of transformers say what else they take
                model(*getattr(model, "probe", lambda ids: (ids,))(tokens))
    except CANNOT_RUN:
        pass
    finally:
        hook.remove()
    args, kwargs = seen[0] if seen else ((), {})
    if not args or not isinstance(args[0], Tensor):
        return None
    return [*map(_unless_cache, args)], {name: _unless_cache(value) for name, value in kwargs.items()}


def _unless_cache(value: Any) -> Any:
    """A block that is run again would find in a cache what it has read the first time."""
    return None if hasattr(value, "get_seq_length") else value


@contextmanager
def _giving(branches: list[ResidualBranch], factors: Mapping[str, float]) -> Iterator[None]:
    def giving(factor: float) -> Any:
        def give(module: nn.Module, args: Any, output: Any) -> Any:
            return change_first(output, lambda x: _drawn(x, factor) if isinstance(x, Tensor) else x)

        return give

    hooks = [branch.writer.register_forward_hook(giving(factors.get(branch.name, 0.0))) for branch in branches]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drawn(like: Tensor, factor: float) -> Tensor:
    """The same random numbers each time, so many times; zeros where that is none."""
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return (factor * drawn).to(like) if factor else torch.zeros_like(like)
