"""Optimizers compared with independent installed implementations, and their known differences."""

import pytest
import pytorch_optimizer
import schedulefree
import torch
from optimizer_runs import Tensors, parameters, random_tensors, take_steps, trained
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

from thrifty.machine.cpu_features import assume_bfloat16
from thrifty.modeling.parameter_kinds import is_hidden_matrix, is_matrix
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.techniques.optimizers.adafactor import adafactor
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lamb import lamb
from thrifty.techniques.optimizers.lars import lars
from thrifty.techniques.optimizers.lion import lion
from thrifty.techniques.optimizers.muon import COEFFICIENTS, muon, orthogonalized
from thrifty.techniques.optimizers.schedule_free import schedule_free
from thrifty.techniques.optimizers.sgd import sgd
from thrifty.techniques.optimizers.soap import soap

Named = dict[str, nn.Parameter]


def decayed(held: Named, decay: float = 0.1) -> list[dict]:
    """Return parameter groups of a torch optimizer with the same weight decay as ours."""
    return [
        {"params": [p for name, p in held.items() if is_matrix(name, p)], "weight_decay": decay},
        {"params": [p for name, p in held.items() if not is_matrix(name, p)], "weight_decay": 0.0},
    ]


def largest_difference(found: Tensors, wanted: Tensors) -> float:
    return max(float((found[name] - wanted[name]).detach().abs().max()) for name in wanted)


ORACLES = {
    "sgd": (sgd(0.05, 0.9, False, 0.1), lambda held: torch.optim.SGD(decayed(held), lr=0.05, momentum=0.9)),
    "sgd, nesterov": (
        sgd(0.05, 0.9, True, 0.1),
        lambda held: torch.optim.SGD(decayed(held), lr=0.05, momentum=0.9, nesterov=True),
    ),
    "sgd without momentum": (sgd(0.05, 0.0, False, 0.1), lambda held: torch.optim.SGD(decayed(held), lr=0.05)),
    "adamw": (adamw(0.01), lambda held: torch.optim.AdamW(decayed(held), lr=0.01, betas=(0.9, 0.95))),
    "lion": (
        lion(0.01, (0.9, 0.99), 0.1),
        lambda held: pytorch_optimizer.Lion(decayed(held), lr=0.01, betas=(0.9, 0.99), weight_decouple=True),
    ),
    "lars": (
        lars(0.5, 0.9, 0.1, 0.02),
        lambda held: pytorch_optimizer.LARS(decayed(held), lr=0.5, momentum=0.9, trust_coefficient=0.02),
    ),
    "lars, nesterov": (
        lars(0.5, 0.9, 0.1, 0.02, nesterov=True),
        lambda held: pytorch_optimizer.LARS(decayed(held), lr=0.5, momentum=0.9, trust_coefficient=0.02, nesterov=True),
    ),
    "soap": (
        soap(0.02, (0.9, 0.95), weight_decay=0.0, every=3),
        lambda held: pytorch_optimizer.SOAP(
            held.values(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.0, precondition_frequency=3
        ),
    ),
    "soap, one side only": (
        soap(0.02, (0.9, 0.95), weight_decay=0.0, every=4, max_dim=8),
        lambda held: pytorch_optimizer.SOAP(
            held.values(),
            lr=0.02,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            precondition_frequency=4,
            max_precondition_dim=8,
        ),
    ),
    "adafactor": (
        adafactor(0.3, -0.8, weight_decay=0.1),
        lambda held: torch.optim.Adafactor(decayed(held), lr=0.3, beta2_decay=-0.8),
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_optimizers_equal_installed_implementations(name: str) -> None:
    ours, theirs = ORACLES[name]
    held = parameters()
    tolerance = 1e-6 if "soap" in name else 1e-12  # the reference decomposes in float32
    assert largest_difference(trained(ours), take_steps(theirs(held), held)) < tolerance


@pytest.mark.parametrize(("warmup", "power", "rate_power"), [(0, 0.0, 2.0), (4, 0.0, 2.0), (4, 1.0, 0.0)])
def test_schedule_free_equals_schedulefree(warmup: int, power: float, rate_power: float) -> None:
    held, theirs = parameters(), parameters()
    ours = TransformOptimizer(held.items(), schedule_free(0.01, (0.9, 0.99), 1e-8, 0.1, warmup, power, rate_power))
    reference = schedulefree.AdamWScheduleFree(
        decayed(theirs), lr=0.01, betas=(0.9, 0.99), warmup_steps=warmup, r=power, weight_lr_power=rate_power
    )
    reference.train()
    assert largest_difference(take_steps(ours, held), take_steps(reference, theirs)) < 1e-12
    reference.eval()
    with ours.use_eval_weights():
        assert largest_difference(held, theirs) < 1e-12


class MuonAndAdamW:
    """torch's Muon and AdamW, combined as in its documentation."""

    def __init__(self, held: Named, scale: str):
        hidden = {name: p for name, p in held.items() if is_hidden_matrix(name, p)}
        rest = {name: p for name, p in held.items() if name not in hidden}
        self.hidden = torch.optim.Muon(hidden.values(), lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn=scale)
        self.rest = torch.optim.AdamW(decayed(rest), lr=0.02, betas=(0.9, 0.95))

    def step(self) -> None:
        self.hidden.step()
        self.rest.step()


@pytest.mark.parametrize(("ours", "theirs"), [("original", "original"), ("match_rms", "match_rms_adamw")])
def test_muon_equals_torch_within_bfloat16(ours: str, theirs: str) -> None:
    held = parameters(torch.float32)
    wanted = take_steps(MuonAndAdamW(held, theirs), held)
    found = trained(muon(0.01, 0.9, True, 0.1, ours, adamw_lr=0.02), dtype=torch.float32)
    moved = {name: (value - random_tensors(0)[name]).abs().max() for name, value in wanted.items()}
    for name, value in wanted.items():
        difference = (found[name] - value).abs().max()
        # bfloat16 has a relative precision of 1/256; torch averages where ours sums, with other rounding
        assert difference < (0.05 * moved[name] if is_hidden_matrix(name, value) else 1e-6), name


@pytest.mark.parametrize("has_units", [False, True])
@pytest.mark.parametrize("shape", [(6, 6), (16, 6), (6, 16), (40, 60), (301, 260)])
def test_orthogonalization_equals_torch(shape: tuple[int, int], has_units: bool) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
    with assume_bfloat16(has_units):
        found = orthogonalized(matrix)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0, atol=2**-7)


class TheirLamb:
    """The paper's LAMB with the three changes that pytorch_optimizer makes."""

    def __init__(self, held: Named):
        self.held, self.t = held, 0
        self.mean = {name: torch.zeros_like(p) for name, p in held.items()}
        self.square = {name: torch.zeros_like(p) for name, p in held.items()}

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for name, w in self.held.items():
            g = w.grad
            assert g is not None
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * g
            self.square[name] = 0.99 * self.square[name] + 0.01 * g * g
            w -= 0.01 * (0.1 if is_matrix(name, w) else 0.0) * w  # decay outside the update whose length is scaled
            u = self.mean[name] / (self.square[name].sqrt() + 1e-6)  # without 1 / sqrt(1 - b2^t), ...
            ratio = w.norm().clamp(max=10.0) / (u.norm() + 1e-6)  # the weight norm is clipped at 10
            w -= 0.01 / (1 - 0.9**self.t) * ratio * u  # ... and 1 / (1 - b1^t) outside the ratio


def large_embedding() -> Named:
    held = parameters()
    with torch.no_grad():
        held["embedding.token.weight"].mul_(20.0)
    return held


def test_pytorch_optimizer_lamb_has_three_changes() -> None:
    held, copied, plain = large_embedding(), large_embedding(), large_embedding()
    theirs = pytorch_optimizer.Lamb(decayed(held), lr=0.01, betas=(0.9, 0.99), eps=1e-6)
    found = take_steps(theirs, held)
    assert largest_difference(found, take_steps(TheirLamb(copied), copied)) < 1e-12
    ours = TransformOptimizer(plain.items(), lamb(0.01, (0.9, 0.99), 1e-6, 0.1))
    paper = take_steps(ours, plain)
    before = large_embedding()
    for name in ("embedding.token.weight", "blocks.0.attention.qkv.weight"):
        moved = (paper[name] - before[name]).norm()
        assert (found[name] - paper[name]).norm() > 0.3 * moved, name


def test_pytorch_optimizer_lars_differs_for_zero_gradients() -> None:
    """Its ratio is then that of the decay, so that a layer without gradient shrinks at every step."""
    held, theirs = parameters(), parameters()
    ours = TransformOptimizer(held.items(), lars(0.5, 0.9, 0.1, 0.02))
    reference = pytorch_optimizer.LARS(decayed(theirs), lr=0.5, momentum=0.9, trust_coefficient=0.02)
    for each, optimizer in ((held, ours), (theirs, reference)):
        for parameter in each.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    name = "blocks.0.attention.out.weight"
    before = random_tensors(0)[name]
    torch.testing.assert_close(held[name].detach(), (1 - 0.5 * 0.1) * before)
    torch.testing.assert_close(theirs[name].detach(), (1 - 0.5 * 0.02) * before)
