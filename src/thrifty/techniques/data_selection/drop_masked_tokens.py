"""3ML (Liao et al. 2022): encode only unmasked tokens, insert masks in a small decoder.

Paper       Liao et al. 2022, Mask More and Mask Later (3ML, arXiv 2211.04898).
Promise     The encoder processes a fraction 1 - 0.8 · rate of the tokens, 60 % at a mask rate of 0.5. The paper reports
            no loss of quality after fine-tuning at this mask rate.
Use         run = thrifty.train("bert-nano", "my.txt", loss="masked_token",
                                techniques=["drop_masked_tokens"], budget="2000 steps")
Start with  `drop_masked_tokens:blocks=2` with `--set objective.rate=0.5`. Try `attend=cross` for a cheaper decoder.
Cost        The decoder adds `blocks` blocks on all tokens (`attend=self`) or on predicted tokens (`attend=cross`). The
            output head runs for each predicted token, which is expensive with a large vocabulary.
Avoid       A mask rate of 0.15, because the encoder saves only 12 %. Shallow models, because a decoder block costs as
            much as an encoder block.
Does not    Make losses at different mask rates comparable, or change the masking: the encoder still reads predicted
            tokens that are random (10 %) or unchanged (10 %).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, class_name
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.token_gather import gather_tokens, scatter_tokens
from thrifty.modeling.module_surgery import first_of, wrap_forward
from thrifty.modeling.parameter_kinds import is_matrix
from thrifty.modeling.visible_tokens import Rest, prepare, visible_tokens_only

Attend = Literal["self", "cross"]


def attention_over(q: Tensor, kv: Tensor, head_width: int) -> Tensor:
    """Return the softmax attention (b, k, d) of queries (b, k, d). `kv` (b, n, 2 d) is the n keys and values."""
    queries = q.unflatten(-1, (-1, head_width)).transpose(1, 2)
    keys, values = kv.unflatten(-1, (-1, head_width)).transpose(1, 2).chunk(2, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)


@torch.no_grad()
def random_like(pattern: Tensor, key: str, shape: Sequence[int] = ()) -> nn.Parameter:
    """Return a parameter of random normal values with the standard deviation of `pattern`, seeded by `key`.

    The default shape is the shape of `pattern`.
    """
    values = pattern.new_empty(shape or pattern.shape)
    return nn.Parameter(values.normal_(generator=keyed_generator(key, values)) * pattern.std())


def block_like(block: nn.Module, key: str) -> nn.Module:
    """Copy a block, or a module of a block, with new random matrices. Vectors keep their values."""
    parameters = {
        id(values): random_like(values, f"{key}.{name}")
        if is_matrix(name, values)
        else nn.Parameter(values.detach().clone(), values.requires_grad)
        for name, values in block.named_parameters()
    }
    return deepcopy(block, parameters)  # type: ignore[arg-type]


class DecoderCrossAttention(nn.Module):
    """Cross-attention over the encoder's states, with the sizes of `attention`. `key` seeds the initial values."""

    def __init__(self, attention: nn.Module, key: str):
        super().__init__()
        self.head_width, width = attention.head_width, attention.out.in_features
        pattern = attention.out.weight
        like = {"device": pattern.device, "dtype": pattern.dtype}
        self.q = nn.Linear(attention.qkv.in_features, width, **like)
        self.kv = nn.Linear(attention.qkv.in_features, 2 * width, **like)
        self.out = nn.Linear(width, attention.out.out_features, **like)
        for name in ("q", "kv", "out"):
            layer = getattr(self, name)
            layer.weight = random_like(pattern, f"{key}.{name}", layer.weight.shape)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.out(attention_over(self.q(x), self.kv(memory), self.head_width))


class MaskDecoder(nn.Module):
    """A decoder with a learned mask vector, and copies of the encoder's first block with new random matrices.

    With `attend="cross"` each block also attends to the encoder's states.
    """

    def __init__(self, model: nn.Module, blocks: int, attend: Attend, seed: int):
        super().__init__()
        table, first, key = model.embedding.token.weight, model.blocks[0], f"{seed}/mask_decoder"
        self.attend = attend
        self.mask = random_like(table, f"{key}.mask", table.shape[1:])
        self.blocks = nn.ModuleList(block_like(first, f"{key}.{index}") for index in range(blocks))
        if attend == "cross":
            for index, block in enumerate(self.blocks):
                block.cross_attention_norm = block_like(block.attention_norm, key)
                block.cross_attention = DecoderCrossAttention(block.attention, f"{key}.{index}.cross_attention")

    def forward(self, states: Tensor, absent: Tensor, visible: Tensor, places: Tensor) -> Tensor:
        """Return the states (b, k, d) at the positions to predict, `places` (b, k).

        `states` (b, n, d) are encoder states at the `visible` positions (b, n). `absent` (1, t, d) is the mask vector
        at each of the t positions.
        """
        x = scatter_tokens(states, visible, absent, absent.shape[1])
        if self.attend == "self":
            for block in self.blocks:
                x = block(x)
            return gather_tokens(x, places)
        x = gather_tokens(x, places)
        for block in self.blocks:
            x = block(x, None, states)
        return x


def read_around_masks(
    model: nn.Module,
    inner: Any,
    tokens: Tensor,
    *context: Any,
    visible: Tensor | None = None,
    places: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """Return the states (b, k, d) at the positions to predict, `places` (b, k), of texts `tokens` (b, t).

    The encoder reads only the positions `visible` (b, n). Without `visible`, run the model's own forward pass.
    """
    if visible is None:
        return inner(tokens, *context, **named)
    absent = model.embedding.placed(model.mask_decoder.mask.expand(1, tokens.shape[1], -1))
    states = model.embedding(tokens.gather(1, visible), visible)
    for block in model.blocks:
        states = block(states)
    return model.transform(model.mask_decoder(states, absent, visible, places))


def decode(blocks: nn.ModuleList, states: Tensor, rest: Rest) -> Tensor:
    """Return the states (b, t, d) after the decoder's blocks. `rest` are the arguments of a block after its input."""
    for block in blocks:
        states = first_of(block(states, *rest[0], **rest[1]))
    return states


class VisibleTokenObjective(WrappedObjective):
    """A masked-token objective whose encoder reads visible tokens only."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if "visible" not in batch.fields:
            raise RefusedError(
                "the batches have no field `visible` with visible tokens", fix="--set objective.name=masked_token"
            )
        if not batch["visible"].shape[1]:
            raise RefusedError(
                "every token of a text is masked, so the encoder has no input", fix="--set objective.rate=0.5, or lower"
            )
        if not isinstance(model.mask_decoder, MaskDecoder):
            with visible_tokens_only(model, batch["visible"], partial(decode, model.mask_decoder)):
                return self.inner.predict(model, batch)
        hidden = model(batch["tokens"], visible=batch["visible"], places=batch["places"])
        return Prediction(hidden=hidden, head=model.head)


class DropMaskedTokens(Technique):
    """The paper raises BERT's mask rate of 0.15 to 0.5 without loss of quality after fine-tuning. The paper reports 78
    % of the work for 12 blocks and 68 % for 24 blocks, which matches a decoder of two blocks. Visible tokens keep their
    positions in the whole text.

    `finish` drops the decoder and its mask vector. The exported encoder is meant for fine-tuning. The encoder never
    read a mask token, and the layers between its blocks and the head saw only decoder states. The encoder predicts
    masked tokens only after further training.

    The decoder "self" runs on the whole text, with the encoder states at their positions. The decoder "cross" is our
    reading of the paper's second decoder, for encoders of this package: tokens to predict attend to each other, then to
    the encoder states.

    Other encoders, of transformers or hand-written, need one stack of blocks that accept any number of tokens, with
    positions in the embedding or passed to each block. Their decoder is the whole text's with the model's own
    embeddings of masks, and the model's own head follows.
    """

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.ENCODER_INPUT, Claim.TOKENS_OF_BLOCKS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "the decoder has random initial values and must not be frozen",
        Claim.HEADS_AND_NEURONS: "a mask covers one stack of blocks, and the decoder is a second stack",
        Claim.PIPELINE_PARALLELISM: "the decoder is a second stack of blocks, and a pipeline divides one stack",
    }

    blocks: Positive = 2
    """Number of decoder blocks, which have the encoder's width."""
    attend: Attend = "self"
    """Decoder input: the whole text ("self"), or the tokens to predict, which attend to encoder states ("cross")."""
    seed: int = 0
    """Seed of the decoder's initial values."""

    def model(self, model: nn.Module) -> nn.Module:
        parts = (getattr(model, "embedding", None), "placed"), (model, "blocks"), (model, "transform"), (model, "head")
        if all(hasattr(owner, part) for owner, part in parts):
            blocks = model.blocks
            model.mask_decoder = MaskDecoder(model, self.blocks, self.attend, self.seed)
            wrap_forward(model, read_around_masks)
        elif self.attend == "self":
            _, blocks = prepare(model)
            key = f"{self.seed}/mask_decoder"
            model.mask_decoder = nn.ModuleList(block_like(blocks[0], f"{key}.{index}") for index in range(self.blocks))
        else:
            raise RefusedError(
                f"cross-attention to the states of {class_name(model)} is unknown",
                fix=f"--set techniques.{self.name}.attend=self",
            )
        parameters = sum(parameter.numel() for parameter in model.mask_decoder.parameters())
        add_note(f"a decoder of {self.blocks} blocks after {len(blocks)} encoder blocks, {parameters:,} parameters")
        return model

    def objective(self, objective: Objective) -> Objective:
        return VisibleTokenObjective(objective)

    def finish(self, model: nn.Module) -> nn.Module:
        del model.mask_decoder
        vars(model).pop("forward", None)
        return model
