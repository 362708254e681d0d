"""Fine-tune a language model with LoRA, export it, and open the export in transformers.

    python examples/finetune_lora.py

The base model is trained here for a few seconds on the help texts of Python, because the example downloads nothing.
With a real base model, pass its Hugging Face folder as `model`. The adapter then learns Python code.
"""

import argparse
import ast
import inspect
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import transformers

import thrifty as th

SMALL = {"model.width": 64, "model.depth": 2, "data.length": 64, "data.vocabulary": 500, "data.batch": 16}


def main() -> None:
    Path("help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
    code = "\n\n".join(map(inspect.getsource, (argparse, ast, inspect, textwrap)))
    Path("code.txt").write_text(code, encoding="utf-8")
    base = th.train(
        "llama-nano",
        "help.txt",
        techniques=[th.AdamW(lr=5e-3)],
        budget="200 steps",
        settings=SMALL,
        name="base",
        quiet=True,
    )
    th.export(base, "base-model")

    run = th.train(
        "base-model",
        "code.txt",
        techniques=["lora:rank=8,alpha=16", th.AdamW(lr=1e-2)],
        budget="100 steps",
        settings={"data.length": 64, "data.batch": 16, "evaluation.at_start": True},
        name="adapted",
        quiet=True,
    )
    losses = run.records()["held_out_loss"].dropna()
    print(f"held-out loss on code: {losses.iloc[0]:.2f} before, {losses.iloc[-1]:.2f} after")

    th.export(run, "merged")  # the adapter is merged into the weights
    th.export(run, "adapter", part="adapter")  # a folder for PEFT
    model = transformers.AutoModelForCausalLM.from_pretrained("merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained("merged")
    prompt = tokenizer("def add(self, ", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]))


if __name__ == "__main__":
    main()
