"""Flash attention in Triton: on a GPU if there is one, otherwise in Triton's interpreter if it is installed."""

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
def test_values_and_gradients_equal_torch_attention() -> None:
    chosen = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "flash_work"], cwd=TESTS, env=os.environ | chosen, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "checked 7" in done.stdout
