"""Mark of tests that require a GPU; they are skipped if torch has none."""

import pytest
import torch

GPU = torch.device("cuda")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
