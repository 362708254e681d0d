"""What only a GPU can show: such tests are skipped where torch sees none."""

import pytest
import torch

GPU = torch.device("cuda")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
