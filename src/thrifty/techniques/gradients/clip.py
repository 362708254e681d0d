"""Clip: scale all gradients together when their joint norm is too large.

Paper     Pascanu, Mikolov & Bengio 2013, On the difficulty of training recurrent neural networks (arXiv 1211.5063).
Promise   one odd batch cannot throw the parameters away.
Cost      one pass over the gradients.
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
    """Largest 2-norm of all gradients taken as one vector."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(ClipByGlobalNorm(self.max_norm), transform)
