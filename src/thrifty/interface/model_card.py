"""Model card of an exported model: README.md with the metadata of the Hugging Face Hub.

The card has only what the run recorded. The license, intended uses and limitations are left to the author.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import thrifty
from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.plain_values import to_data
from thrifty.core.recipe import Recipe
from thrifty.core.secret_redaction import redact, redact_text
from thrifty.core.tokenizer_files import TOKENIZER_CONFIG
from thrifty.data.run_metadata import read_model_spec
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.reporting.key_figures import key_figures
from thrifty.reporting.number_format import duration, scaled, significant
from thrifty.reporting.run_record import RunRecord, read_run

FILE = "README.md"
PIPELINES = {
    "next_token": "text-generation",
    "chat_answers": "text-generation",
    "masked_token": "fill-mask",
    "token_classification": "token-classification",
    "multi_label_classification": "text-classification",
    "contrastive": "zero-shot-image-classification",
}
"""Pipeline tags of the Hub, by objective. Other objectives have none, or one that depends on the data."""
AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
"""Class of transformers that loads the base model of an adapter, by PEFT's task type."""
UNITS = ("steps", "tokens", "epochs", "seconds")
HUB = "hub:"
"""Start of a data source on the Hugging Face Hub."""
LEFT_TO_AUTHOR = "Generated from the records of a run. License, intended uses and limitations are left to the author."


def write_model_card(run: Path, folder: Path, recipe: Recipe, step: int, *, is_adapter: bool, is_raw: bool) -> None:
    """Write the model card of an exported checkpoint, unless the folder has a README.md.

    `is_raw` is True if the trained weights were exported although the run evaluated their average.
    """
    if (folder / FILE).exists():
        return
    record = read_run(run)
    parts = [
        _metadata(folder, recipe, is_adapter),
        f"# {recipe.name}",
        LEFT_TO_AUTHOR,
        "## Training",
        _table(("setting", "value"), _facts(record, recipe, step)),
        "<details><summary>Recipe, for <code>thrifty train recipe.toml</code></summary>",
        f"```toml\n{_without_places(redact_text(write_recipe(recipe)))}```",
        "</details>",
        f"## Held-out results after step {step:,}",
        _results(record, step, is_raw),
        "## Use",
        f"```python\n{_adapter_loading(run, folder, recipe) if is_adapter else _loading(folder, recipe)}\n```",
    ]
    AtomicFiles().swap_text(folder / FILE, "\n\n".join(parts) + "\n")


def _metadata(folder: Path, recipe: Recipe, is_adapter: bool) -> str:
    """Return the YAML block. JSON strings and lists are valid YAML."""
    library = "peft" if is_adapter else "transformers" if (folder / "config.json").is_file() else ""
    sources = [recipe.data.source, *recipe.data.sources]
    datasets = [source.removeprefix(HUB) for source in sources if source.startswith(HUB)]
    is_own = recipe.python.loss or not library
    values: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "" if is_own else PIPELINES.get(recipe.objective.name, ""),
        "base_model": _base_on_hub(recipe),
        "datasets": datasets,
        "tags": ["thrifty"],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items() if value]
    return "\n".join(["---", *lines, "# license: to be chosen by the author", "---"])


def _base_on_hub(recipe: Recipe) -> str:
    """Return the name owner/name of a base model in the Hub's cache; "" for other folders."""
    found = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", Path(recipe.model.folder).as_posix())
    return "/".join(found.groups()) if found else ""


def _facts(record: RunRecord, recipe: Recipe, step: int) -> list[tuple[str, str]]:
    summary, machine = record.summary, record.environment
    here = next((each for each in record.steps if each["step"] == step), {})
    model = Path(recipe.model.folder).name or recipe.model.preset or recipe.model.build or ""
    data = recipe.python.data or ", ".join(map(_name, recipe.data.sources or [recipe.data.source]))
    budget = "".join(f"{value:g} {name}" for name, value in to_data(recipe.budget).items() if name in UNITS)
    facts = {
        "Model": f"{model}, {scaled(record.explanation.get('parameters'))} parameters",
        "Data": data,
        "Objective": recipe.python.loss or recipe.objective.name,
        "Budget": budget,
        "Exported checkpoint": f"step {step:,} of {_whole(summary, step)}",
        "Trained on": f"{scaled(here['tokens'])} {summary.get('unit', 'tokens')}" if "tokens" in here else "",
        "Training time": duration(here["seconds"]) if "seconds" in here else "",
        "Device": str(redact(machine.get("gpu") or machine.get("cpu") or "")),
        "Seed": str(recipe.seed),
        "Techniques": "; ".join(_technique(technique.name, to_data(technique)) for technique in recipe.techniques),
        "Software": f"thrifty {thrifty.__version__}, torch {machine.get('torch', '')}",
    }
    return [(name, value) for name, value in facts.items() if value]


def _whole(summary: Mapping[str, Any], step: int) -> str:
    return f"{summary.get('steps', step):,}" if summary.get("status") == "finished" else "an unfinished run"


def _technique(name: str, settings: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key} {_name(value) if isinstance(value, str) else value}" for key, value in settings.items())
    return f"`{name}`" + (f" ({shown})" if shown else "")


def _results(record: RunRecord, step: int, is_raw: bool) -> str:
    """Return the table of the evaluation at a step, or a sentence if there was none."""
    found = next((each for each in record.evaluations if each["step"] == step), {})
    values = {name: value for name, value in found.items() if name not in ("kind", "step", "trained_loss")}
    if is_raw and "trained_loss" in found:
        values = {"loss": found["trained_loss"]}
    measured = [(name, significant(value, 4)) for name, value in values.items() if isinstance(value, int | float)]
    if not measured:
        return "This checkpoint was not evaluated."
    facts = {"Token frequencies alone": "unigram_entropy", "Label frequencies alone": "label_entropy"}
    known = [(name, significant(record.summary[key], 4)) for name, key in facts.items() if record.summary.get(key)]
    examples = record.recipe.get("evaluation", {}).get("examples")
    about = f"On at most {examples:,} held-out examples. " if examples else ""
    about += f"The loss is in {key_figures(record).nats}."
    return f"{about}\n\n{_table(('measure', 'value'), measured + known)}"


def _adapter_loading(run: Path, folder: Path, recipe: Recipe) -> str:
    """Return Python code that loads an exported adapter and its base model."""
    if recipe.model.build:
        built = f"# base: built by {recipe.model.build}\n"
        return f'from peft import PeftModel\n\n{built}model = PeftModel.from_pretrained(base, "{folder.name}")'
    kind = AUTO.get(json.loads((folder / "adapter_config.json").read_bytes())["task_type"], "AutoModel")
    ends = read_model_spec(run, recipe)
    labels = ends.labels if isinstance(ends, TextModelSpec) else ()
    names = f", id2label={dict(enumerate(labels))}" if labels else ""
    path = f'PeftConfig.from_pretrained("{folder.name}").base_model_name_or_path'
    base = path if recipe.model.folder else '"folder of thrifty export --part base"'
    return "\n".join(
        [
            f"from peft import PeftConfig, PeftModel\nfrom transformers import AutoTokenizer, {kind}\n",
            f"base = {kind}.from_pretrained({base}{names})",
            f'model = PeftModel.from_pretrained(base, "{folder.name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder.name}")',
        ]
    )


def _loading(folder: Path, recipe: Recipe) -> str:
    """Return Python code that loads the exported folder."""
    config = folder / "config.json"
    if not config.is_file():
        return (
            "from safetensors.torch import load_model\n\n"
            f"# model: built by {recipe.model.build}\n"
            f'load_model(model, "{folder.name}/model.safetensors")'
        )
    kind = (json.loads(config.read_bytes()).get("architectures") or ["AutoModel"])[0]
    lines = [f"from transformers import {kind}", "", f'model = {kind}.from_pretrained("{folder.name}")']
    if (folder / TOKENIZER_CONFIG).is_file():
        lines[0] = f"from transformers import AutoTokenizer, {kind}"
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{folder.name}")')
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _name(source: str) -> str:
    """Return the name of a data source without the folders of this machine."""
    return Path(source).name if source.startswith("/") else source


def _without_places(text: str) -> str:
    """Return TOML text whose absolute paths are replaced by file names."""
    return re.sub(r'"(/[^"\n]*)"', lambda match: json.dumps(_name(match[1])), text)
