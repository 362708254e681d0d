"""Ranks save and load one checkpoint together, for any number of ranks and any sharding, without a hang."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_worlds import assert_same, state_of
from rank_work import (
    SECONDS,
    die_in_a_save,
    fail_everywhere,
    load_sharded,
    no_one_load,
    on_ranks,
    one_rank_holds_something_odd,
    save_a_shard_alone,
    save_on_two_axes,
    save_sharded,
    whole,
    whole_tensors,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from thrifty.core.errors import ThriftyError
from thrifty.training.checkpoint import load, save
from thrifty.training.sharded_safetensors import StoredTensorBoxes


@pytest.mark.parametrize(("size", "dim"), [(2, 0), (2, 1), (3, 0)])
def test_one_process_loads_the_checkpoint_of_ranks(size: int, dim: int, tmp_path: Path) -> None:
    listings = on_ranks(size, save_sharded, tmp_path / "checkpoints", dim)
    pieces = [f"tensors-{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)]
    assert listings == [["manifest.json", "state.json", *pieces]] * size
    loaded = load(tmp_path / "checkpoints")
    assert loaded.scalars == {"rank": 0}
    assert_same(loaded.tensors, whole(whole_tensors()))


def test_ranks_load_the_checkpoint_of_one_process(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 5, whole(whole_tensors()), {"rank": 0})
    assert on_ranks(2, load_sharded, tmp_path / "checkpoints", 0) == ["5 {'rank': 0} []"] * 2


@pytest.mark.parametrize(("size", "dim"), [(3, 0), (2, 1)])
def test_other_shardings_load_the_checkpoint_of_two_ranks(size: int, dim: int, tmp_path: Path) -> None:
    on_ranks(2, save_sharded, tmp_path / "checkpoints", 0)
    assert on_ranks(size, load_sharded, tmp_path / "checkpoints", dim) == ["5 {'rank': 0} []"] * size


def test_a_tensor_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    on_ranks(2, save_sharded, tmp_path / "checkpoints", 0)
    first, _ = sorted((tmp_path / "checkpoints" / "step-00000005").glob("*.safetensors"))
    stored = StoredTensorBoxes([first])
    assert_same({"plain": stored.full("plain")}, {"plain": whole(whole_tensors())["plain"]})
    with pytest.raises(ThriftyError, match="contains 12 of the 24 required values of 'even'"):
        stored.full("even")


def test_each_value_is_stored_once(tmp_path: Path) -> None:
    on_ranks(2, save_sharded, tmp_path / "checkpoints", 0)
    one = save(tmp_path / "alone", 5, whole(whole_tensors()), {"rank": 0})
    together = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / "step-00000005").glob("*.safetensors"))
    headers = 4096
    assert together <= one.bytes + headers


def test_a_partly_replicated_tensor_is_stored_once(tmp_path: Path) -> None:
    on_ranks(4, save_on_two_axes, tmp_path / "checkpoints")
    assert_same(load(tmp_path / "checkpoints").tensors, whole_tensors())
    pieces = (tmp_path / "checkpoints" / "step-00000005").glob("*.safetensors")
    assert sorted(path.name[8:13] for path in pieces) == ["00000", "00001"]


def test_torch_distributed_checkpoint_reads_the_same_files(tmp_path: Path) -> None:
    on_ranks(2, save_sharded, tmp_path / "checkpoints", 0)
    expected = {name: tensor for name, tensor in whole(whole_tensors()).items() if tensor.numel()}
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    reader = HuggingFaceStorageReader(str(tmp_path / "checkpoints" / "step-00000005"))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert_same(into, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_error_on_one_rank_is_raised_on_all(failing: int, tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 5, *state_of(5))
    one, other = on_ranks(2, fail_everywhere, tmp_path / "checkpoints", failing)
    assert one == other
    assert sum(message != "" for message in one) >= len(one) - 4
    assert all(f"rank {failing}: " in message for message in one if message)
    assert_same(load(tmp_path / "checkpoints").tensors, whole(whole_tensors()))


def test_a_state_refused_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    one, other = on_ranks(2, one_rank_holds_something_odd, tmp_path / "checkpoints")
    assert one == other
    assert "UsageError: rank 1: tensor 'odd' cannot be stored" in one


def test_a_rank_that_dies_in_a_save_ends_the_others(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 5, *state_of(5))
    survivor, dead = on_ranks(2, die_in_a_save, tmp_path / "checkpoints")
    assert dead is None
    message, seconds = survivor
    assert "lost contact with the other ranks" in message
    assert seconds < SECONDS
    assert_same(load(tmp_path / "checkpoints").tensors, state_of(5)[0])


def test_all_ranks_skip_the_same_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 5, whole(whole_tensors()), {"rank": 0})
    newest = save(tmp_path / "checkpoints", 6, *state_of(6)).path
    (newest / "state.json").write_text("{}")
    one, other = on_ranks(2, load_sharded, tmp_path / "checkpoints", 0)
    assert one == other
    assert one.startswith("5 {'rank': 0} ['checkpoint step-00000006 is damaged: state.json has 2 bytes")


def test_a_missing_or_swapped_shard_is_damage(tmp_path: Path) -> None:
    on_ranks(2, save_sharded, tmp_path / "checkpoints", 0)
    checkpoint = tmp_path / "checkpoints" / "step-00000005"
    first, second = sorted(checkpoint.glob("*.safetensors"))
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ThriftyError, match="tensors-00001-of-00002"):
        load(tmp_path / "checkpoints")
    second.unlink()
    with pytest.raises(ThriftyError, match=r"tensors-00001-of-00002.safetensors is missing"):
        load(tmp_path / "checkpoints")
    second.write_bytes(content)
    assert_same(load(tmp_path / "checkpoints").tensors, whole(whole_tensors()))


def test_a_missing_checkpoint_is_reported_on_all_ranks(tmp_path: Path) -> None:
    one, other = on_ranks(2, no_one_load, tmp_path / "checkpoints")
    assert one == other
    assert one.startswith("IntegrityError: rank 0: there is no checkpoint")


def test_a_shard_is_never_read_as_the_whole(tmp_path: Path) -> None:
    messages = on_ranks(2, save_a_shard_alone, tmp_path / "checkpoints")
    assert all("cannot be saved by one rank" in message for message in messages)
