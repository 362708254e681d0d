"""Verbs of the command line by task, with descriptions and examples. They are listed without importing the verbs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VerbHelp:
    about: str
    example: str


TASKS: dict[str, dict[str, VerbHelp]] = {
    "Train": {
        "train": VerbHelp("Train a model from a recipe.", "thrifty train text --data my.txt --budget 10min"),
        "resume": VerbHelp("Resume an interrupted run, bit-identically.", "thrifty resume runs/text"),
        "list": VerbHelp("List techniques by goal, recipes, presets, studies.", "thrifty list --search memory"),
        "show": VerbHelp("Show the card of a technique and its evidence.", "thrifty show lora"),
        "data": VerbHelp("List, fetch, inspect, score and prune datasets.", "thrifty data look my.txt"),
    },
    "Before a run": {
        "plan": VerbHelp(
            "Choose techniques, or a model size, for a budget.", "thrifty plan text --data my.txt --memory 2GB"
        ),
        "estimate": VerbHelp(
            "Predict the memory of a step; list changes that fit.", "thrifty estimate gpt-small --memory 8GB"
        ),
        "explain": VerbHelp("Show the effect of each technique of a recipe.", "thrifty explain kjv --with lora"),
        "check": VerbHelp("Test that a recipe keeps its promises.", "thrifty check text --data my.txt"),
        "doctor": VerbHelp("Measure this machine and report missing parts.", "thrifty doctor --quick"),
    },
    "Compare": {
        "compare": VerbHelp(
            "Compare variants of a recipe at an equal budget.", 'thrifty compare kjv --variant "--with growth.stacking"'
        ),
        "sweep": VerbHelp(
            "Search over settings, by successive halving.", "thrifty sweep text --over adamw.lr=1e-4..1e-2:log"
        ),
        "study": VerbHelp("Repeat a published experiment at small scale.", "thrifty study lion_rate"),
        "lottery": VerbHelp("Find lottery tickets: train, prune, rewind, repeat.", "thrifty lottery kjv --rounds 4"),
    },
    "Results": {
        "board": VerbHelp("Serve runs, curves and cards to the browser.", "thrifty board"),
        "report": VerbHelp("Write a run as one offline HTML page.", "thrifty report runs/text --open"),
        "track": VerbHelp("Copy a run to TensorBoard, MLflow, W&B or Trackio.", "thrifty track text --to tensorboard"),
    },
    "Trained models": {
        "sample": VerbHelp("Generate text.", 'thrifty sample runs/text --prompt "In the"'),
        "chat": VerbHelp("Chat with a model.", "thrifty chat runs/instruct"),
        "predict": VerbHelp("Predict labels of texts or images.", 'thrifty predict runs/reviews "A wonderful film."'),
        "retrieve": VerbHelp("Measure image-caption retrieval.", "thrifty retrieve runs/flip-emoji"),
        "export": VerbHelp("Write a Hugging Face folder or a PEFT adapter.", "thrifty export runs/text my-model"),
    },
    "Simulated hardware": {
        "simulate": VerbHelp(
            "Simulate a step on a cluster, or attention on an accelerator.",
            "thrifty simulate cluster --model gpt-small --cluster h100-roce",
        ),
        "trace": VerbHelp("Record the attention of a model for simulators.", "thrifty trace runs/text --examples 1"),
    },
}
VERBS = {verb: help for verbs in TASKS.values() for verb, help in verbs.items()}
