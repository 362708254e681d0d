"""torch.compile (Ansel et al. 2024): compile each block and the loss; or a model without blocks.

Paper       Ansel et al. 2024, PyTorch 2 (ASPLOS), doi 10.1145/3620665.3640366.
Promise     Elementwise operations are fused. Equal blocks share one compilation; a model without a list of equal blocks
            is compiled whole.
Use         model = thrifty.apply(model, "compile")
Start with  `compile`. Use `dynamic=true` if batch shapes vary.
Cost        Ten seconds before the first step, the first time up to a minute; again after each change of the structure.
Avoid       Very short runs. CPUs without a C++ compiler (`thrifty doctor` reports a missing compiler).
Does not    Change results beyond rounding, or rename parameters.
"""

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

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
        codes: dict[type, CodeType] = {}
        try:
            stacks = find_stacks(model)
        except RefusedError:
            self.compile(model, codes)
            add_note("the whole model, because it has no list of equal blocks")
            return model
        for name, blocks in stacks.items():
            for block in blocks:
                self.compile(block, codes)
            add_note(f"{len(blocks)} blocks in {name or 'the model'}, compiled once")
        return model

    def compile(self, module: nn.Module, codes: dict[type, CodeType]) -> None:
        """Compile a module in place. `nn.Module.compile` has no effect on torch's own layers, because torch captures
        only code outside of torch."""
        module.compile(backend=self.backend, dynamic=self.dynamic)
        if str(getattr(module.forward, "__module__", "")).startswith("torch."):
            module._compiled_call_impl = self.call_of(module, codes)

    def call_of(self, module: nn.Module, codes: dict[type, CodeType]) -> Callable[..., Any]:
        """Return a function that calls a layer of torch with a compiled forward pass and its hooks. Each kind of layer
        has its own code, for which torch counts recompilations; `codes` holds it."""
        forward = module.forward

        def own(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        own.__code__ = codes.setdefault(type(module), own.__code__.replace(co_name=type(module).__name__))
        compiled = torch.compile(own, backend=self.backend, dynamic=self.dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            if "forward" in vars(module):  # replaced after this one was compiled
                return module._call_impl(*args, **kwargs)
            vars(module)["forward"] = compiled
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                del vars(module)["forward"]

        return call

    def objective(self, objective: Objective) -> Objective:
        return objective.compiled(partial(torch.compile, backend=self.backend, dynamic=self.dynamic))
