"""Linear probing (Alain and Bengio 2016): train only the output head of a frozen model.

Paper       Alain and Bengio 2016, Understanding intermediate layers using linear classifier probes (arXiv 1610.01644).
            He et al. 2021, MAE (arXiv 2111.06377), appendix A.1, measures pretrained features this way.
Promise     Gradients and optimizer state exist only for the head, and the blocks save no activations. The trained model
            has the same architecture as before.
Use         vit = thrifty.apply(vit, "head_only")
            optimizer = thrifty.optim.AdamW(vit, lr=1e-2)
Start with  `head_only` and a larger learning rate than for full fine-tuning. `model.pool` selects the features that the
            head reads.
Cost        Every step runs the forward pass of the whole frozen model.
Avoid       Models whose head shares its weight with the embedding, because training would change both. Such models are
            refused.
Does not    Match full fine-tuning if features must change, or predict fine-tuned accuracy; the MAE paper finds little
            correlation with linear-probe accuracy.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, class_name
from thrifty.modeling.adapter_base import AdapterTechnique, head_names, train_only
from thrifty.modeling.embeddings import output_layers


class HeadOnly(AdapterTechnique):
    """Differs from the MAE paper: the paper's probe standardizes the features over the batch before the head. Here the
    model's last norm replaces the standardization. Several output layers, such as the two of a DeiT with a teacher or
    of a CLIP model, are all trained. The paper's probe trains with LARS and no weight decay; this sentence was not
    checked against the paper.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.PARAMETER_SHARDING: "shards are freed by the output's gradient, and frozen blocks have no gradient"
    }

    def model(self, model: nn.Module) -> nn.Module:
        trained = head_names(model)
        if not trained:
            raise RefusedError(
                f"the output head of {class_name(model)} shares the embedding's weight"
                if output_layers(model)
                else f"{class_name(model)} has no output head",
                fix="--with adapters.lora; or build the model with a head of its own: tie_word_embeddings=False in "
                "transformers, --set model.tied=false for a preset with random weights",
            )
        train_only(model, trained)
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        return model.requires_grad_(True)
