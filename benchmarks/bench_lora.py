"""Training step with LoRA on a transformers model against peft's on the same weights: time and memory.

Promise: no slower and no more memory, for queries and values alone and for all linear layers. Times are compared within
a round. Bytes are counted: the memory of a step beyond the parameters, at its peak and after its forward pass.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

from side_by_side import print_timings, rows, side_by_side, write
from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.techniques.adapters.lora import Lora

RANK, ALPHA = 8, 16
TOKENS = torch.randint(1000, (4, 128), generator=torch.Generator().manual_seed(0))
LLAMA: dict[str, int] = {
    "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8,
    "vocab_size": 1000, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2: dict[str, int] = {
    "n_layer": 4,
    "n_embd": 512,
    "n_head": 8,
    "vocab_size": 1000,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CASES: dict[str, tuple[Any, list[str]]] = {
    "Llama, queries and values": (transformers.LlamaConfig(**LLAMA), ["q_proj", "v_proj"]),
    "Llama, all linear layers": (
        transformers.LlamaConfig(**LLAMA),
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "GPT-2, all linear layers": (
        transformers.GPT2Config(**GPT2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
        ["c_attn", "c_proj", "c_fc"],
    ),
}


def base(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def ours(config: Any, targets: list[str], dropout: float) -> nn.Module:
    pattern = rf"\.({'|'.join(targets)})$"
    return Lora(rank=RANK, alpha=ALPHA, dropout=dropout, where=pattern, slices="").attach(base(config))


def theirs(config: Any, targets: list[str], dropout: float) -> nn.Module:
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=targets)
    return peft.get_peft_model(base(config), settings).train()


def loss(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss


def step(model: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def one() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return one


def held(model: nn.Module) -> dict[str, int]:
    with gc_disabled(), StepTrace(*model.parameters(), *model.buffers(), TOKENS) as trace:
        result = loss(model)
        forward = trace.now
        result.backward()
    model.zero_grad()
    return {"after the forward pass": forward, "at the peak": trace.peak}


def main() -> None:
    facts: dict[str, Any] = {}
    for title, (config, targets) in CASES.items():
        for dropout in (0.0, 0.1):
            models = {"ours": ours(config, targets, dropout), "peft": theirs(config, targets, dropout)}
            counts = {name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in models.items()}
            assert counts["ours"] == counts["peft"]
            timings = side_by_side({name: step(model) for name, model in models.items()}, rounds=16, warmup=3)
            bytes_held = {name: held(model) for name, model in models.items()}
            case = f"{title}, dropout {dropout:g}"
            print_timings(f"{case}: {counts['ours']:,} trained parameters", timings, "peft")
            for name, each in bytes_held.items():
                sizes = [f"{count / 1e6:.2f} MB {when}" for when, count in each.items()]
                print(f"  {name:<34} {', '.join(sizes)}")
            facts[case] = {"seconds": rows(timings, "peft"), "bytes": bytes_held}
    if len(sys.argv) > 1:
        versions = {"peft": peft.__version__, "transformers": transformers.__version__}
        write(Path(sys.argv[1]), {"benchmark": "lora", "cases": facts, **versions})


if __name__ == "__main__":
    main()
