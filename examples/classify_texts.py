"""Classify texts: is a line Python code or English? A small encoder is trained from scratch.

    python examples/classify_texts.py

Prints accuracy and F1 on held-out lines, and classifies two sentences with a pipeline of transformers.
"""

import csv
import inspect
import textwrap
from pydoc_data.topics import topics

import transformers

import thrifty as th


def main() -> None:
    code = [line.strip() for line in inspect.getsource(textwrap).splitlines() if len(line.strip()) > 12]
    prose = [line.strip() for text in topics.values() for line in text.splitlines() if len(line) > 40][: 4 * len(code)]
    with open("lines.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows([(line, "code") for line in code] + [(line, "prose") for line in prose])
    run = th.train(
        "bert-nano",
        "lines.csv",
        loss="classification",
        techniques=[th.AdamW(lr=1e-3), "linear:warmup=0.1"],
        budget="200 steps",
        settings={"model.width": 64, "model.depth": 2, "data.length": 32, "data.batch": 32, "data.vocabulary": 1000},
        name="lines",
        quiet=True,
    )
    print({name: round(value, 3) for name, value in run.metrics.items()})
    th.export(run, "classifier")
    classify = transformers.pipeline("text-classification", "classifier")
    for line in ("for word in words: count += len(word)", "The rest of this section describes the syntax."):
        print(f"{classify(line)[0]['label']}: {line}")


if __name__ == "__main__":
    main()
