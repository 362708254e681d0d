"""Work of each rank in tests of tensor parallelism, and in one process."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from table_samples import sample_of
from tiny_runs import advance, evaluated_loss, losses, plain_run, technique, with_optimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thrifty.composition.compose import Run as Composition
from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core import mesh
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.shard_layout import local_tensors, order_of
from thrifty.core.state import TrainState, full_value
from thrifty.distributed.tensor_parallel_model import split_model
from thrifty.kernels import chunked_cross_entropy, vocab_parallel_cross_entropy
from thrifty.models.families import assemble
from thrifty.models.hf_wrapper import HuggingFaceCausalLM
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.techniques.parallelism.tensor import SPLITTING, settle_gradients
from thrifty.training import checkpoint
from thrifty.training.rank_sync import ProcessGroupSync

STEPS = 20
VOCABULARY = 257
"""Vocabulary size that is divisible by no number of ranks, so that parts are unequal."""
TENSOR = "parallelism.tensor"
Chosen = Sequence[tuple[str, Mapping[str, Any]]]


def model(style: str = "gpt", tied: bool = True, kv_heads: int = 4, depth: int = 2, **more: Any) -> nn.Module:
    """Return a float64 model with 4 heads and width 32, and random biases and gains."""
    kv_heads = kv_heads if style == "llama" else 4
    made = assemble(ModelConfig(style, depth, 32, 4, kv_heads, 64, VOCABULARY, 24, tied, **more))  # type: ignore[arg-type]
    initialize(made, 0, std=0.1)
    return stirred(made)


def stirred(made: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return made.double()


def transformers_model(kind: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 24, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "GPT2":
        own: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
        own |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    else:
        own = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        own |= {"num_key_value_heads": 2, "head_dim": 8} if kind != "GPTNeoX" else {"hidden_act": "gelu"}
    config = getattr(transformers, f"{kind}Config")(**sizes, **own)
    torch.manual_seed(0)
    return stirred(HuggingFaceCausalLM(transformers.AutoModelForCausalLM.from_config(config)))


GPT2_PLAN = ("*.c_attn=column", "*.attn.c_proj=row", "*.c_fc=column", "*.mlp.c_proj=row")
MODELS: dict[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]] = {
    "gpt": (lambda: model("gpt"), {}),
    "gpt, tokens divided": (lambda: model("gpt", tied=False), {"sequence_parallel": True}),
    "llama": (lambda: model("llama", tied=False, kv_heads=2), {}),
    "llama, tokens divided": (lambda: model("llama", kv_heads=2), {"sequence_parallel": True}),
    "Llama of transformers": (lambda: transformers_model("Llama"), {}),
    "GPT-NeoX of transformers, tokens divided": (lambda: transformers_model("GPTNeoX"), {"sequence_parallel": True}),
    "Qwen3 of transformers": (lambda: transformers_model("Qwen3"), {}),
    "GPT-2 of transformers": (lambda: transformers_model("GPT2"), {"plan": GPT2_PLAN}),
}

TRAINED = sample_of(MODELS, 3)


@contextmanager
def laid(**sizes: int) -> Iterator[None]:
    mesh.set_mesh({"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1} | sizes, "cpu")
    try:
        yield
    finally:
        mesh.clear_mesh()


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    tensors: dict[str, np.ndarray]
    """Whole tensors of the final state."""
    evaluated: float
    """Loss of the evaluated weights, which may be an average, on the first batch."""


def composed(build: Callable[[], nn.Module], chosen: Chosen, steps: int) -> Composition:
    techniques = with_optimizer([technique(name, **settings) for name, settings in chosen])
    return compose(replace(plain_run(), build=build), techniques, steps)


def trained(build: Callable[[], nn.Module], chosen: Chosen = (), steps: int = STEPS) -> Run:
    run = composed(build, chosen, steps)
    state = run.start()
    records = advance(run, state)
    run.verify(state)
    return Run(losses(records), [record.gradient_norm for record in records], whole(state), evaluated_loss(run, state))


def whole(state: TrainState) -> dict[str, np.ndarray]:
    return {name: full_value(tensor).numpy() for name, tensor in state.tensors().items()}


LAMB = [
    ("optimizers.lamb", {"slices": True}),
    ("gradients.clip", {"max_norm": 0.5}),
    ("large_batch.gradient_accumulation", {}),
]
GROWING = [("sparsity.rigl", {}), ("growth.stacking", {}), ("memory.recompute", {})]


def models_on_two() -> dict[str, Run]:
    """Return the first steps of every model."""
    with laid(tensor=2):
        return {name: trained(build, [(TENSOR, settings)], 4) for name in TRAINED for build, settings in [MODELS[name]]}


def runs_on_four() -> dict[str, Run]:
    def gpt() -> nn.Module:
        return model("gpt")

    def llama() -> nn.Module:
        return model("llama", tied=False, kv_heads=2)

    tokens = (TENSOR, {"sequence_parallel": True})
    found = {}
    with laid(tensor=4):
        found["gpt"] = trained(gpt, [tokens, *LAMB])
    with laid(tensor=2, replicate=2):
        found["llama x replicate"] = trained(llama, [(TENSOR, {}), ("parallelism.replicate", {}), *LAMB])
        found["growing x replicate"] = trained(gpt, [tokens, ("parallelism.replicate", {}), *GROWING], 6)
    with laid(tensor=2, shard=2):
        found["gpt x shard"] = trained(gpt, [tokens, ("parallelism.shard", {}), *LAMB])
        found["llama x shard"] = trained(llama, [(TENSOR, {}), ("parallelism.shard", {})])
        found["growing x shard"] = trained(gpt, [(TENSOR, {}), ("parallelism.shard", {}), *GROWING], 6)
    return found


def gradients(made: nn.Module, *inputs: Any) -> dict[str, np.ndarray]:
    """Return the output of a model, and the gradients of all parameters from a fixed weighting of it."""
    hidden = made(*inputs)
    weighting = torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)
    (made.head(hidden).square().mean() + (hidden * weighting).mean()).backward()
    if SPLITTING.get(made) is not None:
        settle_gradients(made, SPLITTING.of(made).summed, mesh.axis("tensor").group)
    found = {"hidden": hidden.detach()}
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            found[name] = full_value(parameter.grad, order_of(parameter))
    return {name: tensor.numpy() for name, tensor in found.items()}


def family(style: str) -> tuple[nn.Module, tuple[Any, ...]]:
    tokens = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[1, 9:] = False
    inputs: Mapping[str, tuple[Any, ...]] = {"bert": (tokens, keep), "gpt1": (tokens,)}
    return model(style), inputs.get(style, (tokens, tokens.flip(1), keep))


FAMILIES = ("gpt1", "bert", "t5", "marian")


def families_on_two() -> dict[tuple[str, bool], dict[str, np.ndarray]]:
    found = {}
    with laid(tensor=2):
        for style, along_tokens in product(FAMILIES, (False, True)):
            made, inputs = family(style)
            found[style, along_tokens] = gradients(
                technique(TENSOR, sequence_parallel=along_tokens).model(made), *inputs
            )
    return found


def finished() -> tuple[bool, bool]:
    """Return True if a gathered split model has the names, values and results of the plain one, and nothing else."""
    with laid(tensor=2):
        one = technique(TENSOR)
        plain, made = model("llama", kv_heads=2), one.model(model("llama", kv_heads=2))
        made = one.finish(made)
    tokens = torch.arange(12)[None]
    pairs = zip(plain.named_parameters(), made.named_parameters(), strict=True)
    same = all(name == other and torch.equal(value, values) for (name, value), (other, values) in pairs)
    tied = made.head.weight is made.embedding.token.weight
    return same and tied, torch.equal(plain.logits(tokens), made.logits(tokens))


def noticed() -> str:
    """Return the error when the first rank's norm differs from the others'."""
    with laid(tensor=2):
        run = composed(lambda: model("gpt"), [(TENSOR, {})], 2)
        state = run.start()
        run.verify(state)
        assert state.model is not None
        with torch.no_grad():
            state.model.norm.weight += dist.get_rank() == 0
        try:
            run.verify(state)
        except IntegrityError as error:
            return str(error)
        return ""


class Widths(TorchDispatchMode):
    """Recorder of the row widths of all matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {made.shape[-1] for made in tree_leaves(result) if isinstance(made, Tensor) and made.ndim > 1}
        return result


def loss_problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias, targets and loss weights."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((50, 8), (41, 8), (41,)))
    targets = torch.randint(41, (50,), generator=generator)
    targets[::7] = chunked_cross_entropy.IGNORED
    return hidden, weight, bias, targets, torch.rand(50, generator=generator)


def loss_values(factor: float, divided: bool) -> tuple[list[np.ndarray], set[int]]:
    """Return losses, normalizers, the three gradients and scores, and the widths of created matrices.

    A `factor` other than 0 adds a term of the normalizers to the loss.
    """
    hidden, weight, bias, targets, expected = loss_problem(torch.float64)
    losses_of, scores_of = chunked_cross_entropy.linear_cross_entropy, chunked_cross_entropy.gradient_norm_scores
    if divided:
        over = mesh.submesh("tensor")
        weight, bias = (distribute_tensor(tensor, over, [Shard(0)]) for tensor in (weight, bias))
        losses_of, scores_of = (
            vocab_parallel_cross_entropy.linear_cross_entropy,
            vocab_parallel_cross_entropy.gradient_norm_scores,
        )
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight, bias)]
    with Widths() as widths:
        found = losses_of(leaves[0], leaves[1], targets, expected, bias=leaves[2], chunk=16)
        ((found[0] * expected).sum() * 3 + factor * found[1].square().sum()).backward()
        scores = scores_of(hidden, weight, targets, bias=bias, chunk=16)
    made = [*found, *(leaf.grad for leaf in leaves), scores]
    return [full_value(tensor).numpy() for tensor in made], widths.seen


def losses_on_ranks() -> list[tuple[list[np.ndarray], set[int]]]:
    with laid(tensor=dist.get_world_size()):
        return [loss_values(factor, divided=True) for factor in (0.0, 0.1)]


def dropped_model() -> nn.Module:
    """Return a model with dropout of half of the elements at two places of each block: the input of attention, and
    between the matrices of the feed-forward network.
    """
    made = model("gpt")
    for block in made.blocks:
        block.attention_norm = nn.Sequential(block.attention_norm, nn.Dropout(0.5))
        block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(0.5))
    return made


def masks(settings: Mapping[str, Any], again: bool) -> tuple[dict[str, list[np.ndarray]], Run]:
    """Return the dropout masks of each place and call, for one step; and two steps."""
    chosen = [(TENSOR, settings), *([("memory.recompute", {})] if again else [])]
    run = composed(dropped_model, chosen, 2)
    state = run.start()
    seen: dict[str, list[np.ndarray]] = {}
    assert state.model is not None
    for name, module in state.model.named_modules():
        if isinstance(module, nn.Dropout):

            def keep(_: nn.Module, given: Any, result: Tensor, name: str = name) -> None:
                seen.setdefault(name, []).append((result == 0).detach().numpy())

            module.register_forward_hook(keep)
    advance(run, state, 1)
    made = {name: list(each) for name, each in seen.items()}
    records = advance(run, state)
    return made, Run(losses(records), [], whole(state), evaluated_loss(run, state))


def dropped_on_two() -> dict[tuple[bool, bool], tuple[dict[str, list[np.ndarray]], Run]]:
    with laid(tensor=2):
        pairs = [(tokens, again) for tokens in (False, True) for again in (False, True)]
        return {(tokens, again): masks({"sequence_parallel": tokens}, again) for tokens, again in pairs}


@dataclass
class Held:
    parameters: int
    optimizer: int
    sent: dict[str, int]
    """Number of calls by kind of collective in one step."""


def held_on_two(along_tokens: bool) -> Held:
    """Return the bytes on this rank, and its collectives."""
    with laid(tensor=2):
        run = composed(lambda: model("gpt", tied=False), [(TENSOR, {"sequence_parallel": along_tokens})], 2)
        state = run.start()
        assert state.model is not None and state.optimizer is not None
        slots = [tensor for tensors in state.optimizer.slots.values() for tensor in tensors]
        sizes = [
            sum(t.untyped_storage().nbytes() for t in local_tensors([*some]))
            for some in (state.model.parameters(), slots)
        ]
        with CommDebugMode() as sent:
            run.backward(state.model, run.objective, run.source.at(0))
        counts = {str(kind).rpartition(".")[2]: count for kind, count in sent.get_comm_counts().items()}
        return Held(sizes[0], sizes[1], counts)


def predicted_on_two() -> tuple[Footprint, int]:
    """Return the predicted footprint of a float32 model, and the bytes of this rank's parameters."""
    with laid(tensor=2):
        run = compose(plain_run(style="gpt", tied=False), with_optimizer([technique(TENSOR)]), 2)
        state = run.start()
        assert state.model is not None
        held = sum(tensor.untyped_storage().nbytes() for tensor in local_tensors([*state.model.parameters()]))
        return explain(run).footprint, held


def refusals() -> list[str]:
    """Return the errors for models that cannot be split as requested."""
    found = []
    with laid(tensor=dist.get_world_size()):
        over = mesh.submesh("tensor")
        for made, plan in (
            (model("llama", kv_heads=2), ()),
            (transformers_model("GPT2"), ()),
            (transformers_model("GPT2"), ("*.c_attn=column", "*.attn.c_proj=sideways")),
            (transformers_model("GPT2"), ("*.c_attn=column", "*.mlp.c_proj=row")),
        ):
            try:
                split_model(made, over, plan)
                found.append("")
            except RefusedError as refused:
                found.append(str(refused))
        made = model("gpt")
        split_model(made, over, along_tokens=True)
        try:
            made(torch.zeros(1, 7, dtype=torch.long))
        except UsageError as error:
            found.append(str(error))
    return found


CHECKPOINTED: Chosen = [("optimizers.adafactor", {}), ("sparsity.rigl", {"every": 2})]


def written(folder: Path, name: str, chosen: Chosen) -> dict[str, str]:
    """Train three steps and save; return digests of the saved tensors."""
    run = composed(lambda: model("gpt"), [*CHECKPOINTED, *chosen], 8)
    state = run.start()
    advance(run, state, 3)
    ranks = ProcessGroupSync() if dist.is_initialized() else None
    checkpoint.save(folder / name, 3, state.tensors(), state.scalars(), ranks=ranks)
    return digests(state)


def read(folder: Path, name: str, chosen: Chosen, again: str = "") -> dict[str, str]:
    """Load a fresh state and save it as `again`; return digests of the loaded tensors."""
    run = composed(lambda: model("gpt"), [*CHECKPOINTED, *chosen], 8)
    ranks = ProcessGroupSync() if dist.is_initialized() else None
    found = checkpoint.find(folder / name, ranks=ranks)
    state = run.init_state()
    checkpoint.fill(found, state.tensors(), ranks=ranks)
    state.load_scalars(found.scalars)
    if again:
        checkpoint.save(folder / again, 3, state.tensors(), state.scalars(), ranks=ranks)
    return digests(state)


def digests(state: TrainState) -> dict[str, str]:
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in whole(state).items()}


def checkpoints_on_two(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the checkpoint of two ranks, and their reading of the checkpoint of one process."""
    with laid(tensor=2):
        chosen = [(TENSOR, {})]
        return written(folder, "of two", chosen), read(folder, "of one", chosen)


def checkpoints_on_four(folder: Path) -> list[dict[str, str]]:
    """Return four ranks' reading of the checkpoint of two, along one axis and along two, and save it again."""
    with laid(tensor=4):
        along_one = read(folder, "of two", [(TENSOR, {})], again="of four")
    with laid(tensor=2, shard=2):
        along_two = read(folder, "of two", [(TENSOR, {}), ("parallelism.shard", {})], again="of two by two")
        return [along_one, along_two, read(folder, "of four", [(TENSOR, {}), ("parallelism.shard", {})])]


def with_each(names: Sequence[str]) -> dict[str, Run | str]:
    """Return a run with each other technique, or the reason of its refusal."""
    found: dict[str, Run | str] = {}
    with laid(tensor=2):
        for name in names:
            torch._dynamo.reset()
            try:
                found[name] = with_one(name)
            except (RefusedError, UsageError) as refused:
                found[name] = str(refused)
    return found


def with_one(name: str) -> Run:
    run = compose(plain_run(tied=name != "optimizers.lion"), with_optimizer([technique(TENSOR), technique(name)]), 4)
    state = run.start()
    records = advance(run, state)
    run.verify(state)
    tensors = {key: np.empty(tensor.shape) for key, tensor in state.tensors().items()}
    assert state.model is not None and any(isinstance(p, DTensor) for p in state.model.parameters())
    return Run(losses(records), [record.gradient_norm for record in records], tensors, evaluated_loss(run, state))


def all_on_two(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    return {
        "models": models_on_two(),
        "families": families_on_two(),
        "finished": finished(),
        "noticed": noticed(),
        "losses": losses_on_ranks(),
        "dropped": dropped_on_two(),
        "held": {tokens: held_on_two(tokens) for tokens in (False, True)},
        "predicted": predicted_on_two(),
        "checkpoints": checkpoints_on_two(folder),
        "each": with_each(names),
    }


def all_on_four(folder: Path) -> dict[str, Any]:
    return {
        "runs": runs_on_four(),
        "losses": losses_on_ranks(),
        "refusals": refusals(),
        "checkpoints": checkpoints_on_four(folder),
    }
