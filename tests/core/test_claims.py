"""Every claim belongs to a technique, and unknown claims are refused."""

from typing import Any

import pytest

from thrifty import techniques
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.technique import Technique


def test_every_claim_belongs_to_a_technique() -> None:
    claimed = {claim for name in techniques.names() for claim in techniques.find(name).claims}
    assert claimed == set(Claim) - {Claim.TRAINED_START}  # the run makes this claim


@pytest.mark.parametrize("attributes", [{"claims": frozenset({"optimiser"})}, {"clashes": {"weight mask": "a reason"}}])
def test_unknown_claim_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"there is no claim '(optimiser|weight mask)'"):
        type("Misspelt", (Technique,), attributes)
