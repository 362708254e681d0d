"""Tickets on real ranks: equal masks, decisions and runs as in one process."""

import numpy as np
import pytest
from rank_processes import on_ranks
from ticket_work import trained_with
from tiny_runs import technique

from thrifty.core.errors import UsageError

TICKETS = {"early bird": ("sparsity.early_bird", {"latest": 3}), "ticket": ("sparsity.mask_from_file", {})}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dividing", ["parallelism.shard", "parallelism.replicate"])
@pytest.mark.parametrize("case", TICKETS)
def test_two_ranks_train_the_same_ticket(case: str, dividing: str) -> None:
    name, settings = TICKETS[case]
    chosen = [technique(name, **settings), technique("optimizers.adamw")]
    expected_losses, expected, decided = trained_with(chosen)
    for losses, found, log in on_ranks(2, trained_with, [*chosen, technique(dividing)]):
        assert log == decided
        assert losses == pytest.approx(expected_losses, rel=1e-9)
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            assert found[name].shape == parameter.shape
            np.testing.assert_allclose(found[name], parameter, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dividing", ["parallelism.tensor", "parallelism.pipeline"])
def test_early_bird_refuses_tensor_and_pipeline_parallelism(dividing: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        trained_with([technique("sparsity.early_bird"), technique("optimizers.adamw"), technique(dividing)])
