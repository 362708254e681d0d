"""BitFit (Ben Zaken et al. 2022): train only the bias vectors of a frozen model.

Paper       Ben Zaken, Goldberg and Ravfogel 2022, BitFit (arXiv 2106.10199), section 3. `add=true` adds biases to a
            model that has none, as in Gao et al. 2023, LLaMA-Adapter V2 (arXiv 2304.15010), section 3.1.
Promise     Gradients and optimizer state exist only for the biases. Without `add=true`, the trained model has the same
            architecture and inference cost as before.
Use         encoder = thrifty.apply(encoder, "bias_only")
            optimizer = thrifty.optim.AdamW(encoder, lr=1e-2)
Start with  `bias_only` and a larger learning rate than for full fine-tuning. For models without biases, such as Llama,
            set `add=true`.
Cost        The backward pass still runs through every block, because biases of all blocks are trained.
Avoid       Tasks for which shifting features is not enough. Large data sets, because the paper reports parity with full
            fine-tuning only on small and medium data sets.
Does not    Train matrices, except the head with `head=true`, or export a model with `add=true`, whose biases the plain
            architecture lacks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, class_name
from thrifty.core.run_notes import add_note
from thrifty.modeling.adapter_base import AdapterTechnique, head_names, names_ending, train_only
from thrifty.modeling.layer_shapes import is_transposed, out_width
from thrifty.modeling.module_surgery import find_stacks, is_under, weight_layers

ADDED = "added_bias"


def bias_names(model: nn.Module) -> set[str]:
    """Return the names of the bias vectors of linear layers, norms and fused projections."""
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 and name.rpartition(".")[2].endswith("bias")
    }


def add_bias(layer: nn.Module) -> None:
    """Add a bias vector, initially zero, to the output of a layer."""
    layer.added_bias = nn.Parameter(torch.zeros(out_width(layer), device=layer.weight.device))
    layer.register_forward_hook(_plus_bias)


def _plus_bias(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + layer.added_bias.to(output.dtype)


class BiasOnly(AdapterTechnique):
    """The paper reports that biases are 0.08 % of BERT's parameters (unverified). The paper also trains a new
    classifier head; here `head=true` trains the existing head. Added biases start at zero.
    """

    claims = AdapterTechnique.claims | {Claim.TRAINED_VECTORS}

    head: bool = False
    """Train the output head too, unless the head shares its weight with the embedding."""
    add: bool = False
    """Add a bias, initially zero, to each linear layer without bias in the blocks."""

    def model(self, model: nn.Module) -> nn.Module:
        if self.add:
            self._add(model)
        trained = bias_names(model)
        if not trained:
            raise RefusedError(
                f"{class_name(model)} has no biases to train",
                fix=f"--set techniques.{self.name}.add=true; or --with adapters.lora",
            )
        train_only(model, trained | (head_names(model) if self.head else set()))
        return model

    def _add(self, model: nn.Module) -> None:
        stacks = find_stacks(model)
        without = {
            name: layer
            for name, layer in weight_layers(model).items()
            if any(is_under(name, stack) for stack in stacks)
            and not isinstance(layer, nn.MultiheadAttention)
            and getattr(layer, "bias", None) is None
        }
        linear = [layer for layer in without.values() if isinstance(layer, nn.Linear) or is_transposed(layer)]
        for layer in linear:
            add_bias(layer)
        kinds = {type(layer).__name__ for layer in without.values() if layer not in linear}
        unknown = f"; not to {' or '.join(sorted(kinds))}, whose computation is unknown"
        add_note(f"biases added to {len(linear)} layers{unknown if kinds else ''}")

    def finish(self, model: nn.Module) -> nn.Module:
        if names_ending(model, ADDED):
            raise self.refuse_plain("added biases")
        return model.requires_grad_(True)
