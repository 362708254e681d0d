"""Models in plain torch, independent of all techniques."""

from thrifty.models.model_builder import (
    PROBLEM_TYPES,
    build_model,
    build_model_for,
    build_run_model,
    check_model,
    folder_config,
    label_objective,
)
from thrifty.models.model_export import export_model, export_own_model
from thrifty.models.model_resolution import model_shape, own_sizes, patch_side_in, sees_images, shape_for

__all__ = [
    "PROBLEM_TYPES",
    "build_model",
    "build_model_for",
    "build_run_model",
    "check_model",
    "export_model",
    "export_own_model",
    "folder_config",
    "label_objective",
    "model_shape",
    "own_sizes",
    "patch_side_in",
    "sees_images",
    "shape_for",
]
