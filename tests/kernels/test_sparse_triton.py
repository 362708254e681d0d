"""Block-sparse products in Triton: on a GPU if there is one, otherwise in Triton's interpreter if it is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1] / "support"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_products_equal_dense_products() -> None:
    chosen = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "triton_work"], cwd=TESTS, env=os.environ | chosen, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "checked 12" in done.stdout
