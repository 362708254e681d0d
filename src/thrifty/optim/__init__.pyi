"""Torch optimizers of the techniques that decide the optimizer; written by tools/public_stubs.py."""

from math import inf
from typing import Literal

from thrifty.composition.technique_optimizer import Params, TechniqueOptimizer

class Adafactor(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.01,
        decay: float = -0.8,
        clip_threshold: float = 1.0,
        eps1: float | None = None,
        eps2: float = 0.001,
        weight_decay: float = 0.0,
        total_steps: int | None = None,
    ) -> None: ...

class AdamW(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-08,
        weight_decay: float = 0.1,
        total_steps: int | None = None,
    ) -> None: ...

class Lamb(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        norm_bounds: tuple[float, float] = (0.0, inf),
        slices: bool = False,
        total_steps: int | None = None,
    ) -> None: ...

class Lars(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0001,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        learning_rate_placement: Literal["outside", "inside"] = "outside",
        total_steps: int | None = None,
    ) -> None: ...

class Lion(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.0001,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1.0,
        total_steps: int | None = None,
    ) -> None: ...

class Muon(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.001,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale: Literal["original", "match_rms"] = "match_rms",
        newton_schulz_steps: int = 5,
        slices: bool = False,
        precision: Literal["bfloat16", "float32"] = "bfloat16",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-08,
        total_steps: int | None = None,
    ) -> None: ...

class ScheduleFreeAdamW(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.1,
        warmup: int | float = 0.05,
        power: float = 0.0,
        rate_power: float = 2.0,
        total_steps: int | None = None,
    ) -> None: ...

class Sgd(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0001,
        total_steps: int | None = None,
    ) -> None: ...

class Soap(TechniqueOptimizer):
    def __init__(
        self,
        params: Params,
        *,
        lr: float = 0.003,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        every: int = 10,
        max_dim: int = 10000,
        total_steps: int | None = None,
    ) -> None: ...
