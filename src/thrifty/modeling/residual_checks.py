"""Numerical checks that the blocks of a model are pre-norm.

If its branches return zero, a pre-norm block is the identity, but a block with a norm after the sum is not. If a
branch's output is doubled, a pre-norm block adds twice as much, but a block with a norm after the branch does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from thrifty.core.errors import RefusedError
from thrifty.core.eval_mode import eval_mode
from thrifty.core.module_state import restore_module_state
from thrifty.core.randomness import preserved_draws
from thrifty.core.run_notes import add_note
from thrifty.core.tensor_tracing import untraced
from thrifty.modeling.module_surgery import change_first, find_stacks, first_of
from thrifty.modeling.residual_branches import ResidualBranch, find_branches, is_decoder
from thrifty.modeling.stream_norms import refuse_norms_with_parts, stream_norms

TOKENS = 4
"""Number of tokens in a trial of a block."""
CANNOT_RUN = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""Errors of a block or model that is called without a required argument."""


def refuse_normed_sums(model: nn.Module, why: str) -> None:
    """Raise RefusedError if a block changes the residual stream although its branches return zero. `why` is the
    consequence for the user.

    The first block of each kind in a stack is run on random hidden states. If the block requires more inputs (for
    example positions), it is run on its inputs in a forward pass of the model. A note names a block that cannot be run.
    Fake tensors are not compared.
    """
    for stack, trial in _trials(model):
        stays = trial.keeps_the_stream()
        if stays is None:
            add_note(f"blocks of {stack or 'the model'} could not be run alone; they are assumed to be pre-norm")
        elif not stays:
            raise RefusedError(
                f"{type(trial.block).__name__} has a norm after its sums: {why}",
                fix="use a pre-norm model, for instance --set model.preset=llama-nano",
            )


def refuse_other_paths(model: nn.Module, where: str) -> None:
    """Raise RefusedError if a block changes the stream although its branches return zero and norms of the stream do
    nothing, for example by a gate on the stream; or for a norm that cannot be bypassed. `where` is an argument of
    `find_branches`. Blocks are run as in `refuse_normed_sums`."""
    refuse_norms_with_parts(model)
    norms = stream_norms(model).matched.values()
    hooks = [norm.register_forward_hook(lambda norm, args, output: args[0] if args else output) for norm in norms]
    try:
        trials = [(trial, trial.adds_only_branches()) for _, trial in _trials(model, where)]
    finally:
        for hook in hooks:
            hook.remove()
    for trial, is_sum in trials:
        if is_sum is False:
            raise RefusedError(
                f"{type(trial.block).__name__} changes the residual stream although its branches "
                f"({', '.join(branch.name for branch in trial.branches)}) return zero",
                fix='name the output layers of all branches, such as where="(out|down)$"; or use a model whose blocks '
                "only add branches to the stream",
            )


def refuse_normed_branches(model: nn.Module, why: str) -> None:
    """Raise RefusedError if the stream does not change in proportion to a branch's output, as with a norm after the
    branch. `why` is the consequence for the user. Blocks are run as in `refuse_normed_sums`."""
    for _, trial in _trials(model):
        for branch in trial.branches:
            if trial.adds_in_proportion(branch) is False:
                raise _normed_branch(trial.block, branch, why)


def refuse_undone_gains(model: nn.Module, where: str, why: str) -> None:
    """Raise RefusedError if doubling a branch's output does not change the stream, because a norm after the branch
    cancels the doubling. `where` is an argument of `find_branches`. Blocks are run as in `refuse_normed_sums`."""
    for _, trial in _trials(model, where):
        for branch in trial.branches:
            if trial.undoes_factors(branch):
                raise _normed_branch(trial.block, branch, why)


def _normed_branch(block: nn.Module, branch: ResidualBranch, why: str) -> RefusedError:
    return RefusedError(
        f"{type(block).__name__} has a norm after {branch.name}: {why}",
        fix="use a model with norms only before its branches: --set model.preset=llama-nano",
    )


class _BlockTrial(NamedTuple):
    """A block with its branches and the inputs of a trial."""

    block: nn.Module
    branches: list[ResidualBranch]
    args: Sequence[Any]
    """Positional inputs; the first is the stream."""
    kwargs: Mapping[str, Any]

    def keeps_the_stream(self) -> bool | None:
        """Return True if the block returns its input when its branches return zero; None if it cannot be run."""
        output, x = self._run({}), self.args[0]
        if output is None or output.shape != x.shape:
            return None
        return torch.equal(output, x.to(output.dtype))

    def adds_only_branches(self) -> bool | None:
        """Return True if the block returns its input when its branches return zero; or zero, because the model adds
        its output to the stream. Return None if it cannot be run."""
        output = self._run({})
        return self.keeps_the_stream() if output is None or output.any() else True

    def adds_in_proportion(self, branch: ResidualBranch) -> bool | None:
        """Return True if the stream changes in proportion to a branch's output; None if the block cannot be run."""
        once, twice = (self._run({branch.name: factor}) for factor in (1.0, 2.0))
        if once is None or twice is None:
            return None
        x = self.args[0]
        return torch.allclose(twice - x, 2 * (once - x), rtol=1e-2, atol=1e-2 * float((once - x).abs().max()))

    def undoes_factors(self, branch: ResidualBranch) -> bool | None:
        """Return True if a branch changes the stream, but the magnitude of its output has no effect; None if the block
        cannot be run."""
        none, once, twice = (self._run({branch.name: factor}) for factor in (0.0, 1.0, 2.0))
        if none is None or once is None or twice is None:
            return None
        moved = float((once - none).abs().max())
        return moved > 0 and float((twice - once).abs().max()) < 1e-2 * moved

    def _run(self, factors: Mapping[str, float]) -> Tensor | None:
        """Run the block in eval mode, with each branch's output replaced by random values times a factor. Return None
        if the block cannot be run, or returns no tensor."""
        like = next(self.block.parameters())
        with (
            untraced(),
            torch.no_grad(),
            preserved_draws([like]),
            restore_module_state(self.block),
            eval_mode(self.block),
            _replaced_outputs(self.branches, factors),
        ):
            try:
                output = first_of(self.block(*self.args, **self.kwargs))
            except CANNOT_RUN:
                return None
        return output if isinstance(output, Tensor) else None


def _trials(model: nn.Module, where: str | None = None) -> list[tuple[str, _BlockTrial]]:
    """Return each stack's name with a trial of its first block of each kind, except blocks whose parameters have no
    values."""
    stacks, trials = find_stacks(model), {}
    for stack, blocks in find_branches(model, where, ends_only=True).items():
        for block, branches in zip(stacks[stack], blocks, strict=True):
            paths = (name for branch in branches for name in (branch.name, *branch.inner))
            kind = (stack, type(block), *(path.removeprefix(f"{stack}.").partition(".")[2] for path in paths))
            if kind not in trials and not any(is_fake(each) or each.is_meta for each in block.parameters()):
                trials[kind] = stack, _trial(model, block, branches, is_decoder(blocks))
    return [*trials.values()]


def _trial(model: nn.Module, block: nn.Module, branches: list[ResidualBranch], is_decoder: bool) -> _BlockTrial:
    like = next(block.parameters())
    x = torch.randn(1, TOKENS, branches[0].width, device="cpu", generator=torch.Generator().manual_seed(0)).to(like)
    alone = [_BlockTrial(block, branches, args, {}) for args in ([(x, None, x), (x, x)] if is_decoder else [(x,)])]
    for trial in alone:  # the other stack's output may be the third or the second input
        if trial.keeps_the_stream() is not None:
            return trial
    inputs = _forward_inputs(model, block)
    return alone[0] if inputs is None else _BlockTrial(block, branches, *inputs)


def _forward_inputs(model: nn.Module, block: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Return the inputs of a block in a forward pass of the model; None if the block is not reached."""
    like, calls = next(model.parameters()), []
    tokens = torch.arange(TOKENS, device=like.device)[None]
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        with untraced(), torch.no_grad(), preserved_draws([like]), restore_module_state(model):
            if (example := getattr(model, "example", None)) is not None:  # Thrifty's image models
                model(example(like.device))
            else:  # models of transformers have `probe` for their other inputs
                model(*getattr(model, "probe", lambda ids: (ids,))(tokens))
    except CANNOT_RUN:
        pass
    finally:
        hook.remove()
    args, kwargs = calls[0] if calls else ((), {})
    if not args or not isinstance(args[0], Tensor):
        return None
    return [*map(_unless_cache, args)], {name: _unless_cache(value) for name, value in kwargs.items()}


def _unless_cache(value: Any) -> Any:
    """Return None for a key-value cache, because a second run of a block would read entries of the first run."""
    return None if hasattr(value, "get_seq_length") else value


@contextmanager
def _replaced_outputs(branches: list[ResidualBranch], factors: Mapping[str, float]) -> Iterator[None]:
    def replace_with(factor: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return change_first(output, lambda x: _random_values(x, factor) if isinstance(x, Tensor) else x)

        return hook

    hooks = [branch.writer.register_forward_hook(replace_with(factors.get(branch.name, 0.0))) for branch in branches]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _random_values(like: Tensor, factor: float) -> Tensor:
    """Return random values times `factor`, the same values at each call; zeros for factor 0."""
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return (factor * values).to(like) if factor else torch.zeros_like(like)
