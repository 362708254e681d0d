"""Quantized moments of matrices divided by columns (tensor parallelism): storage, and resume on any mesh."""

from pathlib import Path
from typing import Any

import moment_work as work
import numpy as np
import pytest
import torch
from rank_processes import on_ranks
from worker_results import computed_once, shared_folder

FORMS = {"int8": torch.uint8, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder() -> Path:
    (path := shared_folder() / "moment-checkpoints").mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module")
def of_one(folder: Path) -> dict[str, Any]:
    return computed_once("moments, one", lambda: {form: work.saved(form, folder / f"of one, {form}") for form in FORMS})


@pytest.fixture(scope="module")
def two(folder: Path, of_one: dict[str, Any]) -> list[dict[str, Any]]:
    return computed_once("moments, two", lambda: on_ranks(2, work.on_two, folder))


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Check equality up to half the widest quantization step of a block."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=0.008 * abs(value).max(), err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_moments_of_divided_rows_are_quantized(two: list[dict[str, Any]], form: str) -> None:
    for rank in two:
        for name, dtype in rank["saved"][form]["dtypes"].items():
            is_divisible = form == "bfloat16" or "prime" not in name
            assert dtype == (FORMS[form] if is_divisible else torch.float32), name


@pytest.mark.parametrize("name", work.MODELS)
def test_moments_of_real_models_are_quantized(two: list[dict[str, Any]], name: str) -> None:
    for rank in two:
        found = rank["models"][name]
        matrices = [moment for moment, value in found["numbers"].items() if value.ndim == 2]
        assert len(matrices) > 16
        assert {found["dtypes"][moment] for moment in matrices} == {torch.uint8}


@pytest.mark.parametrize("form", FORMS)
def test_resume_on_the_same_mesh_is_bit_identical(two: list[dict[str, Any]], form: str) -> None:
    for rank in two:
        for name, value in rank["resumed"][form]["stored"].items():
            np.testing.assert_array_equal(rank["again"][form]["stored"][name], value, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_one_process_resumes_from_two_ranks(
    two: list[dict[str, Any]], folder: Path, of_one: dict[str, Any], form: str
) -> None:
    found = work.loaded(form, folder / f"of two, {form}")
    assert found["dtypes"] == of_one[form]["dtypes"]
    assert_close(found["numbers"], two[0]["saved"][form]["numbers"])


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_resume_from_one_process(two: list[dict[str, Any]], of_one: dict[str, Any], form: str) -> None:
    for rank in two:
        assert rank["of one"][form]["dtypes"] == rank["saved"][form]["dtypes"]
        assert_close(rank["of one"][form]["numbers"], of_one[form]["numbers"])


def test_equal_blocks_have_equal_quantized_values(
    two: list[dict[str, Any]], folder: Path, of_one: dict[str, Any]
) -> None:
    found = work.loaded("int8", folder / "of two, int8")["stored"]
    for name in ("optimizer/scale_by_adam.mean/two_blocks", "optimizer/scale_by_adam.mean.scales/two_blocks"):
        np.testing.assert_array_equal(found[name], two[0]["saved"]["int8"]["stored"][name])


@pytest.mark.slow
def test_four_ranks_and_one_process_resume_each_other(folder: Path) -> None:
    of_one = work.saved_model([], folder / "of one, model")
    four = on_ranks(4, work.on_four, folder)
    found = work.loaded_model([], folder / "of four")
    for saved, loaded in four:
        assert torch.uint8 in saved["dtypes"].values()
        assert_close(found["numbers"], saved["numbers"])
        assert_close(loaded["numbers"], of_one["numbers"])
