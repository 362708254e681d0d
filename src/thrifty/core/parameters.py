"""The one rule of the toolkit for which parameters are decayed and trust-ratio scaled."""

import re

from torch import Tensor

_TABLE = re.compile(r"(^|[._])(position|positions|wpe|embed_positions|pos_embed|cls_token|class_token)([._]|$)")


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether weight decay and trust ratios apply: not to vectors and scalars (norms, biases, gains), not to anything
    named a bias, not to position or class tokens."""
    return parameter.ndim > 1 and not name.endswith("bias") and not _TABLE.search(name)
