"""Head only: train the head of a frozen model, the linear probe of what its features tell apart.

Paper     Alain & Bengio 2016, Understanding intermediate layers using linear classifier probes (arXiv 1610.01644); as a
          measure of pre-trained features He et al. 2021, MAE (arXiv 2111.06377), appendix A.1.
Promise   gradients and optimizer state for the head alone, and a forward pass that keeps nothing for a backward pass
          through the blocks. The trained model is the plain architecture.
Does not  reach what full fine-tuning reaches where features must change: MAE's own linear probe is far below its
          fine-tuned model, and says little of it.
Avoid     on a head that is also the embedding, which is refused.
Note      MAE's probe standardises features over the batch in front of the head, takes LARS and no weight decay
          (unverified). Here the model's own last norm does the first: give the head a larger learning rate than a
          model, and choose what it is given by model.pool.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.modeling.adapter_base import AdapterTechnique, head_names, train_only


class HeadOnly(AdapterTechnique):
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.PARAMETER_SHARDING: "they are gathered and freed by the gradient of what the model gives, which has none"
    }

    def model(self, model: nn.Module) -> nn.Module:
        trained = head_names(model)
        if not trained:
            raise RefusedError(
                f"{type(model).__name__} has no head of its own to train",
                fix="set model.tied = false where it shares the embedding's weights, or use adapters.lora",
            )
        train_only(model, trained)
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        return model.requires_grad_(True)
