"""Use techniques in the Trainer of transformers: the optimizer Muon, with its state in 8 bits.

    python examples/hf_trainer.py

Prints the algorithm of each parameter, and the loss before and after training.
"""

import torch
import transformers

import thrifty as th

TEXT = ("In the beginning was the loop, and the loop was with the trainer. " * 40).encode()


def main() -> None:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    rows = torch.tensor(list(TEXT[: len(TEXT) // 32 * 32])).view(-1, 32)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    optimizer = th.optim.Muon(model, lr=1e-2)
    print(th.summary(optimizer))
    model, optimizer = th.apply((model, optimizer), "optimizer_state", format="int8", min_elements=64)
    arguments = transformers.TrainingArguments(
        "trainer", max_steps=100, per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=examples, eval_dataset=examples[:16], optimizers=(optimizer, None)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    print(f"loss {before:.2f} before, {trainer.evaluate()['eval_loss']:.2f} after")


if __name__ == "__main__":
    main()
