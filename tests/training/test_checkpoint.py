"""Checkpoints are read back bit for bit, and anything else is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worlds import assert_same, bits, names, replace_state, reseal, state_of
from safetensors.torch import load_file

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.training.checkpoint import fill, find, load, save
from thrifty.training.checkpoint_index import best, checkpoints
from thrifty.training.checkpoint_manifest import NewerFormatError

STORABLE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool,
]  # fmt: skip


def raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor with any bit pattern, including nan and infinities."""
    size = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return content.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_every_dtype_and_shape_is_read_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = [(), (1,), (0,), (3, 0, 2), (5,), (3, 5, 7)]
    tensors = {f"tensor {shape}": raw(dtype, *shape) for shape in shapes}
    save(tmp_path, 3, tensors, {})
    assert_same(load(tmp_path).tensors, tensors)


def test_unusual_layouts_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    table, odd = torch.randn(6, 4), torch.randn(3, dtype=torch.complex64)
    tensors = {
        "head": table,
        "embedding": table,
        "view of the same storage": table[1:3],
        "transposed": table.T,
        "strided": table[::2, ::3],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "conjugated": odd.conj(),
        "negated": odd.conj().imag,
        "odd bytes": torch.ones(3, dtype=torch.uint8),
        "name with \"quotes\", ünïcode and a / slash": torch.randn(2),
    }  # fmt: skip
    expected = {name: tensor.detach().resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()}
    save(tmp_path, 3, tensors, {})
    loaded = load(tmp_path).tensors
    assert_same(loaded, expected)
    loaded["head"].zero_()
    assert_same({"embedding": loaded["embedding"]}, {"embedding": expected["embedding"]})
    assert_same(load(tmp_path).tensors, expected)


def test_tensors_are_readable_by_any_safetensors_reader(tmp_path: Path) -> None:
    tensors, _ = state_of(1)
    saved = save(tmp_path, 1, tensors, {})
    assert_same(load_file(saved.path / "tensors.safetensors"), tensors)


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    tensors = {f"{place} {dtype}": raw(dtype, 3) for place, dtype in enumerate([*reversed(STORABLE), *STORABLE])}
    content = (save(tmp_path, 1, tensors, {}).path / "tensors.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0, name


def test_state_without_tensors(tmp_path: Path) -> None:
    save(tmp_path, 0, {}, {"log": []})
    loaded = load(tmp_path)
    assert (loaded.step, loaded.tensors, loaded.scalars) == (0, {}, {"log": []})


def test_numbers_are_read_back_exactly(tmp_path: Path) -> None:
    scalars = {"third": 1 / 3, "tiny": 5e-324, "minus zero": -0.0, "best": float("inf"), "big": 2**80, "text": "é\n\0"}
    save(tmp_path, 1, {}, scalars | {"nested": [None, True, {"a": []}]})
    assert repr(load(tmp_path).scalars) == repr(scalars | {"nested": [None, True, {"a": []}]})
    save(tmp_path, 2, {}, {"loss": float("nan")})
    assert repr(load(tmp_path).scalars) == "{'loss': nan}"


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {2, 3}, torch.tensor(1.0), Path("x")], ids=str)
def test_a_value_that_json_would_change_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="JSON changes the value of the state 'mystery'"):
        save(tmp_path, 1, {}, {"fine": 1, "mystery": value})
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2) * 1.0j])
def test_a_tensor_that_cannot_be_stored_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    tensor = tensor.to(torch.complex128) if tensor.is_complex() else tensor
    with pytest.raises(UsageError, match="'odd one' cannot be stored"):
        save(tmp_path, 1, {"odd one": tensor}, {})
    assert not checkpoints(tmp_path)


def test_the_newest_attempt_of_the_newest_step_counts(tmp_path: Path) -> None:
    for step, seed in ((9, 1), (10, 2), (10, 3), (10, 4)):
        saved = save(tmp_path, step, *state_of(seed), keep=9)
    assert saved.path.name == "step-00000010.2"
    assert load(tmp_path).scalars["seed"] == 4
    assert load(tmp_path, 9).scalars["seed"] == 1
    assert (tmp_path / "LATEST").read_text().strip() == "step-00000010.2"


def test_ten_attempts_stay_in_order(tmp_path: Path) -> None:
    for seed in range(12):
        save(tmp_path, 5, *state_of(seed))
    assert load(tmp_path).scalars["seed"] == 11


def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step, *state_of(step), best=step in (2, 3), keep=3)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["3", "6", "7", "8"]
    assert best(tmp_path) == tmp_path / "step-00000003"


def test_a_save_of_an_earlier_step_is_not_removed(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, *state_of(step))
    saved = save(tmp_path, 5, *state_of(5), keep=1)
    assert checkpoints(tmp_path) == [saved.path]


def test_a_damaged_checkpoint_is_not_counted_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved = save(tmp_path, step, *state_of(step), keep=3)
    (saved.path / "state.json").unlink()
    notices = save(tmp_path, 4, *state_of(4), keep=3).notices
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["1", "2", "4"]
    assert "step-00000003 is damaged: state.json is missing" in notices[0]


def test_reported_bytes_equal_those_on_the_disk(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, *state_of(1))
    content = sum(file.stat().st_size for file in saved.path.iterdir() if file.name != "manifest.json")
    assert saved.bytes == content
    assert saved.seconds > 0


def test_fill_changes_values_in_place(tmp_path: Path) -> None:
    tensors, _ = state_of(1)
    save(tmp_path, 1, tensors, {})
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    where = {name: tensor.data_ptr() for name, tensor in into.items()}
    fill(find(tmp_path), into)
    assert_same(into, tensors)
    assert where == {name: tensor.data_ptr() for name, tensor in into.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("parameters/blocks.0.weight"),
        lambda tensors: tensors.update(another=torch.zeros(1)),
        lambda tensors: tensors.update({"parameters/blocks.0.weight": torch.zeros(5, 7)}),
        lambda tensors: tensors.update({"parameters/blocks.0.weight": torch.zeros(7, 5, dtype=torch.float64)}),
    ],
)
def test_another_models_checkpoint_changes_no_value(change: Any, tmp_path: Path) -> None:
    tensors, _ = state_of(1)
    save(tmp_path, 1, tensors, {})
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    change(into)
    with pytest.raises(UsageError, match="does not fit this run"):
        fill(find(tmp_path), into)
    assert not any(tensor.any() for tensor in into.values())


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("payload-ran"),))


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "weights.pkl", "tensors.safetensors", "no suffix"])
def test_a_pickle_is_refused_unopened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "from a stranger"
    folder.mkdir()
    for write in (lambda file: file.write_bytes(pickle.dumps(Payload())), lambda file: torch.save(Payload(), file)):
        write(folder / name)
        with pytest.raises(UsageError, match="pickle"):
            load(folder / name)
        if Path(name).suffix in (".pt", ".bin", ".pkl"):
            with pytest.raises(UsageError, match="pickle"):
                load(folder)
    assert not (tmp_path / "payload-ran").exists()


def test_a_pickle_named_as_tensors_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = save(tmp_path / "checkpoints", 1, *state_of(1))
    (saved.path / "tensors.safetensors").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(IntegrityError, match=r"tensors\.safetensors has \d+ bytes instead of \d+"):
        load(tmp_path / "checkpoints")
    assert not (tmp_path / "payload-ran").exists()


def test_missing_and_damaged_checkpoints_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="there is no checkpoint in"):
        load(tmp_path / "never made")
    saved = save(tmp_path, 1, *state_of(1))
    with pytest.raises(IntegrityError, match=r"no checkpoint of step 7.*\n.*choose one of the steps 1"):
        load(tmp_path, 7)
    (saved.path / "state.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"no undamaged checkpoint is left.*state\.json has 2 bytes"):
            load(tmp_path)


def test_a_damaged_checkpoint_that_cannot_be_moved_is_skipped(tmp_path: Path) -> None:
    for step in (1, 2):
        saved = save(tmp_path, step, *state_of(step))
    (saved.path / "state.json").write_text("{}")
    (tmp_path / "quarantine").write_text("a file is in the way")
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert "could not be moved" in loaded.notices[0]


def test_the_first_format_stays_readable() -> None:
    loaded = load(Path(__file__).parent / "checkpoint_format_1")
    assert loaded.step == 7
    assert loaded.scalars == {"step": 7, "third": 1 / 3, "log": [{"step": 3, "technique": "growth.stacking"}]}
    assert_same(
        loaded.tensors,
        {
            "parameters/weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
            "optimizer/mean/weight": (torch.arange(12) / 7).reshape(3, 4).bfloat16(),
            "techniques/mask": torch.tensor([True, False, True]),
        },
    )
    assert bits(loaded.tensors["techniques/mask"]) == b"\1\0\1"


def test_a_newer_format_is_refused_and_kept(tmp_path: Path) -> None:
    paths = [save(tmp_path, step, *state_of(step)).path for step in (1, 2)]
    reseal(paths[1], format=99)
    with pytest.raises(NewerFormatError, match=r"step-00000002' .* newer version .*\n.*update Thrifty"):
        load(tmp_path)
    assert names(tmp_path) == ["LATEST", "step-00000001", "step-00000002"]
    save(tmp_path, 3, *state_of(3), keep=1)
    assert names(tmp_path) == ["LATEST", "step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": None, "files": None},
        {"step": None},
        {"step": "two"},
        {"files": ["state.json"]},
        {"files": {"state.json": 3}},
        {"files": {"state.json": {"bytes": "many", "sha256": ""}}},
        {"files": {"state.json": {"size": 3}}},
        {"files": {}},
    ],
)
def test_a_resealed_manifest_without_files_is_damage(changes: dict[str, Any], tmp_path: Path) -> None:
    paths = [save(tmp_path, step, *state_of(step)).path for step in (1, 2)]
    reseal(paths[1], **changes)
    loaded = load(tmp_path)
    assert loaded.step == 1 and "checkpoint step-00000002 is damaged" in loaded.notices[0]


@pytest.mark.parametrize("state", [b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
def test_a_state_of_another_type_is_damage(state: bytes, tmp_path: Path) -> None:
    paths = [save(tmp_path, step, *state_of(step)).path for step in (1, 2)]
    replace_state(paths[1], state)
    loaded = load(tmp_path)
    assert loaded.step == 1 and "state.json contains no state" in loaded.notices[0]


def test_a_binary_best_file_names_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, *state_of(1), best=True)
    (tmp_path / "BEST").write_bytes(b"\xff\xfe\0")
    assert best(tmp_path) is None
    save(tmp_path, 2, *state_of(2), keep=1)
    assert load(tmp_path).step == 2
