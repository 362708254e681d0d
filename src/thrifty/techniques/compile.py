"""torch.compile (Ansel et al. 2024): compile each block, the norms outside blocks and the loss.

Paper       Ansel et al. 2024, PyTorch 2 (ASPLOS), doi 10.1145/3620665.3640366.
Promise     Elementwise operations are fused. Equal blocks share one compilation.
Use         model = thrifty.apply(model, "compile")
Start with  `compile`. Use `dynamic=true` if batch shapes vary.
Cost        Ten seconds before the first step, the first time up to a minute; again after each change of the structure.
Avoid       Very short runs. CPUs without a C++ compiler (`thrifty doctor` reports a missing compiler).
Does not    Change results beyond rounding, or rename parameters.
"""

from functools import partial

import torch
from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.machine.compile_cache import prepare_compile_cache
from thrifty.machine.cpu_features import can_compile
from thrifty.modeling.module_surgery import find_stacks


class CompiledBlocks(Technique):
    stage, numerics, tolerance = Stage.COMPILE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.COMPILED_BLOCKS})

    backend: str = "inductor"
    """Backend of torch.compile; "aot_eager" traces without generating code."""
    dynamic: bool = False
    """True to compile once for all shapes, instead of once per shape."""
    least_seconds: Rate = 0.0
    """Smallest budget in seconds of a run that is compiled. A run with a smaller budget starts without compilation."""
    least_steps: Natural = 0
    """Smallest budget in steps of a run that is compiled."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        device = next(model.parameters()).device.type
        if device == "cpu" and self.backend == "inductor" and not can_compile():
            raise RefusedError(
                "backend 'inductor' requires a C++ compiler and Python headers, but this machine lacks one of them",
                fix="apt-get install g++ python3-dev (Debian); or --without compile",
            )
        prepare_compile_cache()
        stacks = find_stacks(model)
        for name, blocks in stacks.items():
            for block in blocks:
                block.compile(backend=self.backend, dynamic=self.dynamic)
            add_note(f"{len(blocks)} blocks in {name or 'the model'}, compiled once, and the norms around them")
        inside = {module for blocks in stacks.values() for module in blocks.modules()}
        for norm in model.modules():
            if isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm not in inside:
                norm.compile(backend=self.backend, dynamic=self.dynamic)
        return model

    def objective(self, objective: Objective) -> Objective:
        return objective.compiled(partial(torch.compile, backend=self.backend, dynamic=self.dynamic))
