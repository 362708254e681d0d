"""Example scores by a ViT of 64 patches in examples per second; and a step with importance sampling against a plain
one.

EL2N is a forward pass. GraNd by torch.func (vmap of grad) is compared with a loop of single backward passes, for
several vmap sizes. torch.func runs fast attention one example at a time, and plain attention (MATH) for all at once. A
sampled step scores three times as many examples as a plain one trains on, so the count predicts a factor of 2. With the
gate closed, scores come from the training pass.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from side_by_side import print_timings, rows, side_by_side, write
from thrifty.core.backward import Backward, plain_backward
from thrifty.core.batches import Batch
from thrifty.kernels.example_scores import Fields, el2n, grand
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.classification import Classification
from thrifty.techniques.data_selection.gradient_norm_sampling import GradientNormBackward

EXAMPLES, BATCH, TIMES = 64, 32, 3
OPEN, CLOSED = 1e9, 0.0


def vit() -> nn.Module:
    model = assemble(ModelConfig("vit", 4, 128, 4, 4, 512, 10, 0, tied=False, image=32, patch=4, channels=3))
    initialize(model, 0)
    return model


def examples(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return {"inputs": images, "labels": torch.randint(10, (count,), generator=generator)}


def scoring(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    fields, objective = examples(EXAMPLES), Classification()
    parameters = dict(model.named_parameters())

    class ExampleLoss(nn.Module):
        """Model with its loss, as a module, so that functional_call can replace its parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            batch = Batch({"inputs": inputs[None], "labels": labels[None]}, torch.ones(1))
            return F.cross_entropy(objective.predict(self.model, batch).logits, batch["labels"])

    example_loss = ExampleLoss()

    def loss(parameters: Fields, example: Fields) -> Tensor:
        named = {f"model.{name}": parameter for name, parameter in parameters.items()}
        return functional_call(example_loss, named, (example["inputs"], example["labels"]))

    @torch.no_grad()
    def by_forward_pass() -> Tensor:
        batch = Batch(fields, torch.ones(EXAMPLES))
        return el2n(objective.predict(model, batch).logits, fields["labels"])

    def by_loop() -> Tensor:
        norms = []
        for row in range(EXAMPLES):
            model.zero_grad()
            example_loss(fields["inputs"][row], fields["labels"][row]).backward()
            norms.append(torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum())
        return torch.stack(norms).sqrt()

    torch.testing.assert_close(grand(loss, parameters, fields, 8), by_loop(), rtol=1e-3, atol=1e-5)

    def with_math(chunk: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return grand(loss, parameters, fields, chunk)

    chunks = {
        f"GraNd, vmap of {chunk}": lambda chunk=chunk: grand(loss, parameters, fields, chunk) for chunk in (4, 16)
    }
    plain = {f"GraNd, vmap of {chunk}, MATH": lambda chunk=chunk: with_math(chunk) for chunk in (4, 16)}
    return {"GraNd, a loop": by_loop, **chunks, **plain, "EL2N": by_forward_pass}


def step(model: nn.Module, count: int, backward: Backward) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = Batch(examples(count), torch.full((count,), 1 / count))

    def one() -> None:
        backward(model, Classification(), batch)
        optimizer.step()
        optimizer.zero_grad()

    return one


def sampling(tau: float) -> Backward:
    sampler = GradientNormBackward(plain_backward, TIMES, momentum=1.0)  # tau stays constant
    sampler.state["tau"].fill_(tau)
    return sampler


def main() -> None:
    warnings.filterwarnings("ignore", message="There is a performance drop")
    torch.manual_seed(0)
    scored = side_by_side(scoring(vit().eval()), rounds=5, warmup=1)
    print_timings("scores", scored, "GraNd, a loop", EXAMPLES, "examples/s")
    steps = {
        "plain step": step(vit(), BATCH, plain_backward),
        "gate open": step(vit(), TIMES * BATCH, sampling(OPEN)),
        "gate closed": step(vit(), TIMES * BATCH, sampling(CLOSED)),
    }
    trained = side_by_side(steps, rounds=10)
    print_timings("steps", trained, "plain step", BATCH, "examples/s")
    if len(sys.argv) > 1:
        facts = {"examples": EXAMPLES, "batch": BATCH, "threads": torch.get_num_threads()}
        parts = {"scores": rows(scored, "GraNd, a loop"), "steps": rows(trained, "plain step")}
        write(Path(sys.argv[1]), {**facts, **parts})


if __name__ == "__main__":
    main()
