"""Predicted and measured memory of training steps of random models (`random_models.py`).

    python benchmarks/bench_estimate.py FILE.json --seeds 11 12 13 [--models 30] [--only NUMBER …]

Promise, for the models of any seed: median error of the tensor peak at most 1 %, largest at most 8 %. No model is
predicted to fit that does not fit. Process memory is within its interval in 95 % of cases.

The measurement shares no code with predictions. torch's profiler reports the allocated blocks of a plain loop (forward,
backward, `optimizer.step()`, `zero_grad()`). Memory from before is added: parameters, buffers, optimizer state and the
batch. Process memory is the kernel's peak of resident pages over steps without a profiler. Each model has its own
process; models already in FILE are skipped.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

WARM, STEPS = 2, 2


def measured_peak(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, batch: Any) -> int:
    """Return the bytes at the peak of steps after warm-up steps, which allocate the optimizer state."""
    for _ in range(WARM):
        step()
    gc.collect()
    state = [leaf for leaf in tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor)]
    # thrifty's optimizers keep state in views, which torch's `state` may omit
    state += [tensor for tensors in getattr(optimizer, "slots", {}).values() for tensor in tensors]
    standing = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*model.parameters(), *model.buffers(), *tree_leaves(batch), *state]
        if isinstance(tensor, Tensor)
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(STEPS):
            step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        events.append(event := pending.pop())
        pending += event.children
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.tag.name == "Allocation":
            now += event.typed[1].alloc_size
            most = max(most, now)
    return sum(standing.values()) + most


def measured_process(step: Any) -> tuple[int, int]:
    """Return the resident bytes before some steps, and the peak over them."""
    status = Path("/proc/self/status")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes(status, "VmRSS")
    for _ in range(WARM + 1):
        step()
    return before, _kilobytes(status, "VmHWM")


def _kilobytes(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def mean(result: Any) -> Tensor:
    if isinstance(result, tuple):
        return (result[0].float() * result[1]).sum() / result[1].sum()
    return result.float().mean()


def one(seed: int, number: int) -> dict[str, Any]:
    """Return prediction and measurement of one model, trained by a plain loop in this process."""
    import thrifty
    from random_models import random_step

    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"seed": seed, "number": number, "label": "timm"}
    try:
        case = random_step(seed, number)
    except ImportError as error:
        return row | {"skipped": str(error)}
    row["label"] = case.label
    began = time.perf_counter()
    optimizer = case.optimizer.lower() if isinstance(case.optimizer, str) else case.optimizer
    try:
        fit = thrifty.estimate(case.build, case.batch, loss=case.loss, optimizer=optimizer)
        row |= {"predicted": fit.peak, "parts": dict(fit.parts), "notes": list(fit.notes)}
        row |= {"process_predicted": list(getattr(fit, "process", (0, 0)))}
    except Exception as error:
        row |= {"crash": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
    row["seconds"] = time.perf_counter() - began
    try:
        model = case.build()
        optimizer: Any = case.optimizer
        if isinstance(optimizer, str):
            optimizer = getattr(thrifty.optim, optimizer)(model, lr=1e-4)
        else:
            optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        loss = case.loss or (lambda model, batch: model(**batch).loss)

        def step() -> None:
            mean(loss(model, case.batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        row["process_before"], row["process"] = measured_process(step)
        row["measured"] = measured_peak(model, optimizer, step, case.batch)
    except Exception as error:  # skip models that torch cannot train here
        row["skipped"] = f"{type(error).__name__}: {error}"[:300]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="results file; existing results are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("\n" + json.dumps(one(*options.one)))
        return
    rows = json.loads(options.path.read_text())["cases"] if options.path.exists() else []
    known = {(row["seed"], row["number"]) for row in rows}
    for seed in options.seeds:
        done = sum(row["seed"] == seed and "skipped" not in row for row in rows)
        number = max([n for s, n in known if s == seed], default=-1)
        numbers = iter(options.only or range(number + 1, 10 * options.models))
        while done < options.models and (number := next(numbers, -1)) >= 0:
            if (seed, number) in known:
                continue
            rows.append(row := _in_process(seed, number, options.timeout))
            done += "skipped" not in row
            print(line(row), flush=True)
            write(options.path, rows)
    for seed in options.seeds:
        print(
            f"seed {seed}: " + ", ".join(f"{k} {v}" for k, v in summary([r for r in rows if r["seed"] == seed]).items())
        )


def _in_process(seed: int, number: int, timeout: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "-", "--one", str(seed), str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"seed": seed, "number": number, "label": "?", "skipped": f"not done after {timeout:g} s"}
    except (ValueError, IndexError):
        return {"seed": seed, "number": number, "label": "?", "crash": done.stderr[-2000:]}


def line(row: dict[str, Any]) -> str:
    where = f"{row['seed']}/{row['number']}"
    if "skipped" in row or "crash" in row:
        why = f"skipped: {row['skipped']}" if "skipped" in row else f"CRASH: {row['crash'][:300]}"
        return f"{where} {why}: {row['label'][:150]}"
    low, high = row["process_predicted"]
    process = f"process {row['process'] / 1e6:.0f} ({low / 1e6:.0f} to {high / 1e6:.0f})"
    sizes = (
        f"{row['predicted'] / 1e6:8.2f} {row['measured'] / 1e6:8.2f} MB {row['predicted'] / row['measured'] - 1:+7.2%}"
    )
    return f"{where} {sizes} {process} {row['seconds']:.1f} s {row['label'][:220]}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    complete = [row for row in rows if "predicted" in row and "measured" in row]
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in complete)
    within = [row["process_predicted"][0] <= row["process"] <= row["process_predicted"][1] for row in complete]
    return {
        "models": len(complete), "skipped": sum("skipped" in row for row in rows),
        "crashes": sum("crash" in row and "skipped" not in row for row in rows),
        "median_error": round(median(errors), 5) if errors else None, "largest_error": round(max(errors, default=0), 5),
        "process_within": round(sum(within) / max(len(within), 1), 3),
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    seeds = sorted({row["seed"] for row in rows})
    content = {
        "benchmark": "estimate",
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "summary": {seed: summary([row for row in rows if row["seed"] == seed]) for seed in seeds},
        "cases": rows,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.rename(path)


if __name__ == "__main__":
    main()
