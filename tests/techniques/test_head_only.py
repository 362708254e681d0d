"""The linear probe trains the head only and saves no activations before it."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from image_runs import image_run, tiny_vit
from tiny_runs import losses, run_through, technique, tiny_model, with_optimizer

from thrifty.composition.compose import compose
from thrifty.composition.explain import count
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.state import TrainState
from thrifty.techniques.adapters.head_only import HeadOnly
from thrifty.techniques.optimizers.sgd import Sgd


def probed(steps: int = 5) -> tuple[list[float], TrainState]:
    chosen = [HeadOnly(), Sgd(lr=0.5, momentum=0.0, weight_decay=0.0)]
    records, state = run_through(image_run(batch=8), chosen, steps)
    return losses(records), state


def test_training_equals_logistic_regression_on_features() -> None:
    actual, state = probed()
    source, base = image_run(batch=8).source, tiny_vit()
    weight, bias = (parameter.detach().clone().requires_grad_() for parameter in base.head.parameters())
    for step, loss in enumerate(actual):
        batch = source.at(step)
        with torch.no_grad():
            features = base.pooled(base(batch["inputs"]))
        expected = F.cross_entropy(features @ weight.T + bias, batch["labels"])
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        for parameter, gradient in zip((weight, bias), torch.autograd.grad(expected, (weight, bias)), strict=True):
            parameter.data -= 0.5 * gradient
    assert state.model is not None
    torch.testing.assert_close(state.model.head.weight, weight)
    for name, value in base.named_parameters():
        if not name.startswith("head."):
            assert torch.equal(state.model.get_parameter(name), value), name


def test_no_activations_or_state_outside_the_head() -> None:
    run = compose(image_run(batch=32), with_optimizer([HeadOnly()]), 4)
    (_, plain), (_, probe) = count(run, ()), count(run, run.techniques)
    of_head = sum(parameter.numel() for parameter in tiny_vit().head.parameters())
    assert probe.gradients == 4 * of_head
    adamw = count(run, tuple(t for t in run.techniques if t.name != "adapters.head_only"))[1]
    assert probe.optimizer < adamw.optimizer / 50
    assert probe.activations < plain.activations / 20
    assert probe.flops == pytest.approx(plain.flops / 3, rel=0.05)  # the backward pass is two thirds


def test_the_trained_model_is_plain_and_unfrozen() -> None:
    _, state = probed(2)
    assert state.model is not None
    finished = HeadOnly().finish(state.model)
    assert all(parameter.requires_grad for parameter in finished.parameters())


def test_a_head_that_is_also_the_embedding_is_refused() -> None:
    with pytest.raises(RefusedError, match="shares the embedding's weight") as refused:
        HeadOnly().model(tiny_model())
    assert "model.tied=false" in refused.value.fix
    free = HeadOnly().model(tiny_model(tied=False))
    assert [name for name, parameter in free.named_parameters() if parameter.requires_grad] == ["head.weight"]


def test_all_output_layers_are_trained() -> None:
    config = transformers.DeiTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    model = HeadOnly().model(transformers.DeiTForImageClassificationWithTeacher(config))
    trained = {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"cls_classifier", "distillation_classifier"}
    both = technique("initializations.fixup").model(transformers.DeiTForImageClassificationWithTeacher(config))
    assert not any(both.get_parameter(f"{name}.weight").any() for name in trained)


def test_only_one_technique_decides_what_is_frozen() -> None:
    with pytest.raises(UsageError, match="both decide the frozen base weights"):
        compose(image_run(), with_optimizer([HeadOnly(), technique("adapters.lora")]), 4)


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be combined: shards are freed by"):
        compose(image_run(), with_optimizer([HeadOnly(), technique("parallelism.shard")]), 4)
