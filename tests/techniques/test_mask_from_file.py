"""Tickets: pruning against a plain loop, masks with other techniques, and refusals."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file
from tiny_runs import SETTINGS, advance, losses, plain_run, run_through, technique, tiny_model, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.state import TrainState
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.sparsity.mask_from_file import (
    MaskFromFile,
    density_of,
    mask_file_bytes,
    prune_by_magnitude,
    read_mask_file,
    shuffle_values,
)

FILE, SHA256 = (SETTINGS["sparsity.mask_from_file"][name] for name in ("file", "sha256"))
SIZES = some.lists(some.tuples(some.integers(1, 4), some.integers(1, 5)), min_size=1, max_size=4)


def kept(tmp_path: Path, masks: dict[str, Tensor], name: str = "ticket.safetensors") -> dict[str, str]:
    """Write a ticket and return its settings."""
    weights = {each: torch.zeros(mask.shape) for each, mask in masks.items()}
    content = mask_file_bytes(masks, "a test", weights)
    (tmp_path / name).write_bytes(content)
    return {"file": str(tmp_path / name), "sha256": hashlib.sha256(content).hexdigest()}


def run_of(steps: int = 6, *others: str, **changed: str | int) -> Run:
    return compose(
        plain_run(), with_optimizer([technique("sparsity.mask_from_file", **changed), *map(technique, others)]), steps
    )


def weights_in(state: TrainState) -> dict[str, Tensor]:
    assert state.model is not None
    return {name: parameter.detach() for name, parameter in state.model.named_parameters()}


# drawing tickets


@given(SIZES, some.floats(0.05, 0.95), some.booleans(), some.integers(0, 10_000))
@settings(max_examples=60)
def test_smallest_kept_weights_are_pruned(sizes: list[tuple[int, int]], prune: float, apart: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # few distinct magnitudes, so that many are equal
    weights = {f"w{i}": torch.randint(-3, 4, size, generator=generator).float() for i, size in enumerate(sizes)}
    masks = {name: torch.rand(each.shape, generator=generator) < 0.7 for name, each in weights.items()}
    half = {"w0"} if seed % 2 else set()
    found = prune_by_magnitude(weights, masks, prune, "layerwise" if apart else "global", half)
    groups = [[name] for name in weights] if apart else [[n] for n in half] + [[n for n in weights if n not in half]]
    for group in filter(None, groups):
        places = [(abs(float(weights[n].flatten()[i])), n, i) for n in group for i in masks[n].flatten().nonzero().T[0]]
        share = prune / 2 if set(group) <= half else prune
        left = len(places) - round(share * len(places))
        best = sorted(places, key=lambda at: (-at[0], at[1], int(at[2])))[:left]
        for name in group:
            expected = {int(i) for _, n, i in best if n == name}
            assert set(found[name].flatten().nonzero().flatten().tolist()) == expected


def test_ticket_file_is_deterministic_and_readable(tmp_path: Path) -> None:
    masks = {"b.weight": torch.rand(3, 4) < 0.5, "a.weight": torch.ones(2, 2, dtype=torch.bool)}
    weights = {"a.weight": torch.rand(2, 2), "b.weight": torch.rand(3, 4).bfloat16()}
    contents = {mask_file_bytes(masks, "here", weights) for _ in range(8)}
    assert len(contents) == 1
    (tmp_path / "t").write_bytes(contents.pop())
    found = read_mask_file(str(tmp_path / "t"), hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest())
    assert found.keys() == masks.keys() and all(torch.equal(found[name], masks[name]) for name in masks)
    changed = mask_file_bytes(masks, "here", {**weights, "a.weight": torch.zeros(2, 2)})
    assert changed != (tmp_path / "t").read_bytes()  # the metadata name the weights


def test_masks_are_read_in_sorted_order(tmp_path: Path) -> None:
    masks = {f"{number}.weight": torch.ones(1, 1, dtype=torch.bool) for number in range(40)}
    (tmp_path / "t").write_bytes(content := mask_file_bytes(masks, "here", {}))
    assert list(read_mask_file(str(tmp_path / "t"), hashlib.sha256(content).hexdigest())) == sorted(masks)


# runs under a ticket


@pytest.mark.parametrize(
    "others",
    [
        (),
        ("optimizers.lion",),
        ("optimizers.muon",),
        ("optimizers.schedule_free",),
        ("optimizers.sgd",),
        ("optimizers.lamb",),
        ("averaging.ema", "gradients.clip", "schedules.linear"),
        ("large_batch.gradient_accumulation", "precision.mixed"),
        ("precision.bfloat16_weights",),
        ("precision.optimizer_state",),
    ],
    ids=" and ".join,
)
def test_weights_moments_and_averages_stay_masked(others: tuple[str, ...]) -> None:
    run, drawn = run_of(3, *others), load_file(FILE)
    state = run.start()
    for step in range(1, 4):
        advance(run, state, step)
        run.verify(state)
        weights = weights_in(state)
        assert not any(weights[name][~mask].any() for name, mask in drawn.items())
        assert all(weights[name][mask].any() for name, mask in drawn.items())


def test_starts_from_the_plain_initialization() -> None:
    found, plain, drawn = weights_in(run_of().start()), weights_in(run_of(file="").start()), load_file(FILE)
    assert density_of(drawn) == 0.5
    for name, weight in plain.items():
        assert torch.equal(found[name], weight * drawn[name] if name in drawn else weight), name


def test_without_a_file_equals_the_dense_run() -> None:
    dense, _ = run_through(plain_run(), with_optimizer([]), 4)
    under, state = run_through(plain_run(), with_optimizer([MaskFromFile()]), 4)
    assert losses(under) == pytest.approx(losses(dense), rel=1e-5)  # torch's fused kernel rounds in another order
    assert not masks_in(state)


def test_random_mask_keeps_equal_counts() -> None:
    drawn = load_file(FILE)
    found = [masks_in(run_of(control="random-mask", seed=seed).start()) for seed in (0, 0, 1)]
    for name, mask in drawn.items():
        assert all(int(each[name].sum()) == int(mask.sum()) for each in found)
        assert torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], mask) and not torch.equal(found[0][name], found[2][name])


def test_reinitialise_shuffles_values_and_keeps_the_mask() -> None:
    plain = weights_in(run_of(file="").start())
    run, drawn = run_of(control="reinitialise"), load_file(FILE)
    state = run.start()
    run.verify(state)
    assert all(torch.equal(masks_in(state)[name], mask) for name, mask in drawn.items())
    model = tiny_model()
    shuffle_values(dict(model.named_parameters()), "0")
    for name, value in model.named_parameters():
        assert torch.equal(value.flatten().sort().values, plain[name].flatten().sort().values)
        assert value.ndim == 1 or not torch.equal(value, plain[name])
        assert torch.equal(weights_in(state)[name], value * drawn[name] if name in drawn else value)


def test_fused_layers_are_shuffled_separately() -> None:
    model = tiny_model()
    with torch.no_grad():
        for place, part in enumerate(model.blocks[0].attention.qkv.weight.split([32, 16, 16])):
            part.fill_(float(place))
    shuffle_values(dict(model.named_parameters()), "0")
    assert [part.unique().tolist() for part in model.blocks[0].attention.qkv.weight.split([32, 16, 16])] == [
        [0],
        [1],
        [2],
    ]


def test_any_network_trains_under_a_ticket(tmp_path: Path) -> None:
    """A ticket masks any matrix by name, not only those of blocks."""
    masks = {"0.weight": torch.rand(16, 32, generator=torch.Generator().manual_seed(0)) < 0.3}
    network = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    assert MaskFromFile(**kept(tmp_path, masks)).model(network) is network


# refusals


def test_changed_file_is_refused(tmp_path: Path) -> None:
    settings = kept(tmp_path, {"blocks.0.mlp.down.weight": torch.rand(32, 64) < 0.5})
    run_of(**settings).start()
    kept(tmp_path, {"blocks.0.mlp.down.weight": torch.rand(32, 64) < 0.4})
    with pytest.raises(IntegrityError, match="is not the recipe's ticket"):
        run_of(**settings).start()


def test_missing_hash_is_refused_with_the_hash() -> None:
    with pytest.raises(UsageError, match=SHA256):
        run_of(sha256="").start()


@pytest.mark.parametrize(
    ("masks", "reason"),
    [
        ({"blocks.9.mlp.down.weight": torch.ones(32, 64, dtype=torch.bool)}, "the model does not have"),
        (
            {"blocks.0.mlp.down.weight": torch.ones(32, 63, dtype=torch.bool)},
            r"has shape \(32, 63\), the weight \(32, 64\)",
        ),
        ({"norm.weight": torch.ones(32, dtype=torch.bool)}, "for matrices"),
    ],
)
def test_ticket_of_another_model_is_refused(masks: dict[str, Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=reason):
        run_of(**kept(tmp_path, masks)).start()


def test_invalid_ticket_files_are_refused(tmp_path: Path) -> None:
    def settings(name: str) -> dict[str, str]:
        return {"file": str(tmp_path / name), "sha256": hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}

    save_file({"blocks.0.mlp.down.weight": torch.ones(32, 64)}, tmp_path / "floats")
    (tmp_path / "text").write_text("no ticket at all")
    with pytest.raises(UsageError, match=r"has F32 for 'blocks\.0\.mlp\.down\.weight'"):
        read_mask_file(**settings("floats"))
    with pytest.raises(IntegrityError, match="not a safetensors file"):
        read_mask_file(**settings("text"))
    with pytest.raises(UsageError, match="there is no ticket"):
        read_mask_file(str(tmp_path / "nowhere"), "0")


def test_wrong_mask_raises_integrity_error() -> None:
    run = run_of()
    state = run.start()
    mask = masks_in(state)["blocks.0.mlp.down.weight"]
    mask.copy_(mask.flatten().roll(1).view_as(mask))
    assert state.optimizer is not None
    state.optimizer.apply_constraints()
    with pytest.raises(IntegrityError, match="is not the ticket"):
        run.verify(state)


@pytest.mark.parametrize("other", ["sparsity.rigl", "growth.stacking", "adapters.lora"])
def test_conflicting_techniques_are_refused(other: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be combined|both decide"):
        run_of(4, other)
