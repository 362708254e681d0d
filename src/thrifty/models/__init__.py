"""Models in plain torch that know no technique."""

from thrifty.models.building import build_for, build_model
from thrifty.models.chosen import model_shape, own_patch, own_side, shape_for
from thrifty.models.exporting import export_model

__all__ = ["build_for", "build_model", "export_model", "model_shape", "own_patch", "own_side", "shape_for"]
