"""Softmax cross-entropy of a linear head in chunks of tokens. The logits of all tokens are never stored at once.

The idea is from Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models (arXiv 2411.09009), and the
Liger kernels (Hsu et al. 2024, arXiv 2410.10989). The gradients are computed in the forward pass, while a chunk's
logits exist.

The gradients of a chunk are linear in the weight of each token's loss. A trainer knows these weights before the
backward pass, up to one common factor. The forward pass therefore computes the gradients of hidden states, weight and
bias for the expected weights, and the backward pass only multiplies them by the factor. If the upstream gradient is no
multiple of the expected weights (for example with a z-loss on `lse`), the chunks are recomputed. The result is correct
in both cases.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.errors import UsageError

IGNORED = -100
"""Target of an ignored token. The loss, log-sum-exp and gradient of an ignored token are 0."""

Step = Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]]


def chunk_step(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    soft: Tensor | None,
    hard: Tensor | None,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return losses and log-sum-exps (lse) (c,) of a chunk of c tokens, and the requested gradients of hidden (c, d),
    weight (v, d) and bias (v,).

    The gradient of the logits is soft · softmax - hard · one-hot. `soft` and `hard` (c,) are zero for ignored targets.
    The function is pure, so torch.compile can fuse its elementwise operations into few passes over the logits.
    """
    logits = F.linear(hidden, weight, bias).to(_accurate(hidden.dtype))
    lse = logits.logsumexp(-1)
    losses = lse - logits.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    counted = targets != IGNORED
    losses, masked_lse = torch.where(counted, losses, 0.0), torch.where(counted, lse, 0.0)
    if soft is None or hard is None:
        return losses, masked_lse, None, None, None
    wanted = want_hidden, want_weight, want_bias
    return losses, masked_lse, *chunk_gradients(logits, lse, hidden, weight, targets, soft, hard, *wanted)


def chunk_gradients(
    logits: Tensor,
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    soft: Tensor,
    hard: Tensor,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias from logits (c, v) of the whole vocabulary or a part of it.

    `targets` are token indices counted from the first token of this part.
    """
    gradient = (logits - lse[:, None]).exp() * soft[:, None]
    is_target = torch.arange(weight.shape[0], device=weight.device) == targets[:, None]
    gradient = torch.where(is_target, gradient - hard[:, None], gradient)
    grad_bias = gradient.sum(0) if want_bias else None
    gradient = gradient.to(hidden.dtype)
    grad_hidden = gradient @ weight if want_hidden else None
    grad_weight = gradient.t() @ hidden if want_weight else None
    return grad_hidden, grad_weight, grad_bias


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    expected: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    chunk: int = 512,
    step: Step = chunk_step,
) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps (n,) in float32, for hidden (n, d), weight (v, d), bias (v,) and targets (n,)
    int64.

    `expected` (n,) are the weights by which the caller will multiply the losses, up to one common factor. Without
    `expected`, or if the upstream gradient is no multiple of `expected`, the backward pass recomputes the logits of
    each chunk. `step` is `chunk_step` or a compiled version of it. Matmuls run in the dtype that `F.linear` would use,
    softmax in float32. Targets of -100 are ignored. Second derivatives raise UsageError.
    """
    device = "cpu" if hidden.is_meta else hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if not torch.is_grad_enabled():
        expected = None  # evaluation requires only the losses
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, expected, chunk, step)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result of `linear_cross_entropy`, computed from all logits (n, v) at once."""
    logits = F.linear(hidden, weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype))
    logits = logits.to(_accurate(hidden.dtype))
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return losses, torch.where(targets != IGNORED, logits.logsumexp(-1), 0.0)


@torch.no_grad()
def gradient_norm_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk: int = 512
) -> Tensor:
    """Return ||softmax - one-hot||² (n,) in float32: the squared norm of each token's gradient at the logits. Ignored
    tokens have 0. The square root of the score is the importance of Katharopoulos & Fleuret 2018 (arXiv 1803.00942),
    and EL2N of Paul et al. 2021.
    """
    weight, bias = weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
    scores = []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        difference = F.linear(part, weight, bias).to(_accurate(hidden.dtype)).softmax(-1)
        ones = torch.ones_like(difference[:, :1])
        difference.scatter_add_(1, target.clamp(min=0)[:, None], -ones)
        scores.append(torch.where(target != IGNORED, difference.square().sum(-1), 0.0))
    return torch.cat(scores)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, expected, chunk, step):  # type: ignore[override]
        ctx.chunk, ctx.step, ctx.kept = chunk, step, None
        ctx.wants = tuple(ctx.needs_input_grad[:3])
        ctx.save_for_backward(hidden, weight, bias, targets, expected)
        coefficients = None
        if expected is not None and any(ctx.wants):
            coefficients = _relative(expected, targets, _accurate(hidden.dtype))
        losses, lse, *gradients = _in_chunks(ctx, hidden, weight, bias, targets, coefficients, coefficients)
        if coefficients is not None:
            ctx.kept = gradients
        ctx.set_materialize_grads(False)
        return losses, lse

    @staticmethod
    def backward(ctx, grad_losses, grad_lse):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UsageError(
                "the chunked cross-entropy has no second derivative", fix="use linear_cross_entropy_reference"
            )
        hidden, weight, bias, targets, expected = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # used once: a second backward pass over a retained graph recomputes
        factor = None
        if kept is not None and grad_losses is not None and grad_lse is None:
            factor = _common_factor(grad_losses, _relative(expected, targets, grad_losses.dtype), targets)
        if kept is not None and factor is not None:
            gradients = [None if gradient is None else gradient.mul_(factor) for gradient in kept]
        else:
            del kept
            zeros = torch.zeros(targets.shape, dtype=_accurate(hidden.dtype), device=targets.device)
            hard = zeros if grad_losses is None else torch.where(targets != IGNORED, grad_losses, 0.0)
            soft = hard if grad_lse is None else hard + torch.where(targets != IGNORED, grad_lse, 0.0)
            with torch.autocast("cpu" if hidden.is_meta else hidden.device.type, enabled=False):
                _, _, *gradients = _in_chunks(ctx, hidden, weight, bias, targets, soft, hard)
        inputs = (hidden, weight, bias)
        cast = [None if g is None else g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)]
        return *cast, None, None, None, None


def _in_chunks(ctx, hidden, weight, bias, targets, soft, hard) -> list[Tensor | None]:
    """Return losses, lse and requested gradients over all tokens. Weight and bias gradients are summed in float32."""
    wants = ctx.wants if soft is not None else (False, False, False)
    accurate = _accurate(hidden.dtype)
    cast_weight, cast_bias = weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
    if hidden.is_cuda and hidden.dtype.itemsize == 2:
        cast_weight, cast_bias = head_filled_up(cast_weight, cast_bias)
    losses, lse = (torch.empty(targets.shape, dtype=accurate, device=hidden.device) for _ in range(2))
    grad_hidden = torch.empty_like(hidden) if wants[0] else None
    grad_weight = torch.zeros_like(weight, dtype=accurate) if wants[1] else None
    grad_bias = torch.zeros_like(bias, dtype=accurate) if wants[2] else None
    size = _even_chunk(len(hidden), ctx.chunk)
    for start in range(0, len(hidden), size):
        rows = slice(start, min(start + size, len(hidden)))
        count = rows.stop - start
        padded = [_pad(part[rows], size, fill) for part, fill in ((hidden, 0), (targets, IGNORED))]
        scales = [None if scale is None else _pad(scale[rows], size, 0) for scale in (soft, hard)]
        results = ctx.step(padded[0], cast_weight, cast_bias, padded[1], *scales, *wants)
        losses[rows], lse[rows] = results[0][:count], results[1][:count]
        if grad_hidden is not None:
            grad_hidden[rows] = results[2][:count]
        for total, part in ((grad_weight, results[3]), (grad_bias, results[4])):
            if total is not None:
                total.add_(part[: len(total)])
    return [losses, lse, grad_hidden, grad_weight, grad_bias]


def head_filled_up(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad a head to weight (v', d) and bias (v',), with v' a multiple of 64. Padded tokens have bias -inf, so their
    logits are -inf. On a GPU, 16-bit matmuls with an odd v, such as 50,257, are three times slower.
    """
    missing = -len(weight) % 64
    if not missing:
        return weight, bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=-torch.inf)


def _even_chunk(tokens: int, chunk: int) -> int:
    """Return the common size of all chunks, a multiple of 16 rows.

    A compiler then sees one shape, and the last chunk has little padding.
    """
    parts = max(1, -(-tokens // chunk))
    return max(16, -(-tokens // (16 * parts)) * 16)


def _pad(rows: Tensor, size: int, fill: int) -> Tensor:
    missing = size - len(rows)
    if missing == 0:
        return rows
    return torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))


def _relative(expected: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the expected weights scaled to about 1, so that float16 gradients do not vanish. Ignored tokens have
    weight 0.

    The divisor is a power of two, so neither division nor multiplication rounds.
    """
    scale = torch.where(targets != IGNORED, expected.to(dtype), 0.0)
    largest = torch.cat((scale.abs(), scale.new_full((1,), torch.finfo(dtype).tiny))).amax()
    return scale / torch.exp2(largest.log2().ceil())


def _common_factor(arrived: Tensor, relative: Tensor, targets: Tensor) -> Tensor | None:
    """Return the scalar c with arrived = c · relative for all tokens, up to a relative error of 1e-6; None if no c
    fits.
    """
    arrived = torch.where(targets != IGNORED, arrived, 0.0)
    factor = (arrived.double() @ relative.double()) / relative.double().square().sum().clamp(min=1e-300)
    if arrived.is_meta or isinstance(arrived, FakeTensor):  # no values to compare
        return factor
    expected = factor * relative
    same = ((arrived - expected).abs() <= 1e-6 * expected.abs()).all()
    return factor if bool(same) else None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
