"""Attention filters compared with plain loops after their papers, and with published figures."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import greedy_scores_reference, kept_attention_reference, pairs_of, window_mask
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_filters import (
    a3_filter,
    dota_filter,
    elsa_filter,
    sanger_filter,
    spatten_filter,
    vitcod_filter,
)
from thrifty.kernels.attention_filters.keep_masks import (
    attend_kept,
    exact_scores,
    heads_of_keys,
    visible_pairs,
    with_one,
)
from thrifty.kernels.sparse_attention.block_grid import scattered_grid

CASE = {
    "t": st.integers(1, 12),
    "k": st.sampled_from([2, 3, 4, 8]),
    "sharing": st.integers(1, 2),
    "causal": st.booleans(),
    "seed": st.integers(0, 99),
}


def random_case(t: int, k: int, sharing: int, causal: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries and keys of one example, and the visible pairs of a row with padding at its end."""
    generator = torch.Generator().manual_seed(seed)
    q, key = (torch.randn(1, heads, t, k, generator=generator) for heads in (2 * sharing, 2))
    padding = torch.arange(t) < max(t - seed % 3, 1)
    return q, key, visible_pairs(t, t, causal, None if causal else padding[None, None, None])


def each_query(q: Tensor, k: Tensor, visible: Tensor):
    """Yield head, query, visible keys by index, and key head, for plain loops."""
    for h, i in itertools.product(range(q.shape[1]), range(q.shape[2])):
        seen = visible.expand(1, 1, q.shape[2], k.shape[2])[0, 0, i].nonzero().flatten().tolist()
        yield h, i, seen, h // (q.shape[1] // k.shape[1])


class TestKeepSets:
    @settings(max_examples=20, deadline=None)
    @given(**CASE)
    def test_attention_over_a_keep_set_is_exact_with_gradients(self, t, k, sharing, causal, seed):
        q, key, visible = random_case(t, k, sharing, causal, seed)
        q, key = q.double().requires_grad_(), key.double().requires_grad_()
        keep = with_one(torch.rand(1, 2 * sharing, t, t) < 0.4, exact_scores(q, key), visible)
        assert bool(keep.any(-1).all()) and not bool((keep & ~visible).any())
        pairs = []
        for output in (attend_kept(q, key, key, keep), kept_attention_reference(q, key, key, keep)):
            pairs.append((output, *torch.autograd.grad(output.square().sum(), (q, key))))
        torch.testing.assert_close(*pairs)

    @pytest.mark.parametrize("name", ["a3", "elsa", "sanger"])
    def test_filters_drop_keys_with_a_low_position_bias(self, name):
        q, key, visible = random_case(6, 4, 1, False, 0)
        bias = torch.tensor([0.0, 0.0, 0.0, -50.0, -50.0, -50.0]).expand(1, 1, 6, 6)
        if name == "a3":
            keep = a3_filter.a3_keep(q, key, 1.0, 5.0, visible, bias)
        elif name == "elsa":
            factors = elsa_filter.orthogonal_factors((4,), torch.Generator().manual_seed(0))
            keep = elsa_filter.elsa_keep(q, key, factors, 0.1, 0.0, visible, bias)
        else:
            keep = sanger_filter.sanger_keep(q, key, 0.01, 4, (1.0, 1.0), visible, bias)
        assert keep.any(-1).all() and not (keep[..., :3].any(-1) & keep[..., 3:].any(-1)).any()

    def test_few_bits_keep_the_position_bias(self):
        q, key, visible = random_case(6, 8, 1, False, 0)
        bias, shares = torch.linspace(-3, 3, 36).view(1, 1, 6, 6), spatten_filter.KeptShares(1.0, 1.0, 1.0)
        exact, rounded = (
            spatten_filter.cascade_attention(q, key, key, visible, None, shares, bits, bias=bias)[0] for bits in (0, 12)
        )
        torch.testing.assert_close(rounded, exact, rtol=0.01, atol=0.01)

    def test_a_mask_may_show_later_keys(self):
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
        mask[..., :2, :2] = True
        assert torch.equal(visible_pairs(4, 4, True, mask), mask)

    def test_additive_masks_and_unequal_lengths_are_refused(self):
        with pytest.raises(UsageError, match="require a boolean mask"):
            visible_pairs(2, 2, False, torch.zeros(1, 1, 2, 2))
        with pytest.raises(UsageError, match="requires as many queries as keys"):
            visible_pairs(1, 2, True)


class TestElsa:
    def test_bias_of_64_bit_hashes_equals_published_value(self):
        """ELSA, section 3: θ_bias = 0.127 at the 80th percentile, with orthogonal projections."""
        for sizes in ((4, 4, 4), (8, 8)):
            assert elsa_filter.angle_bias(sizes) == pytest.approx(0.127, abs=1e-3), sizes

    @settings(max_examples=20, deadline=None)
    @given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), seed=st.integers(0, 99))
    def test_projection_is_kronecker_product_of_orthogonal_matrices(self, sizes, seed):
        factors = elsa_filter.orthogonal_factors(sizes, torch.Generator().manual_seed(seed))
        whole = torch.ones(1, 1, dtype=torch.float64)
        for factor in factors:
            whole = torch.kron(whole, factor)
        x = torch.randn(5, math.prod(sizes), dtype=torch.float64)
        torch.testing.assert_close(elsa_filter.kronecker_project(x, factors), x @ whole.T, rtol=0, atol=1e-12)
        torch.testing.assert_close(whole @ whole.T, torch.eye(len(whole), dtype=torch.float64), rtol=0, atol=1e-12)

    def test_three_factors_of_4_need_768_multiplications(self):
        assert elsa_filter.factor_sizes(64) == (4, 4, 4)
        assert elsa_filter.multiplies((4, 4, 4)) == 768
        assert elsa_filter.multiplies((8, 8)) == 1024
        assert elsa_filter.multiplies((64,)) == 4096

    @given(width=st.integers(1, 300))
    def test_product_of_factor_sizes_is_the_width(self, width):
        assert math.prod(elsa_filter.factor_sizes(width)) == width

    @settings(max_examples=20, deadline=None)
    @given(**CASE, threshold=st.floats(-1, 1))
    def test_elsa_keep_set_equals_loop_over_pairs(self, t, k, sharing, causal, seed, threshold):
        q, key, visible = random_case(t, k, sharing, causal, seed)
        factors = elsa_filter.orthogonal_factors(elsa_filter.factor_sizes(k), torch.Generator().manual_seed(seed))
        actual = elsa_filter.elsa_keep(q, key, factors, 0.1, threshold, visible)
        for h, i, seen, g in each_query(q, key, visible):
            sims = {}
            for j in seen:
                bits = [elsa_filter.kronecker_project(x, factors) >= 0 for x in (q[0, h, i], key[0, g, j])]
                angle = math.pi / k * int((bits[0] != bits[1]).sum()) - 0.1
                sims[j] = float(key[0, g, j].norm()) * math.cos(max(angle, 0.0))
            limit = threshold * max(float(key[0, g, j].norm()) for j in seen)
            kept = {j for j in seen if sims[j] > limit}
            mine = set(actual[0, h, i].nonzero().flatten().tolist())
            unsure = {j for j in seen if abs(sims[j] - limit) < 1e-5}  # the last bit decides
            if kept - unsure:
                assert mine | unsure == kept | unsure
            else:
                assert mine <= kept | unsure | {j for j in seen if sims[j] > max(sims.values()) - 1e-5}
            assert mine

    @settings(max_examples=20, deadline=None)
    @given(**CASE, p=st.floats(0.1, 4))
    def test_threshold_samples_equal_loop(self, t, k, sharing, causal, seed, p):
        q, key, visible = random_case(t, k, sharing, causal, seed)
        actual = elsa_filter.threshold_samples(q, key, p, visible)
        for h, i, seen, g in each_query(q, key, visible):
            raw = [float(q[0, h, i] @ key[0, g, j]) for j in seen]
            weights = torch.tensor([r / math.sqrt(k) for r in raw]).softmax(0).tolist()
            if any(abs(w - p / len(seen)) < 1e-6 for w in weights):
                continue
            passing = [r for r, w in zip(raw, weights, strict=True) if w > p / len(seen)]
            largest = max(float(key[0, g, j].norm()) for j in seen)
            expected = (min(passing) if passing else max(raw)) / (float(q[0, h, i].norm()) * largest)
            assert float(actual[0, h, i]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


class TestA3:
    @settings(max_examples=40, deadline=None)
    @given(n=st.integers(1, 12), k=st.integers(1, 6), rounds=st.integers(1, 40), seed=st.integers(0, 999))
    def test_greedy_scores_equal_heaps_over_sorted_columns(self, n, k, rounds, seed):
        """Oracle 3: identical to the brute-force O(nd log nd) version."""
        generator = torch.Generator().manual_seed(seed)
        query, keys = torch.randn(k, generator=generator), torch.randn(n, k, generator=generator)
        everything = torch.ones(1, n, dtype=torch.bool)
        actual = a3_filter.greedy_scores(query[None], keys[None], torch.tensor([rounds]), everything)[0]
        torch.testing.assert_close(actual, greedy_scores_reference(query, keys, rounds))

    def test_hidden_keys_take_no_rounds_of_the_greedy_search(self):
        """Zeros in place of hidden keys would come before negative products, and leave the sum unchanged."""
        query, keys = torch.tensor([[1.0, 1.0]]), torch.tensor([[[-1.0, -2.0], [-3.0, 5.0], [9.0, 9.0]]])
        visible = torch.tensor([[True, True, False]])
        actual = a3_filter.greedy_scores(query, keys, torch.tensor([3]), visible)[0]
        expected = greedy_scores_reference(query[0], keys[0, :2], 3)
        torch.testing.assert_close(actual[:2], expected)
        zeros = greedy_scores_reference(query[0], keys[0] * visible[0][:, None], 3)
        assert not torch.equal(zeros[:2], expected) and actual[2] == 0

    @settings(max_examples=20, deadline=None)
    @given(**CASE, share=st.floats(0.05, 1), percent=st.floats(1, 90))
    def test_a3_keep_equals_loop(self, t, k, sharing, causal, seed, share, percent):
        q, key, visible = random_case(t, k, sharing, causal, seed)
        actual, scores = a3_filter.a3_keep(q, key, share, percent, visible), exact_scores(q, key)
        for h, i, seen, g in each_query(q, key, visible):
            rounds = math.ceil(np.float32(len(seen)) * np.float32(share))
            greedy = greedy_scores_reference(q[0, h, i], key[0, g][seen], rounds)  # without hidden keys
            candidates = [j for j, score in zip(seen, greedy, strict=True) if score > 0]
            mine = scores[0, h, i].tolist()
            if candidates:
                best = max(mine[j] for j in candidates)
                expected = {j for j in candidates if mine[j] >= best + math.log(percent / 100)}
            else:
                expected = {max(seen, key=lambda j: mine[j])}
            assert set(actual[0, h, i].nonzero().flatten().tolist()) == expected


class TestSanger:
    @settings(max_examples=20, deadline=None)
    @given(**CASE, threshold=st.floats(0.01, 0.6), bits=st.integers(2, 8))
    def test_sanger_keep_set_equals_loop_over_pairs(self, t, k, sharing, causal, seed, threshold, bits):
        q, key, visible = random_case(t, k, sharing, causal, seed)
        actual = sanger_filter.sanger_keep(q, key, threshold, bits, (0.9, 0.8), visible)

        def few_bits(x: Tensor, largest: float) -> Tensor:
            levels = 2 ** (bits - 1) - 1
            return (x / x.norm() * levels / largest).round().clamp(-levels, levels) * largest / levels

        for h, i, seen, g in each_query(q, key, visible):
            x = q[0, h, i]
            scores = [
                float(few_bits(x, 0.9) @ few_bits(y, 0.8) * x.norm() * y.norm()) / math.sqrt(k) for y in key[0, g, seen]
            ]
            weights = torch.tensor(scores).softmax(0).tolist()
            mine = set(actual[0, h, i].nonzero().flatten().tolist())
            kept = {j for j, w in zip(seen, weights, strict=True) if w > threshold}
            unsure = {j for j, w in zip(seen, weights, strict=True) if abs(w - threshold) < 1e-4}
            if kept - unsure:
                assert mine | unsure == kept | unsure
            assert mine

    def test_rounding_has_even_steps_and_straight_through_gradient(self):
        x = torch.linspace(-1.2, 1.2, 49, requires_grad=True)
        rounded = sanger_filter.quantized(x, 4, 1.0)
        assert sorted({round(v * 7) for v in rounded.tolist()}) == list(range(-7, 8))
        assert torch.equal(torch.autograd.grad(rounded.sum(), x)[0], torch.ones(49))


class TestDota:
    def test_projection_keeps_norms_on_average(self):
        projection = dota_filter.sparse_projection(64, 16, torch.Generator().manual_seed(0))
        assert set(projection.unique().tolist()) == {0.0, projection.max().item(), projection.min().item()}
        assert projection.max().item() == pytest.approx(math.sqrt(3 / 16))
        assert (projection != 0).float().mean().item() == pytest.approx(1 / 3, abs=0.05)
        x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
        assert ((x @ projection).norm(dim=1) / x.norm(dim=1)).square().mean().item() == pytest.approx(1, abs=0.15)

    @settings(max_examples=20, deadline=None)
    @given(**CASE, count=st.integers(1, 12))
    def test_every_query_keeps_equally_many_best_keys(self, t, k, sharing, causal, seed, count):
        q, key, visible = random_case(t, k, sharing, causal, seed)
        scores = exact_scores(q, key)
        keys = dota_filter.balanced_keys(scores, count, visible)
        keep = dota_filter.keep_of(keys, t)
        for h, i, seen, _ in each_query(q, key, visible):
            best = sorted(seen, key=lambda j: -scores[0, h, i, j])[:count]
            assert set(keep[0, h, i].nonzero().flatten().tolist()) == set(best)
        if not causal:  # all queries keep equally many
            assert len(set(keep.sum(-1).flatten().tolist())) == 1

    def test_detector_loss_is_mean_square_and_trains_the_detector(self):
        generator = torch.Generator().manual_seed(0)
        x, projection = torch.randn(2, 5, 8, generator=generator), dota_filter.sparse_projection(8, 4, generator)
        weights = [torch.randn(2, 4, 4, generator=generator).double().requires_grad_() for _ in range(2)]
        exact, visible = torch.randn(2, 2, 5, 5, generator=generator).double(), visible_pairs(5, 5, True)

        def loss(w_q: Tensor, w_k: Tensor) -> Tensor:
            return dota_filter.detector_loss(
                dota_filter.detected_scores(x.double(), projection.double(), w_q, w_k), exact, visible
            )

        estimated = dota_filter.detected_scores(x.double(), projection.double(), *weights).detach()
        pairs = [(h, i, j) for h in range(2) for i in range(5) for j in range(i + 1)]
        for b in range(2):
            reference = sum(float(estimated[b][at] - exact[b][at]) ** 2 for at in pairs) / len(pairs)
            assert loss(*weights)[b].item() == pytest.approx(reference, rel=1e-5)
        gradients = torch.autograd.grad(loss(*weights).sum(), weights)
        step = [w.detach() - 1e-4 * gradient for w, gradient in zip(weights, gradients, strict=True)]
        assert float(loss(*step).sum()) < float(loss(*(w.detach() for w in weights)).sum())


class TestVitcod:
    @settings(max_examples=30, deadline=None)
    @given(t=st.integers(1, 12), cut=st.floats(0.05, 0.99), seed=st.integers(0, 99))
    def test_informative_pairs_keep_largest_entries_up_to_the_cut(self, t, cut, seed):
        average = torch.randn(t, t, generator=torch.Generator().manual_seed(seed)).double().mul(2).softmax(-1)
        actual = vitcod_filter.informative_pairs(average, cut)
        for i in range(t):
            kept, total = {0}, 0.0
            for j in sorted(range(t), key=lambda j: -average[i, j]):
                if total >= cut:
                    break
                kept.add(j)
                total += float(average[i, j])
            assert set(actual[i].nonzero().flatten().tolist()) == (kept if i else set(range(t)))

    def test_autoencoder_encodes_to_half_of_the_heads(self):
        x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
        assert vitcod_filter.encode_heads(3) == 2
        encode, decode = torch.randn(2, 3), torch.randn(3, 2)
        actual = vitcod_filter.autoencode_heads(x, encode, decode)
        by_layers = (x.permute(0, 2, 3, 1) @ encode.T @ decode.T).permute(0, 3, 1, 2)
        torch.testing.assert_close(actual, by_layers)
        expected = [float((x[b] - actual[b]).norm()) for b in range(2)]
        torch.testing.assert_close(vitcod_filter.autoencoder_loss(x, actual), torch.tensor(expected))


class TestSpatten:
    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(1, 12), blocks=st.integers(1, 6), seed=st.integers(0, 99))
    def test_pruned_tokens_never_return(self, n, blocks, seed):
        generator = torch.Generator().manual_seed(seed)
        total, alive = torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool)
        for block in range(blocks):
            total = total + torch.rand(1, n, generator=generator)
            share = spatten_filter.pruned_share(block, blocks, 0.5, 0.4, spatten_filter.TOKENS_SPARED)
            keep = max(round((1 - share) * n), 1)
            before, alive = alive, spatten_filter.cascade(total, alive, keep)
            assert not bool((alive & ~before).any())
            ranked = sorted(before[0].nonzero().flatten().tolist(), key=lambda j: -total[0, j])
            assert set(alive[0].nonzero().flatten().tolist()) == set(ranked[:keep])

    def test_pruned_share_rises_linearly_around_the_average(self):
        shares = [spatten_filter.pruned_share(block, 20, 0.4, 0.3, 0.15) for block in range(20)]
        assert shares[:3] == [0.0] * 3
        assert shares[3] + shares[-1] == pytest.approx(0.8)
        assert np.allclose(np.diff(shares[3:]), (shares[-1] - shares[3]) / 16)

    def test_low_bits_are_used_for_flat_softmax_with_bounded_error(self):
        """SpAtten, section 4.2: an error ds of a score changes a probability by less than ds."""
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 2, 40, 16, generator=generator)
        visible = visible_pairs(40, 40, False)
        actual, again = spatten_filter.progressive_probabilities(q, k, visible, 6, 4)
        exact = exact_scores(q, k).softmax(-1)
        assert bool(again.any()) and not bool(again.all())
        coarse = [spatten_filter.high_bits(x, 6, 4)[1] for x in (q, k)]
        error = (exact_scores(*coarse) - exact_scores(q, k)).abs().amax()
        assert float((actual - exact).abs().max()) < float(error)
        fine = [spatten_filter.high_bits(x, 6, 4)[0] for x in (q, k)]
        torch.testing.assert_close(actual[again], exact_scores(*fine).softmax(-1)[again])

    def test_local_pruning_keeps_largest_weights_of_each_query(self):
        probabilities = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
        kept = spatten_filter.highest(probabilities, 2)
        assert torch.equal(kept.sum(-1), torch.full((2, 3, 5), 2))
        assert bool((probabilities.masked_fill(~kept, 9).amin(-1) >= probabilities.masked_fill(kept, 0).amax(-1)).all())


def test_window_and_scattered_grids_follow_their_rules():
    window = window_mask(7, 2, first=1, causal=True)
    assert all(bool(window[i, j]) == (j <= i and (i - j < 2 or j < 1 or i < 1)) for i in range(7) for j in range(7))
    scattered = pairs_of(scattered_grid(8, 2, 0, 1, 1, False), 8, 8)[0, 0]
    assert bool(scattered[:2].all()) and bool(scattered[:, :2].all())
    assert [int(row.sum()) for row in scattered[2:]] == [6] * 6  # the first block, its own, and a random one


def test_shared_heads_repeat_keys_of_their_group():
    keys = torch.randn(1, 2, 3, 4)
    assert torch.equal(heads_of_keys(keys, 4)[:, 3], keys[:, 1])
