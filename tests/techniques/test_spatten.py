"""Pruning of SpAtten: kept tokens of each block, causality, and the state for recomputed blocks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_runs import PIXELS, image_run, tiny_vit
from tiny_runs import losses, plain_run, run_through, technique, with_optimizer
from torch import Tensor

from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError, UsageError
from thrifty.kernels.attention_filters.keep_masks import visible_pairs
from thrifty.kernels.attention_filters.spatten_filter import CascadeState, KeptShares, cascade_attention
from thrifty.modeling.attention_cores import ATTENTION_SITES
from thrifty.techniques.large_batch.gradient_accumulation import GradientAccumulation
from thrifty.techniques.memory.recompute import Recompute

NAME = "attention.spatten"


def random_tensors(*shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def random_blocks(
    depth: int, shape: tuple[int, ...], shares: list[KeptShares], causal: bool, seed: int = 0
) -> tuple[list[list[Tensor]], list[Tensor], list[CascadeState]]:
    """Return queries, keys and values of some blocks, and the output and cascade state of each."""
    inputs = [random_tensors(*shape, seed=seed + block) for block in range(depth)]
    visible, standing = visible_pairs(shape[2], shape[2], causal), None
    outputs, standings = [], []
    for (q, k, v), keep in zip(inputs, shares, strict=True):
        output, standing = cascade_attention(3 * q, k, v, visible, standing, keep)
        outputs.append(output)
        standings.append(standing)
    return inputs, outputs, standings


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(scores, key=lambda j: -scores[j])[: max(count, 1)])


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(2, 9), heads=st.integers(1, 4), kept=st.floats(0.2, 1), values=st.floats(0.2, 1),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_an_encoder_equals_attention_without_pruned_tokens(tokens, heads, kept, values, seed):
    """As in the paper, pruned tokens leave the sequence with their queries, keys and values."""
    shares = [KeptShares(1.0, 1.0, values), KeptShares(kept, kept, values), KeptShares(kept**2, kept**2, values)]
    inputs, actual, _ = random_blocks(3, (1, heads, tokens, 4), shares, causal=False, seed=seed)
    left, working = list(range(tokens)), list(range(heads))
    of_tokens, of_heads = dict.fromkeys(left, 0.0), dict.fromkeys(working, 0.0)
    for (q, k, v), output, keep in zip(inputs, actual, shares, strict=True):
        left = best({j: of_tokens[j] for j in left}, round(keep.tokens * tokens))
        working = best({h: of_heads[h] for h in working}, round(keep.heads * heads))
        for head in range(heads):
            if head not in working:
                assert not bool(output[0, head, left].any())  # a removed token selects heads for itself alone
                continue
            weights = (3 * q[0, head, left] @ k[0, head, left].T / 2).softmax(-1)
            for row, i in enumerate(left):
                taken = best(dict(enumerate(weights[row].tolist())), round(keep.values * len(left)))
                expected = sum(weights[row, place] * v[0, head, left[place]] for place in taken)
                torch.testing.assert_close(output[0, head, i], expected, rtol=1e-6, atol=1e-9)
                of_heads[head] += float(expected.abs().sum())
                for place, j in enumerate(left):
                    of_tokens[j] += float(weights[row, place])


def test_a_decoder_query_prunes_by_its_own_past() -> None:
    shares = [KeptShares(1.0, 1.0, 1.0), KeptShares(0.6, 0.5, 0.7), KeptShares(0.3, 0.5, 0.7)]
    inputs, outputs, standings = random_blocks(3, (2, 4, 8, 4), shares, causal=True)
    for end in range(1, 9):
        standing = None
        for (q, k, v), keep, output, whole in zip(inputs, shares, outputs, standings, strict=True):
            past = (x[:, :, :end] for x in (3 * q, k, v))
            alone, standing = cascade_attention(*past, visible_pairs(end, end, True), standing, keep)
            torch.testing.assert_close(alone, output[:, :, :end])
            assert torch.equal(standing.alive, whole.alive[:, :end, :end])
    assert int(standings[-1].alive[:, -1].sum(-1).max()) == round(0.3 * 8)
    assert bool(standings[-1].alive.diagonal(dim1=1, dim2=2).all())


@pytest.mark.parametrize("latest", [0.0, 0.5, 1.0])
def test_a_share_of_kept_tokens_are_the_latest(latest: float) -> None:
    shares = [KeptShares(1.0, 1.0, 1.0), KeptShares(0.7, 1.0, 1.0, latest), KeptShares(0.4, 1.0, 1.0, latest)]
    *_, last = random_blocks(3, (2, 4, 20, 4), shares, causal=True)[2]
    for query in range(20):
        kept = max(round(0.4 * (query + 1)), 1)
        near = max(round(latest * kept), 1)
        assert bool(last.alive[:, query, query + 1 - near : query + 1].all())
        assert last.alive[:, query].sum(-1).tolist() == [kept] * 2


def test_the_latest_tokens_are_kept_in_decoders_only() -> None:
    for run, latest in ((plain_run, 0.5), (image_run, 0.0)):
        model = technique(NAME, from_step=0).model(run().build())
        assert [place.module.core.shares(None).latest for place in ATTENTION_SITES.of(model)][1:] == [latest] * 3


def test_removed_and_masked_tokens_never_return() -> None:
    q, k, v = random_tensors(2, 2, 6, 4)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., 4:] = False
    visible, standing = visible_pairs(6, 6, False, mask), None
    for share in (1.0, 0.5, 0.9):
        before = standing
        _, standing = cascade_attention(q, k, v, visible, before, KeptShares(share, share, 1.0))
        assert before is None or not bool((standing.alive & ~before.alive).any())
        assert before is None or not bool((standing.working & ~before.working).any())
        assert not bool(standing.alive[0, :, 4:].any())
    assert standing.alive[0, 0].sum() == 2 and standing.alive[1, 0].sum() == 3  # half of the visible tokens of each


def test_gradients_come_from_kept_tokens() -> None:
    q, k, v = (x.requires_grad_() for x in random_tensors(1, 2, 5, 3))
    visible = visible_pairs(5, 5, True)
    _, before = cascade_attention(q, k, v, visible, None, KeptShares(1.0, 1.0, 1.0))

    def attend(*qkv: Tensor) -> Tensor:
        return cascade_attention(*qkv, visible, before, KeptShares(0.6, 0.5, 0.5))[0]

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_rounded_scores_have_the_gradients_of_exact_scores() -> None:
    q, k, v = (x.requires_grad_() for x in random_tensors(1, 2, 40, 16))
    visible, keep = visible_pairs(40, 40, True), KeptShares(1.0, 1.0, 1.0)
    exact, rounded = (cascade_attention(q, k, v, visible, None, keep, bits)[0] for bits in (0, 4))
    assert 1e-4 < float((exact - rounded).detach().abs().max()) < 0.5
    actual, expected = (torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (rounded, exact))
    torch.testing.assert_close(actual[:2], expected[:2])


def test_shares_of_blocks_equal_the_line_of_the_paper() -> None:
    one = technique(NAME, tokens=0.6, heads=0.8, values=0.5, spread=0.2)
    kept = [one.kept_shares(block, 20) for block in range(20)]
    assert [each.tokens for each in kept[:3]] == [1.0] * 3 and [each.heads for each in kept[:6]] == [1.0] * 6
    assert [kept[3].tokens, kept[-1].tokens] == pytest.approx([0.7, 0.5])
    assert [kept[6].heads, kept[-1].heads] == pytest.approx([0.9, 0.7])
    assert {each.values for each in kept} == {0.5}
    assert [one.kept_shares(block, 2).heads < 1 for block in range(2)] == [False, True]
    assert {technique(NAME, tokens=1.0).kept_shares(block, 20).tokens for block in range(20)} == {1.0}


def test_no_pruning_equals_plain_attention() -> None:
    whole = technique(NAME, tokens=1.0, heads=1.0, values=1.0)
    for run in (plain_run, image_run):
        actual, _ = run_through(run(), with_optimizer([whole]), 4)
        plain, _ = run_through(run(), with_optimizer([]), 4)
        assert losses(actual) == pytest.approx(losses(plain), rel=1e-5)


def test_a_decoder_does_not_see_later_tokens() -> None:
    model = technique(NAME).model(plain_run().build()).eval()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10:] = 7
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_each_example_is_pruned_separately() -> None:
    model = technique(NAME).model(tiny_vit()).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([model(image[None]) for image in PIXELS]), model(PIXELS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["every", "sqrt", "selective"])
def test_recomputed_blocks_prune_the_same_tokens(schedule: Any) -> None:
    """Micro-batches of gradient accumulation must not receive each other's state."""
    chosen = with_optimizer([technique(NAME), GradientAccumulation(micro_batches=2)])
    straight, expected = run_through(plain_run(), chosen, 4)
    again, state = run_through(plain_run(), [*chosen, Recompute(schedule=schedule)], 4)
    assert losses(again) == losses(straight)
    assert all(torch.equal(x, state.tensors()[name]) for name, x in expected.tensors().items())


def test_micro_batches_prune_like_the_whole_batch() -> None:
    together, _ = run_through(plain_run(), with_optimizer([technique(NAME)]), 4)
    apart, _ = run_through(plain_run(), with_optimizer([technique(NAME), GradientAccumulation(micro_batches=4)]), 4)
    assert losses(apart) == pytest.approx(losses(together), rel=1e-5)


def test_two_forward_passes_are_refused_with_recompute() -> None:
    run = compose(plain_run(), with_optimizer([technique(NAME, from_step=0), Recompute()]), 2)
    model = run.start().model
    assert model is not None
    tokens = torch.arange(16)[None]
    both = model(tokens).sum() + model(tokens + 1).sum()
    with pytest.raises(RefusedError, match="after 2 forward passes"):
        both.backward()
    with torch.no_grad():
        model(tokens)
    model(tokens).sum().backward()  # a pass without gradients does not count


def test_another_number_of_keys_is_refused() -> None:
    model = technique(NAME).model(tiny_vit())
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)
    with pytest.raises(UsageError, match="3 queries and 5 keys"):
        ATTENTION_SITES.of(model)[0].module.core(q, k, v)
