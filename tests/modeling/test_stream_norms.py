"""Norms of a residual stream: search and bypass."""

import pytest
import torch
from stacked_models import KINDS, TOKENS, TorchEncoder
from torch import nn

from thrifty.core.errors import IntegrityError
from thrifty.core.run_notes import collect_notes
from thrifty.modeling.stream_norms import bypass_norms, check_bypassed, is_norm, stream_norms

STAYS = {
    "bert": {"cls.predictions.transform.LayerNorm": "it belongs to the head"},
    "our bert": {"transform.norm": "it belongs to the head"},
    "qwen3": {
        f"model.layers.{index}.self_attn.{letter}_norm": "it normalizes queries or keys"
        for index in range(3)
        for letter in "qk"
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_norms_of_head_queries_and_keys_are_skipped(name: str) -> None:
    model = KINDS[name].model()
    norms = stream_norms(model)
    assert norms.skipped == STAYS.get(name, {})
    every = {key for key, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    assert norms.matched.keys() | norms.skipped.keys() == every
    assert len(norms.matched) >= 2 * sum(KINDS[name].stacks.values())


@pytest.mark.parametrize("name", KINDS)
def test_a_bypassed_norm_is_an_untrained_identity(name: str) -> None:
    model = KINDS[name].model()
    names = list(model.state_dict())
    norms = bypass_norms(model).matched
    x = torch.randn(2, 3, 32)
    assert all(norm(x) is x for norm in norms.values())
    assert list(model.state_dict()) == names
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    fixed = {key for key, parameter in KINDS[name].model().named_parameters() if not parameter.requires_grad}
    assert frozen - fixed == {f"{key}.{p}" for key, norm in norms.items() for p, _ in norm.named_parameters()}


def test_torchs_fast_path_does_not_restore_norms() -> None:
    model = TorchEncoder()
    bypass_norms(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().logits(TOKENS), model.train().logits(TOKENS))
        plain = TorchEncoder()
        plain.load_state_dict(model.state_dict())
        assert not torch.allclose(plain.eval().logits(TOKENS), model.logits(TOKENS), atol=0.1)


def test_a_restored_or_trained_norm_is_detected() -> None:
    model = KINDS["our gpt"].model()
    with pytest.raises(IntegrityError, match=r"it: the norm blocks\.0\.attention_norm is no longer bypassed"):
        check_bypassed(model, "it")
    bypass_norms(model)
    check_bypassed(model, "it")
    model.norm.requires_grad_(True)
    with pytest.raises(IntegrityError, match="it: norm is bypassed, but its parameters are being trained"):
        check_bypassed(model, "it")


def test_skipped_norms_are_noted_once_for_all_blocks() -> None:
    with collect_notes() as notes:
        bypass_norms(KINDS["qwen3"].model())
    (note,) = notes
    assert note.startswith("7 norms bypassed; model.layers.N.self_attn.q_norm stays: it normalizes queries or keys")


@pytest.mark.parametrize(("module", "answer"), [(nn.RMSNorm(2), True), (nn.Linear(2, 2), False), (nn.ReLU(), False)])
def test_a_norm_is_recognized_by_its_class(module: nn.Module, answer: bool) -> None:
    assert is_norm(module) is answer
    assert not is_norm(nn.Sequential(module))
