"""Operations for which torch lacks a FLOP formula or a complete fake kernel."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thrifty.core.tensor_tracing import StepTrace

ENDS = [8, 24, 32]
GROUPED = {
    "rows in groups": ((32, 16), (3, 16, 8)),
    "columns in groups": ((3, 8, 16), (16, 32)),
    "sums in groups": ((8, 32), (32, 16)),
    "a product for each group": ((3, 8, 16), (3, 16, 8)),
}


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_grouped_products_have_the_real_shapes_and_flops(kind: str, dtype: torch.dtype) -> None:
    a, b = (torch.randn(shape, dtype=dtype) for shape in GROUPED[kind])
    ends = None if "each" in kind else torch.tensor(ENDS, dtype=torch.int32)
    real = torch._grouped_mm(a, b, offs=ends)
    with FakeTensorMode() as fake, StepTrace() as trace:
        faked = torch._grouped_mm(*map(fake.from_tensor, (a, b)), offs=None if ends is None else fake.from_tensor(ends))
    assert faked.shape == real.shape and faked.dtype == real.dtype
    per_product = 3 if ends is None else 1
    assert trace.flops == 2 * per_product * a.shape[-2] * a.shape[-1] * b.shape[-1]


def test_mixture_of_experts_of_transformers_is_counted() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=20, intermediate_size=28, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    with FakeTensorMode() as fake, StepTrace() as trace:
        model = transformers.MixtralForCausalLM(config)
        tokens = fake.from_tensor(torch.zeros(2, 8, dtype=torch.long))
        model(input_ids=tokens, labels=tokens).loss.backward()
    experts = model.model.layers[0].mlp.experts
    assert all(p.grad is not None and p.grad.shape == p.shape for p in experts.parameters())
    assert trace.flops > 6 * 16 * 20 * 50  # more than its head
