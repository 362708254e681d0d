"""`plan`: choose techniques that fit a budget."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf, isinf
from pathlib import Path
from typing import Any, Literal, Unpack

from rich.console import RenderableType

from thrifty.core.errors import UsageError
from thrifty.core.file_names import comment_lines
from thrifty.core.plain_values import read_size
from thrifty.core.recipe import Recipe
from thrifty.core.technique import Numerics
from thrifty.interface.plan_exports import export_recipe
from thrifty.interface.plan_on_cluster import cluster_plan_parts, format_cluster_plan, plan_on_cluster
from thrifty.interface.plan_on_machine import plan_on_machine
from thrifty.interface.plan_output import format_plan, plan_parts
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from
from thrifty.machine.cpu_features import assume_bfloat16
from thrifty.planning.cluster_file import read_cluster
from thrifty.planning.cluster_plan import ClusterPlan
from thrifty.planning.forecast import Forecast, PlanRequest
from thrifty.planning.planner import Plan
from thrifty.planning.scaling_law import check_amount
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.techniques import full_name
from thrifty.training.process_launch import launch_command

Trainer = Literal["accelerate", "deepspeed", "torchtitan", "script"]

CALL = "thrifty.train(recipe=plan.recipe)"
"""Call that starts a plan whose objects cannot be named on the command line."""


class RejectedTechniques(dict[str, str]):
    """Reasons for rejection, by full or short technique name."""

    def __missing__(self, name: str) -> str:
        if (full := full_name(name)) not in self:
            raise KeyError(f"{name} is in the plan")
        return self[full]


@dataclass(frozen=True, repr=False)
class RecipePlan(PrintedResult):
    """A planned recipe, its forecast, and the reason for each technique decision."""

    plan: Plan | ClusterPlan
    written: list[Path] = field(default_factory=list)
    """Files that `write` and `export` wrote."""
    pages: list[Path] = field(default_factory=list)
    """Pages that `write_page` wrote."""
    is_whole: bool = False
    """True to print all candidates and all techniques; see `everything`."""

    @property
    def recipe(self) -> Recipe:
        """Recipe with the changes of the plan."""
        return self.plan.recipe

    @property
    def forecast(self) -> Forecast:
        """Predicted memory, time and disk. Raises UsageError for a cluster plan, whose steps are simulated."""
        if isinstance(self.plan, ClusterPlan):
            raise UsageError("a cluster plan has no forecast for this machine", fix="plan.as_dict()")
        return self.plan.forecast

    @property
    def rejected(self) -> RejectedTechniques:
        """Reason for each technique that is not in the plan, by name."""
        out = ("not taken", "taken out")
        return RejectedTechniques({each.technique: each.why for each in self.plan.reasons if each.verdict in out})

    def everything(self) -> "RecipePlan":
        """Return the plan for printing all candidates and techniques, instead of the choice and near candidates."""
        return replace(self, is_whole=True)

    def write(self, file: str | Path) -> Path:
        """Write the recipe as TOML, with its forecast as a comment at the top. Raise UsageError if the file exists."""
        path = Path(file)
        if path.exists():
            raise UsageError(f"{str(path)!r} exists already", fix=f"pass another path; or remove {str(path)!r}")
        printed = format_cluster_plan(self.plan) if isinstance(self.plan, ClusterPlan) else format_plan(self.plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(comment_lines(printed) + "\n" + write_recipe(self.recipe), encoding="utf-8")
        self.written.append(path)
        return path

    def write_page(self, file: str | Path) -> Path:
        """Write an HTML page with the choice, its reasons, the forecast and everything considered; return its path. An
        existing file is never replaced: the page is then NAME-2.html, NAME-3.html and so on.
        """
        from thrifty.interface.plan_page import cluster_plan_page, machine_plan_page

        page, number = Path(file), 1
        while page.exists():
            number += 1
            page = Path(file).with_stem(f"{Path(file).stem}-{number}")
        page.parent.mkdir(parents=True, exist_ok=True)
        plan = self.plan
        text = cluster_plan_page(plan) if isinstance(plan, ClusterPlan) else machine_plan_page(plan)
        page.write_text(text, encoding="utf-8")
        self.pages.append(page)
        return page

    def export(self, trainer: Trainer, file: str | Path) -> Path:
        """Write the recipe as a configuration of "accelerate", "deepspeed" or "torchtitan", or as a folder with a
        PyTorch "script".

        Raises RefusedError if the format cannot express the recipe, or if the file exists.
        """
        path = export_recipe(self.recipe, max(int(self.forecast.steps.value), 1), trainer, Path(file))
        self.written.append(path)
        return path

    def as_dict(self) -> dict[str, Any]:
        return self.plan.as_dict() | {"written": [str(path) for path in self.written]}

    def __rich__(self) -> RenderableType:
        files, options = ", ".join(map(str, self.written)), self.recipe.object_options
        shown = cluster_plan_parts if isinstance(self.plan, ClusterPlan) else plan_parts
        command = CALL if options is None else f"{_launch_command(self.plan, options)} {files.split(', ')[0]}"
        pages = [f"page: {page}" for page in self.pages]
        start = f"written: {files}; start it with {command}" if files else "write it with --out plan.toml"
        return lines(*shown(self.plan, self.is_whole), start, *pages)


def _launch_command(plan: Plan | ClusterPlan, options: str) -> str:
    if not isinstance(plan, ClusterPlan):
        return launch_command(plan.chosen.ranks, options)
    cluster = plan.cluster
    if cluster.nodes == 1:
        return launch_command(cluster.ranks, options)
    return f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.per_node} -m thrifty train{options}"


def plan(
    recipe: Recipe | str | Path | None = None,
    *,
    memory: str | float | None = None,
    disk: str | float | None = None,
    hours: float | None = None,
    tokens: float | None = None,
    flops: float | None = None,
    allow: Literal["exact", "rounding", "different"] | None = None,
    price_per_hour: float | None = None,
    probe: bool | None = None,
    probe_seconds: float | None = None,
    probed_candidates: int | None = None,
    seconds: float | None = None,
    cluster: str | None = None,
    ranks: int | None = None,
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> RecipePlan:
    """Choose techniques that fit a budget. Predict the memory of candidate recipes, then time the best candidates.

    Args:
        recipe: A recipe, its name or its file. `arguments` are as in `thrifty.recipe`.
        memory: Memory limit per rank, "16GB" or bytes; on a CPU, of the whole process. The default is the free memory.
        disk: Disk limit for checkpoints and prepared data.
        hours: Training time. If `tokens` or `flops` is passed, `hours` is an upper limit.
        allow: Largest allowed change of numerical values: "exact", "rounding" or "different". "different" also allows
            techniques that a comparison found better, for the same objective and a similar model size. The default is
            "exact" for one rank. Several ranks sum in another order, so their default is "rounding".
        probe: False to run no training steps.
        probe_seconds: Time limit of timing one candidate. The default is 20 s.
        probed_candidates: Number of candidates to time. The default is 4.
        seconds: Time limit of planning. The default is a fifth of the run, and at least 60 s.
        cluster: Name or file of a cluster to simulate. `seconds` and the three `probe` arguments then do not apply.
        ranks: Number of devices of this machine or of the cluster.
        price_per_hour: Price of this machine per hour, to add the cost to the forecast.

    Raises InfeasibleError if no recipe fits.

    Example::

        plan = thrifty.plan(model=build_model, data=train_set, held_out=test_set, loss=loss, memory="16GB")
        print(plan, plan.forecast.memory.value, plan.rejected["muon"])
        plan.export("accelerate", "accelerate.yaml")
    """
    for name, amount in {"hours": hours, "tokens": tokens, "flops": flops, "price-per-hour": price_per_hour}.items():
        if amount is not None:
            check_amount(f"--{name}", amount)
    if tokens is not None and flops is not None:
        raise UsageError("--tokens and --flops exclude each other", fix="remove --tokens; or remove --flops")
    has_ranks = ranks != 1 if cluster else (ranks or 1) > 1
    wanted = PlanRequest(
        allow=Numerics(allow or ("rounding" if has_ranks else "exact")),
        memory=_bytes(memory, "--memory"),
        disk=_bytes(disk, "--disk"),
        seconds=None if hours is None else 3600 * hours,
        tokens=tokens,
        flops=flops,
        price=price_per_hour,
    )
    limits = {
        "probe": probe,
        "probe_seconds": probe_seconds,
        "probed_candidates": probed_candidates,
        "seconds": seconds,
    }
    probing: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    if cluster is not None:
        _refuse_on_cluster(probing, wanted)
    with units_of(cluster):
        chosen = recipe_from("plan", recipe, arguments)
    if cluster is None:
        return RecipePlan(plan_on_machine(chosen, wanted, **probing, ranks=ranks or 1, quiet=quiet))
    return RecipePlan(plan_on_cluster(chosen, wanted, cluster, ranks, quiet=quiet))


def _refuse_on_cluster(probing: Mapping[str, Any], wanted: PlanRequest) -> None:
    """Raise UsageError for disk limits and probe options, which apply only to this machine."""
    if probing:
        name, value = next(iter(probing.items()))
        option = "--no-probe" if value is False else f"--{name.replace('_', '-')}"
        raise UsageError(
            f"{option} applies only to this machine, because steps on a cluster are simulated",
            fix=f"remove {option}",
        )
    if not isinf(wanted.disk):
        raise UsageError("--disk applies only to this machine", fix="remove --disk")


def units_of(cluster: str | None) -> AbstractContextManager[None]:
    """Choose the number formats of recipes for the device of the plan."""
    return nullcontext() if cluster is None else assume_bfloat16(read_cluster(cluster).device.has_fast_bfloat16)


def _bytes(size: str | float | None, name: str) -> float:
    return inf if size is None else read_size(size, name) if isinstance(size, str) else float(size)
