"""Table of supported use per technique: hand-written loop, own module in the trainer, transformers model, command line.

    python benchmarks/technique_table.py                  # every cell that results/technique_table.json lacks
    python benchmarks/technique_table.py --again lora     # recompute the cells of one technique

A cell is computed by a few steps of a tiny model. It is "yes" only if something differs from the run without the
technique, and names it; otherwise it has the reason of the refusal. A cell with another error contains it, and a test
fails.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from command_line import CommandLine, write_corpus  # noqa: E402
from tiny_models import FAMILIES, random_model  # noqa: E402
from tiny_runs import technique  # noqa: E402

import thrifty  # noqa: E402
from thrifty import techniques  # noqa: E402
from thrifty.core.claims import Claim  # noqa: E402
from thrifty.core.errors import NeedsTrainer, ThriftyError  # noqa: E402
from thrifty.core.mesh import clear_mesh  # noqa: E402
from thrifty.core.plain_values import to_data  # noqa: E402
from thrifty.core.shard_layout import local_tensor  # noqa: E402
from thrifty.core.state import full_value  # noqa: E402
from thrifty.core.technique import Technique  # noqa: E402
from thrifty.interface.optimizers import optimizer_class  # noqa: E402
from thrifty.techniques.sparsity.mask_from_file import mask_file_bytes  # noqa: E402

FILE, PAGE = ROOT / "results" / "technique_table.json", ROOT / "results" / "technique_table.md"
COLUMNS = {
    "own loop": "a hand-written nanoGPT in a hand-written loop",
    "own module in the trainer": "the same module, a dataset and a loss in thrifty.train",
    "transformers model": "a Llama of transformers in a hand-written loop",
    "command line": "thrifty train",
}
STEPS, BATCH, LENGTH, VOCABULARY, SECONDS = 4, 4, 16, 300, 120
RECIPES = {
    "curriculum.low_frequency": "vit-digits", "curriculum.resolution": "vit-digits",
    "curriculum.patch_size": "vit-digits",
    "data_selection.drop_patches": "vit-digits", "data_selection.drop_masked_patches": "mae-digits",
    "data_selection.drop_masked_tokens": "masked", "adapters.visual_prompt": "vit-digits",
}  # fmt: skip
"""Command-line recipes for techniques that are not for text."""
SETTINGS: dict[str, dict[str, Any]] = {
    "attention.vitcod": {"autoencoder": False},
    "gradients.clip": {"max_norm": 0.01},
    "optimizers.adamw": {"lr": 1e-2},
    "schedules.linear": {"warmup": 0.5},
    "schedules.constant_then_decay": {"decay_from": 0.25},
    "parallelism.shard": {"zero": 3},
}
"""Settings for techniques whose defaults have no visible effect in a few steps."""
Facts = dict[str, Any]


class Block(nn.Module):
    """GPT block in the usual hand-written form."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """Model from tokens (b, t) to logits (b, t, v)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def nano() -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT()


def llama() -> nn.Module:
    return random_model(FAMILIES["llama-grouped"]())


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return one loss per text (b,)."""
    if hasattr(model, "config"):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    else:
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


def facts_by_hand(build: Callable[[], nn.Module], chosen: Technique | None) -> Facts:
    """Return observable facts of a few steps of a hand-written loop."""
    clear_mesh()
    model, saved = build().train(), []
    is_optimizer = chosen is not None and Claim.OPTIMIZER in chosen.claims
    kind, values = (type(chosen), vars(chosen)) if is_optimizer else (thrifty.AdamW, {"lr": 3e-3})
    ranks, rank = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if _distributed() else (1, 0)
    if chosen is not None and chosen.name.startswith("parallelism."):
        model = thrifty.apply(model, chosen)
    optimizer = optimizer_class(kind)(model, total_steps=STEPS, **values)
    if chosen is not None and not is_optimizer and not chosen.name.startswith("parallelism."):
        batch = {"batch": 256} if chosen.name == "large_batch.scale_learning_rate" else {}
        model, optimizer = thrifty.apply((model, optimizer), chosen, total_steps=STEPS, **batch)
    step_losses: list[float] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    for step in range(STEPS):
        torch.manual_seed(step)
        tokens = torch.stack([Texts()[BATCH * step + row] for row in range(BATCH)])
        if ranks > 1 and chosen is not None and chosen.divides_ranks and "tensor" not in chosen.name:
            tokens = tokens.chunk(ranks)[rank]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = losses(model, tokens).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(float(loss.detach()))
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
    return {
        "losses": step_losses,
        "parameters": {name: [*parameter.shape] for name, parameter in model.named_parameters()},
        "trained parameters": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "saved tensors": sum(saved),
        "optimizer state": sorted(f"{tensor.dtype}{[*tensor.shape]}" for tensor in states),
        "evaluated weights": (optimizer.eval_weights() is None),
        "compiled blocks": sum(each._compiled_call_impl is not None for each in model.modules()),
        "local parameters": [local_tensor(each.detach()).numel() for each in model.parameters()],
        "weights": float(sum(full_value(each.detach()).double().sum() for each in model.parameters())),
        "placed state": type(getattr(optimizer, "site", None)).__name__,
        "forwards": sum("forward" in vars(each) for each in model.modules()),
    }  # fmt: skip


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def by_hand(build: Callable[[], nn.Module], chosen: Technique) -> str:
    if chosen.name == "losses.z_loss":
        logits, target = torch.randn(4, 8), torch.arange(4)
        plain, changed = nn.CrossEntropyLoss()(logits, target), thrifty.apply(nn.CrossEntropyLoss(), chosen)
        return _difference({"losses": [float(plain)]}, {"losses": [float(changed(logits, target))]})
    if [hook for hook in ("batches", "objective", "backward", "changes", "update") if chosen.overrides(hook)] == [
        "batches"
    ]:
        images = chosen.claims & {Claim.RESOLUTION}
        dataset = TensorDataset(torch.rand(32, 1, 16, 16)) if images else Texts()
        shapes = []
        for data in (
            DataLoader(dataset, batch_size=8),
            thrifty.apply(DataLoader(dataset, batch_size=8), chosen, total_steps=STEPS),
        ):
            batches = [batch[0] if images else batch for batch in data]
            shapes.append({"batches": [[*batch.shape] for batch in batches]})
        return _difference(*shapes)
    if chosen.name.startswith("parallelism."):
        return _on_ranks("nano" if build is nano else "llama", chosen)
    return _difference(facts_by_hand(build, None), facts_by_hand(build, chosen))


def _on_ranks(family: str, chosen: Technique) -> str:
    """Run the loop in two processes of torchrun, with this file as their script."""
    if chosen.name == "parallelism.pipeline":
        thrifty.apply(nn.Linear(2, 2), chosen)
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        "--rank-of",
        chosen.name,
        family,
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=SECONDS, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), "")
    if not line:
        raise RuntimeError(done.stderr[-500:])
    facts = json.loads(line)
    if "refused" in facts:
        raise ThriftyError(*facts["refused"])
    return _difference(facts["plain"], facts["changed"])


def rank_cell(name: str, family: str) -> None:
    torch.distributed.init_process_group("gloo")
    build = {"nano": nano, "llama": llama}[family]
    chosen = technique(name, **SETTINGS.get(name, {}))
    try:
        facts: Any = {"plain": facts_by_hand(build, None), "changed": facts_by_hand(build, chosen)}
    except ThriftyError as refused:
        facts = {"refused": [refused.what, refused.fix]}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(facts), flush=True)
    torch.distributed.destroy_process_group()


def in_trainer(folder: Path, chosen: Technique | None) -> Facts:
    optimizer = [] if chosen is not None and Claim.OPTIMIZER in chosen.claims else [thrifty.AdamW(lr=3e-3)]
    name = "plain" if chosen is None else chosen.name
    ranks = 2 if chosen is not None and chosen.divides_ranks else 1
    thrifty.train(
        model=nano, data=Texts(), held_out=Texts(), loss=losses, techniques=[*optimizer, *([chosen] if chosen else [])],
        budget=STEPS, batch=BATCH, name=name, runs=folder, quiet=True, ranks=ranks,
    )  # fmt: skip
    return _of_run(folder / name, name)


def _of_run(folder: Path, name: str) -> Facts:
    lines = map(json.loads, (folder / "records.jsonl").read_text(encoding="utf-8").splitlines())
    records = [line for line in lines if line.get("kind") == "step"]
    explained = json.loads((folder / "explanation.json").read_text(encoding="utf-8"))
    row = next((row for row in explained["techniques"] if row["name"] == name), {})
    return {
        "losses": [record["loss"] for record in records],
        "notes of a step": sorted({key for record in records for key in record.get("notes", {})}),
        "counted memory or work": row.get("before") == row.get("after"),
        "touched modules": row.get("touched", []),
    }


def by_trainer(folder: Path, chosen: Technique) -> str:
    if not (folder / "plain").exists():
        in_trainer(folder, None)
    return _difference(_of_run(folder / "plain", "plain"), in_trainer(folder, chosen))


def by_command(folder: Path, chosen: Technique) -> str:
    recipe = RECIPES.get(chosen.name, "text")
    if not (folder / "runs" / f"plain-{recipe}").exists():
        _command(folder, recipe, f"plain-{recipe}", None)
    _command(folder, recipe, chosen.name, chosen)
    return _difference(
        _of_run(folder / "runs" / f"plain-{recipe}", ""), _of_run(folder / "runs" / chosen.name, chosen.name)
    )


def _command(folder: Path, recipe: str, run: str, chosen: Technique | None) -> None:
    from thrifty.cli.main import main

    words = CommandLine(folder).recipe(run, steps=STEPS)
    if recipe != "text":
        sizes = {"model.width": 32, "model.depth": 2, "model.heads": 2, "data.batch": 8, "evaluation.examples": 8}
        sizes |= {"data.vocabulary": 320, "data.length": 32} if recipe == "masked" else {"model.patch": 4}
        words = ["train", recipe, "--name", run, "--budget", f"{STEPS}steps"]
        words += [word for key, value in sizes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        words += ["--data", str(folder / "corpus")] if recipe == "masked" else []
        words += ["--without", "data_selection.drop_masked_patches"] if (recipe, chosen) == ("mae-digits", None) else []
    if chosen is not None:
        if Claim.OPTIMIZER in chosen.claims and chosen.name != "optimizers.adamw":
            words += ["--without", "optimizers.adamw"]
        if Claim.SCHEDULE in chosen.claims and "--without" in words and "schedules.linear" not in words:
            words += ["--without", "schedules.linear"]
        words += ["--with", chosen.name]
        if chosen.divides_ranks:
            words += ["--ranks", "2", "--set", f"mesh.{chosen.name.rpartition('.')[2]}=2"]
        defaults = to_data(type(chosen)())
        changed = {key: value for key, value in to_data(chosen).items() if value != defaults.get(key)}
        words += [
            word
            for key, value in changed.items()
            for word in ("--set", f"techniques.{chosen.name}.{key}={json.dumps(value)}")
        ]
    folder_before, errors = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            main(words)
    except SystemExit as ended:
        if ended.code:
            printed = errors.getvalue().strip().splitlines()
            what = next((index for index, line in enumerate(printed) if line.startswith("thrifty: ")), None)
            if what is None:
                raise RuntimeError(errors.getvalue()[-500:]) from None
            fix = printed[what + 1].removeprefix("  fix: ") if len(printed) > what + 1 else ""
            raise ThriftyError(printed[what].removeprefix("thrifty: "), fix) from None
    finally:
        os.chdir(folder_before)


def _difference(plain: Facts, changed: Facts) -> str:
    """Return the first difference. Raise AssertionError if there is none."""
    for name, value in changed.items():
        if value != plain.get(name):
            return f"yes ({name})"
    raise AssertionError("nothing differs from the run without it")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no result in {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def masks_for(column: str, folder: Path) -> dict[str, str]:
    """Return the settings of a mask file that keeps half of each matrix in the blocks of a column's model."""
    file = folder / f"{column.replace(' ', '-')}-masks.safetensors"
    if column == "command line":
        _command(folder, "text", "drawn", technique("sparsity.static"))
        return {"file": str(file), "sha256": thrifty.export(folder / "runs" / "drawn", file, part="masks").sha256}
    model = llama() if column == "transformers model" else nano()
    weights = {name: each.detach() for name, each in model.named_parameters() if re.search(r"\.\d+\.", name)}
    masks = {name: torch.rand_like(each) < 0.5 for name, each in weights.items() if each.dim() == 2}
    file.write_bytes(mask_file_bytes(masks, "", weights))
    return {"file": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def cell(column: str, name: str, folder: Path) -> str:
    """Return the content of a cell: "yes (what differs)", "needs the trainer: …", "refused: …", or "error: …"."""
    chosen = technique(name, **SETTINGS.get(name, {}))
    if name == "sparsity.mask_from_file":
        chosen = technique(name, **masks_for(column, folder))
    runs: dict[str, Callable[[], str]] = {
        "own loop": lambda: by_hand(nano, chosen),
        "own module in the trainer": lambda: by_trainer(folder / "trainer", chosen),
        "transformers model": lambda: by_hand(llama, chosen),
        "command line": lambda: by_command(folder, chosen),
    }
    torch._dynamo.reset()
    try:
        with _bounded():
            return runs[column]()
    except NeedsTrainer as refused:
        return f"needs the trainer: {refused.what}; {refused.fix}"
    except ThriftyError as refused:
        return f"refused: {refused.what}" + (f"; {refused.fix}" if refused.fix else "")
    except Exception as error:  # the table shows every error
        return f"error: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def rows_with_reasons(table: dict[str, dict[str, str]], columns: list[str]) -> list[str]:
    """Return the lines of a table of techniques, whose cells are a word, or a word, a colon and a reason. Reasons are
    numbered and listed below."""
    lines = [f"| technique | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    reasons: list[str] = []
    for name, row in table.items():
        cells = []
        for text in (row.get(column, "") for column in columns):
            word, _, reason = text.partition(": ")
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{word} [{reasons.index(reason) + 1}]" if reason else text)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, "", "Reasons", "", *(f"{place}. {reason}" for place, reason in enumerate(reasons, 1))]


def write(table: dict[str, dict[str, str]]) -> None:
    FILE.write_text(json.dumps({"columns": COLUMNS, "techniques": table}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    lines = [
        "# Supported use of each technique",
        "",
        "Made by `python benchmarks/technique_table.py`; each cell is the result of a run.",
        "",
    ]
    lines += [f"- **{name}**: {about}" for name, about in COLUMNS.items()]
    counts = {column: sum(row.get(column, "").startswith("yes") for row in table.values()) for column in COLUMNS}
    loops = sum("yes" in row.get("own loop", "")[:3] + row.get("transformers model", "")[:3] for row in table.values())
    lines += ["", f"Yes: {', '.join(f'{count} {column}' for column, count in counts.items())}, of {len(table)};"]
    lines += [f"{loops} in a hand-written loop on one of the two models.", ""]
    lines += rows_with_reasons(table, [*COLUMNS])
    PAGE.write_text("\n".join(lines).replace("\n\n\n", "\n\n") + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", nargs="*", default=[], help="techniques whose cells are recomputed")
    parser.add_argument("--column", nargs="*", default=[*COLUMNS], choices=COLUMNS)
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return rank_cell(*options.rank_of)
    torch.set_num_threads(1)
    again = {techniques.find(name).name for name in options.again}
    known = json.loads(FILE.read_text("utf-8"))["techniques"] if FILE.exists() else {}
    table = {name: known.get(name, {}) if name not in again else {} for name in techniques.own_names()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpus(folder / "corpus")
        for column in options.column:
            for name in techniques.own_names():
                if column not in table[name] or table[name][column].startswith("error"):
                    table[name][column] = cell(column, name, folder)
                    print(f"{column:28} {name:40} {table[name][column][:110]}", flush=True)
                    write(table)
    return None


if __name__ == "__main__":
    main()
