"""Gradient clipping (Pascanu et al. 2013): limit the joint norm of all gradients.

Paper       Pascanu, Mikolov and Bengio 2013, On the difficulty of training recurrent neural networks (arXiv 1211.5063).
Promise     A single unusual batch cannot cause a large update.
Use         optimizer = thrifty.apply(optimizer, "clip", max_norm=1.0)
Start with  `clip:max_norm=1.0`. Lower `max_norm` if the loss still spikes.
Cost        One pass over the gradients.
Avoid       A limit that most steps exceed, because clipping then normalizes every gradient.
Does not    Clip each parameter separately, because one factor scales all gradients.
"""

from typing import Annotated

from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import ClipByGlobalNorm


class GradientClipping(Technique):
    stage, numerics = Stage.CLIP, Numerics.DIFFERENT

    max_norm: Annotated[float, SettingBound(above=0)] = 1.0
    """Maximum 2-norm of all gradients as one vector."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(ClipByGlobalNorm(self.max_norm), transform)
