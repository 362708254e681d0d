"""Pipeline parallelism fits the seams: GPipe as a technique computes the single-process run."""

from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import Tensor

from end_to_end.two_stage_pipeline import STAGES, on_one_rank, trained


def test_gpipe_over_two_ranks_is_the_single_process_run(tmp_path: Path) -> None:
    mp.spawn(on_one_rank, (str(tmp_path),), nprocs=STAGES)
    records, expected, loss = trained([])
    gathered: dict[str, Tensor] = {}
    for rank in range(STAGES):
        found, parameters = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(
            found["losses"], torch.tensor([record.loss for record in records]), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(found["held_out"], torch.tensor(loss), rtol=1e-5, atol=0)
        assert found["tokens"].tolist() == [record.tokens for record in records]
        assert parameters and not parameters.keys() & gathered.keys()
        gathered |= parameters
    assert gathered.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(gathered[name], value, rtol=1e-5, atol=1e-5)
