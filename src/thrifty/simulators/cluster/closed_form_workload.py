"""The workload of a Transformer in closed form, computed from the sizes of the model. Tests compare traced workloads
with this workload.

Saved bytes follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): s·h·(34 + 5·a·s/h) for a block with dropout
and 16-bit elements. FLOPs follow Narayanan et al. 2021 (arXiv 2104.04473, appendix). Moved bytes are counted here: the
reads and writes of each kernel, with a chain of elementwise operations as one kernel.

Symbols: s tokens, h width, a heads, g width of all keys, f inner width, v vocabulary.
"""

from dataclasses import dataclass

from thrifty.simulators.cluster.workload import DividedAmount, PassWork, Workload, WorkloadPart

ITEM = 2
"""Bytes per element in bfloat16 or float16."""
ACCURATE = 4
"""Bytes per element of losses and norm statistics, in float32."""


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder. By default, `kv_heads` = `heads` and `hidden` = 4 · `width`."""

    depth: int
    width: int
    heads: int
    length: int
    vocabulary: int
    kv_heads: int = 0
    hidden: int = 0
    gated: bool = False
    """True for a gated MLP and rotary positions without biases, as in Llama; False for the GPT architecture."""
    tied: bool = True
    dropout: bool = False
    flash: bool = True
    """True if attention saves no (s, s) tensor and recomputes the scores in the backward pass."""

    @property
    def keys(self) -> int:
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def inner(self) -> int:
        return self.hidden or 4 * self.width


def transformer(name: str, sizes: DecoderSizes) -> Workload:
    """Return the workload of a pre-norm decoder trained on next-token prediction."""
    block = _block(sizes)
    return Workload(
        name,
        blocks=(block,) * sizes.depth,
        embedding=_embedding(sizes),
        head=_head(sizes),
        length=sizes.length,
        itemsize=ITEM,
        shared=float(sizes.vocabulary * sizes.width) if sizes.tied else 0.0,
    )


def _products(z: DecoderSizes) -> float:
    """Return the forward FLOPs of a block's matrix products with weights."""
    return 2.0 * z.length * _weights(z)


def _weights(z: DecoderSizes) -> float:
    networks = (3 if z.gated else 2) * z.width * z.inner
    return z.width * (z.width + 2 * z.keys) + z.width * z.width + networks


def _block(z: DecoderSizes) -> WorkloadPart:
    s, h, f, g = z.length, z.width, z.inner, z.keys
    split_biases, biases_and_norms = (0, 2 * h) if z.gated else (h + 2 * g + f, 6 * h)
    attention, core, attention_backward = _attention(z)
    forward, backward = _around_attention(z)
    stream, core_saved = float(s * h * ITEM), _core_saved(z)
    saved = DividedAmount(
        # q, k, v; input of the output projection; inputs and outputs of the activation function
        split=ITEM * s * ((h + 2 * g) + h + (3 if z.gated else 2) * f + (f if z.gated else 0)),
        # both norms' inputs and outputs, and two masks
        whole=4 * stream + (2.0 * s * h if z.dropout else 0.0),
    )
    return WorkloadPart(
        "block",
        DividedAmount(split=_weights(z) + split_biases, whole=biases_and_norms),
        forward + attention,
        backward + attention_backward,
        saved + core_saved,
        entry=stream,
        for_weights=DividedAmount(_products(z)),
        core=core,
        core_saved=DividedAmount() if z.flash else core_saved,
    )


def _around_attention(z: DecoderSizes) -> tuple[PassWork, PassWork]:
    """Return the forward and backward work of a block, without attention between q, k, v and the output projection.

    A matrix product reads and writes its activations once forward and twice backward. A norm reads and writes its
    activations once. A residual sum reads two tensors and writes one tensor.
    """
    s, h, f, qkv = z.length, z.width, z.inner, z.width + 2 * z.keys
    up = f * (2 if z.gated else 1)
    stream, masks = float(s * h * ITEM), 2.0 * s * h if z.dropout else 0.0
    turned = 2.0 * s * (h + z.keys) * ITEM if z.gated else 0.0
    moved = DividedAmount(ITEM * s * (qkv + h + up + (up + f) + f) + turned, stream * (2 * 2 + 4 + 2 * 3) + masks)
    # gradients of q, k and v are concatenated; gradients of biases read the inputs of products once more
    joined = 2 * qkv + (0 if z.gated else qkv + f)
    moved_back = DividedAmount(
        ITEM * s * (3 * qkv + 2 * h + 3 * up + (2 * up + f) + 2 * f + joined) + turned,
        stream * (2 * 3 + 2 * (2 + 2) + 2 * 3 + (0 if z.gated else 2)) + masks,
    )
    # intermediate tensors of the gate, of rotary positions, and between dropout and the residual sum
    between = DividedAmount((2.0 * ITEM * s * f if z.gated else 0.0) + 3 * turned, 4 * stream if z.dropout else 0.0)
    forward = PassWork(DividedAmount(_products(z)), moved, moved + between, 12 if z.gated else 10, 2 * stream, 2)
    between += DividedAmount(ITEM * s * f if z.gated else 0.0)
    backward = PassWork(
        DividedAmount(2 * _products(z)), moved_back, moved_back + between, forward.kernels + 8, 2 * stream, 2
    )
    return forward, backward


def _core_saved(z: DecoderSizes) -> DividedAmount:
    if z.flash:
        return DividedAmount(split=float(ACCURATE * z.heads * z.length))
    scores = float(z.heads * z.length * z.length)
    return DividedAmount(split=scores * (ITEM + (1 + ITEM if z.dropout else 0)))


def _attention(z: DecoderSizes) -> tuple[PassWork, PassWork, PassWork]:
    """Return the work of attention after q, k, v and before the output projection.

    The three values are forward, the part that selective recompute repeats, and backward."""
    s, h, g = z.length, z.width, z.keys
    scores = float(z.heads * s * s)
    product = 2.0 * s * s * h
    rows, key_rows = float(ITEM * s * h), float(ITEM * s * g)
    if z.flash:
        return _fused(2 * product, 2 * (rows + key_rows)), PassWork(), _fused(5 * product, 4 * (rows + key_rows))
    drop, drop_again = ((ITEM + ITEM + 1), (ITEM + 1 + ITEM)) if z.dropout else (0, 0)
    core = PassWork(
        DividedAmount(product),
        moved=DividedAmount(rows + key_rows + scores * (ITEM + 2 * ITEM + drop)),
        unfused=DividedAmount(rows + key_rows + scores * (ITEM + 3 * 2 * ITEM + drop)),
        kernels=3 if z.dropout else 2,
    )
    values = PassWork(DividedAmount(product), *(DividedAmount(rows + key_rows + scores * ITEM),) * 2, kernels=1)
    # gradients of the dropped probabilities and of v, then of the scores, then of q and k
    seen = scores * (2 * ITEM + 3 * ITEM + 2 * ITEM)
    backward = PassWork(
        DividedAmount(4 * product),
        moved=DividedAmount(4 * rows + 4 * key_rows + seen + scores * drop_again),
        unfused=DividedAmount(4 * rows + 4 * key_rows + seen + scores * (drop_again + 2 * 2 * ITEM)),
        kernels=6 if z.dropout else 5,
    )
    return core + values, core, backward


def _fused(flops: float, moved: float) -> PassWork:
    products, bytes_moved = DividedAmount(flops), DividedAmount(moved)
    return PassWork(products, bytes_moved, bytes_moved, kernels=1, attention=products)


def _embedding(z: DecoderSizes) -> WorkloadPart:
    stream = float(z.length * z.width * ITEM)
    mask = float(z.length * z.width) if z.dropout else 0.0
    positions = 0 if z.gated else z.length * z.width
    look = DividedAmount(whole=stream * (2 if z.gated else 5) + (2 * stream + mask if z.dropout else 0))
    back = DividedAmount(whole=2 * stream + mask)
    return WorkloadPart(
        "embedding",
        DividedAmount(split=z.vocabulary * z.width, whole=positions),
        PassWork(moved=look, unfused=look, kernels=3, reduced=stream, reduces=1),
        PassWork(moved=back, unfused=back, kernels=2),
        saved=DividedAmount(whole=8.0 * z.length + mask),
        entry=8.0 * z.length,
        is_block=False,
    )


def _head(z: DecoderSizes) -> WorkloadPart:
    """Return the work of the last norm, the vocabulary projection, and the loss on float32 logits."""
    stream, logits = float(z.length * z.width * ITEM), float(z.length * z.vocabulary)
    product = 2.0 * logits * z.width
    parameters = DividedAmount(
        split=0.0 if z.tied else float(z.vocabulary * z.width), whole=float(z.width * (1 if z.gated else 2))
    )
    return WorkloadPart(
        "head",
        parameters,
        PassWork(
            DividedAmount(product),
            moved=DividedAmount(logits * (ITEM + ITEM + 2 * ACCURATE), 3 * stream),
            unfused=DividedAmount(logits * (ITEM + ITEM + 2 * 2 * ACCURATE), 3 * stream),
            kernels=5,
        ),
        PassWork(
            DividedAmount(2 * product),
            moved=DividedAmount(logits * (3 * ACCURATE + ITEM + 2 * ITEM), 5 * stream),
            unfused=DividedAmount(logits * (5 * ACCURATE + ITEM + 2 * ITEM), 5 * stream),
            kernels=7,
            reduced=stream,
            reduces=1,
        ),
        saved=DividedAmount(logits * ACCURATE, 2 * stream),
        entry=stream,
        for_weights=DividedAmount(product),
        is_block=False,
    )
