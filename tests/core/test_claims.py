"""Claims: each is made by a technique, and none can be misspelt."""

from typing import Any

import pytest

from thrifty import techniques
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.technique import Technique


def test_every_claim_is_made_by_a_technique_so_that_no_clash_waits_for_nobody() -> None:
    claimed = {claim for name in techniques.names() for claim in techniques.find(name).claims}
    assert claimed == set(Claim) - {Claim.TRAINED_START}  # which the run makes


@pytest.mark.parametrize("attributes", [{"claims": frozenset({"optimiser"})}, {"clashes": {"weight mask": "a reason"}}])
def test_a_claim_that_does_not_exist_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"there is no claim '(optimiser|weight mask)'"):
        type("Misspelt", (Technique,), attributes)
