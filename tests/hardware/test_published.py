"""What was published about accelerators, beside what is simulated: every row, its grade, and how far off it may be."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from thrifty.cli.simulate import command
from thrifty.cli.simulate_paper_page import place
from thrifty.hardware.published import OURS, Claim, claims

EXACT = ("elsa_base", "a3_period", "a3_latency", "sanger_model_1", "sanger_model_2", "spatten_area", "vitcod_linear")
LOOSE = ("sanger_rate", "spatten_rate", "a3_rate")
"""Rates that the papers divide by each other's; ours are of one mask, and no reproduction."""
CLAIMS = claims()


def test_every_row_has_its_simulation_and_no_figure_from_memory_is_a_target() -> None:
    assert [claim.name for claim in CLAIMS] == list(OURS)
    assert all(claim.grade in "PRXS" and claim.gap and claim.published > 0 for claim in CLAIMS)


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.name not in LOOSE], ids=lambda claim: claim.name)
def test_ours_is_as_near_as_is_claimed(claim: Claim) -> None:
    near = 0.001 if claim.name in EXACT else 0.05 if claim.name == "outerspace_traffic" else 0.3
    assert claim.simulate() == pytest.approx(claim.published, rel=near)


def test_rates_of_one_mask_are_said_to_be_no_reproduction() -> None:
    rates = {claim.name: claim for claim in CLAIMS if claim.name in LOOSE}
    assert rates["sanger_rate"].simulate() > rates["spatten_rate"].simulate()  # on scattered pairs
    assert "made-up mask" in rates["sanger_rate"].gap


def test_a_point_stands_where_its_ratio_is_and_at_the_end_beyond_the_axis() -> None:
    assert place(1.0) == pytest.approx((place(0.5) + place(2.0)) / 2)
    assert place(9.0) == place(2.0) > place(1.4) > place(0.7) > place(0.1) == place(0.5)


def test_the_command_prints_each_and_counts_masks_by_the_released_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = CLAIMS[:4]
    monkeypatch.setattr("thrifty.hardware.published.claims", lambda: few)
    pruned = np.ones((2, 3, 60, 60), dtype=bool)
    pruned[..., range(60), range(60)] = False
    pruned[..., :5] = False
    np.save(tmp_path / "masks.npy", pruned)
    words = ["paper", "--vitcod-masks", str(tmp_path / "masks.npy"), "--html", str(tmp_path / "page.html")]
    page = CliRunner().invoke(command, words, catch_exceptions=False).stdout
    found = json.loads(CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False).stdout)
    assert len(found["claims"]) == len(few) and all(claim.quantity in page for claim in few)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "http://" not in html and "https://" not in html and "<script" not in html and "default-src 'none'" in html
    assert html.count("<circle") == len(few) and html.count("<tr>") == len(few) + 1
    for row in found["claims"]:
        assert row["quantity"] in html and f"{row['simulated'] / row['published']:.3f}" in html
        assert row["off"] == pytest.approx(row["simulated"] / row["published"] - 1)
    released = found["vitcod"]["as released"]
    assert released["load"] == 2 * (4 * 60 + 3) and "every head's own mask" in page
    assert released["total"] == max(released["load"], released["decode"] + released["compute"])
