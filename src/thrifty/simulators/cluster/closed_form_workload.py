"""A Transformer's workload from its sizes alone, by formulas: any size at once, and a check on what is traced.

Bytes saved are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), s·h·(34 + 5·a·s/h) for a block with
dropout and 16-bit numbers; FLOPs those of Narayanan et al. 2021 (arXiv 2104.04473, appendix). Bytes moved are ours:
what each kernel reads and writes, chains of elementwise operations as one kernel.

Shapes in the formulas: s tokens, h width, a heads, g width of all keys, f inner width, v vocabulary.
"""

from dataclasses import dataclass

from thrifty.simulators.cluster.workload import Divided, Part, Work, Workload

ITEM = 2
"""Bytes of a number in bfloat16 or float16."""
ACCURATE = 4
"""Bytes of a number where losses and statistics of norms are taken, in float32."""


@dataclass(frozen=True)
class Sizes:
    """Of a decoder. `kv_heads` and `hidden` follow heads and 4 · width unless given."""

    depth: int
    width: int
    heads: int
    length: int
    vocabulary: int
    kv_heads: int = 0
    hidden: int = 0
    gated: bool = False
    """A gated network and rotary positions, without biases, as in Llama; otherwise GPT's."""
    tied: bool = True
    dropout: bool = False
    flash: bool = True
    """Whether attention keeps nothing of size s·s, its backward pass making the scores again."""

    @property
    def keys(self) -> int:
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def inner(self) -> int:
        return self.hidden or 4 * self.width


def transformer(name: str, sizes: Sizes) -> Workload:
    """The workload of a pre-norm decoder of these sizes, trained on next tokens."""
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


def _products(z: Sizes) -> float:
    """FLOPs of the block's products with weights, forward."""
    return 2.0 * z.length * _weights(z)


def _weights(z: Sizes) -> float:
    networks = (3 if z.gated else 2) * z.width * z.inner
    return z.width * (z.width + 2 * z.keys) + z.width * z.width + networks


def _block(z: Sizes) -> Part:
    s, h, f, g = z.length, z.width, z.inner, z.keys
    split_biases, biases_and_norms = (0, 2 * h) if z.gated else (h + 2 * g + f, 6 * h)
    attention, core, of_attention = _attention(z)
    forward, backward = _around_attention(z)
    stream, core_saved = float(s * h * ITEM), _core_saved(z)
    saved = Divided(
        # q, k, v; what goes into the output product; what goes into and comes out of the activation
        split=ITEM * s * ((h + 2 * g) + h + (3 if z.gated else 2) * f + (f if z.gated else 0)),
        # both norms' inputs and outputs, and two masks
        whole=4 * stream + (2.0 * s * h if z.dropout else 0.0),
    )
    return Part(
        "block",
        Divided(split=_weights(z) + split_biases, whole=biases_and_norms),
        forward + attention,
        backward + of_attention,
        saved + core_saved,
        entry=stream,
        for_weights=Divided(_products(z)),
        core=core,
        core_saved=Divided() if z.flash else core_saved,
    )


def _around_attention(z: Sizes) -> tuple[Work, Work]:
    """Both passes of a block but for what is between q, k, v and what goes into the output product.

    Each product reads and writes activations once forward and twice backward, each norm once, and a sum of residuals
    reads two and writes one.
    """
    s, h, f, qkv = z.length, z.width, z.inner, z.width + 2 * z.keys
    up = f * (2 if z.gated else 1)
    stream, masks = float(s * h * ITEM), 2.0 * s * h if z.dropout else 0.0
    turned = 2.0 * s * (h + z.keys) * ITEM if z.gated else 0.0
    moved = Divided(ITEM * s * (qkv + h + up + (up + f) + f) + turned, stream * (2 * 2 + 4 + 2 * 3) + masks)
    # gradients of q, k and v are joined to one tensor; those of biases read once more what products read
    joined = 2 * qkv + (0 if z.gated else qkv + f)
    moved_back = Divided(
        ITEM * s * (3 * qkv + 2 * h + 3 * up + (2 * up + f) + 2 * f + joined) + turned,
        stream * (2 * 3 + 2 * (2 + 2) + 2 * 3 + (0 if z.gated else 2)) + masks,
    )
    # what stands between the operations of a gate, of rotary positions, of dropout and a sum
    between = Divided((2.0 * ITEM * s * f if z.gated else 0.0) + 3 * turned, 4 * stream if z.dropout else 0.0)
    forward = Work(Divided(_products(z)), moved, moved + between, 12 if z.gated else 10, 2 * stream, 2)
    between += Divided(ITEM * s * f if z.gated else 0.0)
    backward = Work(Divided(2 * _products(z)), moved_back, moved_back + between, forward.kernels + 8, 2 * stream, 2)
    return forward, backward


def _core_saved(z: Sizes) -> Divided:
    if z.flash:
        return Divided(split=float(ACCURATE * z.heads * z.length))
    scores = float(z.heads * z.length * z.length)
    return Divided(split=scores * (ITEM + (1 + ITEM if z.dropout else 0)))


def _attention(z: Sizes) -> tuple[Work, Work, Work]:
    """Attention between the products with weights: forward, the part of it that selective recompute repeats, and
    backward."""
    s, h, g = z.length, z.width, z.keys
    scores = float(z.heads * s * s)
    product = 2.0 * s * s * h
    rows, key_rows = float(ITEM * s * h), float(ITEM * s * g)
    if z.flash:
        forward = Work(Divided(2 * product), *(Divided(2 * rows + 2 * key_rows),) * 2, kernels=1)
        backward = Work(Divided(5 * product), *(Divided(4 * rows + 4 * key_rows),) * 2, kernels=1)
        return forward, Work(), backward
    drop, drop_again = ((ITEM + ITEM + 1), (ITEM + 1 + ITEM)) if z.dropout else (0, 0)
    core = Work(
        Divided(product),
        moved=Divided(rows + key_rows + scores * (ITEM + 2 * ITEM + drop)),
        unfused=Divided(rows + key_rows + scores * (ITEM + 3 * 2 * ITEM + drop)),
        kernels=3 if z.dropout else 2,
    )
    values = Work(Divided(product), *(Divided(rows + key_rows + scores * ITEM),) * 2, kernels=1)
    # gradients of the dropped probabilities and of v, then of the scores, then of q and k
    seen = scores * (2 * ITEM + 3 * ITEM + 2 * ITEM)
    backward = Work(
        Divided(4 * product),
        moved=Divided(4 * rows + 4 * key_rows + seen + scores * drop_again),
        unfused=Divided(4 * rows + 4 * key_rows + seen + scores * (drop_again + 2 * 2 * ITEM)),
        kernels=6 if z.dropout else 5,
    )
    return core + values, core, backward


def _embedding(z: Sizes) -> Part:
    stream = float(z.length * z.width * ITEM)
    mask = float(z.length * z.width) if z.dropout else 0.0
    positions = 0 if z.gated else z.length * z.width
    look = Divided(whole=stream * (2 if z.gated else 5) + (2 * stream + mask if z.dropout else 0))
    back = Divided(whole=2 * stream + mask)
    return Part(
        "embedding",
        Divided(split=z.vocabulary * z.width, whole=positions),
        Work(moved=look, unfused=look, kernels=3, reduced=stream, reduces=1),
        Work(moved=back, unfused=back, kernels=2),
        saved=Divided(whole=8.0 * z.length + mask),
        entry=8.0 * z.length,
        is_block=False,
    )


def _head(z: Sizes) -> Part:
    """The last norm, the product with the vocabulary, and the loss on float32 logits."""
    stream, logits = float(z.length * z.width * ITEM), float(z.length * z.vocabulary)
    product = 2.0 * logits * z.width
    parameters = Divided(
        split=0.0 if z.tied else float(z.vocabulary * z.width), whole=float(z.width * (1 if z.gated else 2))
    )
    return Part(
        "head",
        parameters,
        Work(
            Divided(product),
            moved=Divided(logits * (ITEM + ITEM + 2 * ACCURATE), 3 * stream),
            unfused=Divided(logits * (ITEM + ITEM + 2 * 2 * ACCURATE), 3 * stream),
            kernels=5,
        ),
        Work(
            Divided(2 * product),
            moved=Divided(logits * (3 * ACCURATE + ITEM + 2 * ITEM), 5 * stream),
            unfused=Divided(logits * (5 * ACCURATE + ITEM + 2 * ITEM), 5 * stream),
            kernels=7,
            reduced=stream,
            reduces=1,
        ),
        saved=Divided(logits * ACCURATE, 2 * stream),
        entry=stream,
        for_weights=Divided(product),
        is_block=False,
    )
