"""``seht compare RECIPE``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seht.commands.options import add_options, whole
from seht.extras import need
from seht.lab.commands.arguments import (
    OWN_HELP,
    POWER,
    add_shared,
    chosen_recipe,
    execution_of,
    parsed,
    told,
)

if TYPE_CHECKING:
    from seht.lab.compare import Entry
    from seht.lab.config import Recipe
    from seht.lab.progress import Watch
    from seht.lab.schedulers import Scheduler
    from seht.lab.trials import Trial

COMPARE = """\
Train every method with every seed, measure what each costs and how flat its minimum is, and write
the table and the page. What is done is skipped: killed and started again, the same command goes on.
"""
COMPARE_EPILOG = """\
examples:
  seht compare digits
  seht compare cifar10-low --methods 'weight-decay,sam,seht-h(curvature=ggn,weight=1e-3)' --seeds 3
  seht compare digits --methods 'weight-decay,seht-h(weight=1e-3|1e-2|1e-1)' --grid
  seht compare --preset table1 --small
  seht compare --preset table1 --engine ray --address auto --resources-per-trial cpus=2,gpus=0.5

The first method is the baseline. Alternatives, written a|b|c, are rows of their own, or with --grid
the candidates of one row.
"""


def add_compare(commands: Any) -> None:
    """``seht compare RECIPE``."""
    text = "every method, several seeds: a table"
    parser = commands.add_parser(
        "compare", help=text, description=COMPARE, epilog=COMPARE_EPILOG, **OWN_HELP
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="its name, for example digits")
    seeds = "seeds of the search, other ones than those that judge (default: 1)"
    budget = "candidates that the search may try for a method (default: 7, or the paper's grid)"
    refit = "after choosing and tuning on validation examples, train again with them included"
    where = "where the runs go: processes here, or Ray tasks (default: local)"
    needs = "ray: what a run needs (default: a CPU per thread, and a GPU if there are any)"
    add_options(
        parser,
        ("--methods A,B", "the first is the baseline (default: all that fit)"),
        ("--seeds N", "how many seeds (default: 5)", whole(1, 10_000), 5),
        ("--first-seed N", "the first seed (default: 0)", whole(0, 10**9), 0),
        POWER,
        ("--preset NAME", "a prepared comparison: demo, table1, ..."),
        ("--small", "the preset's recipe for CPUs"),
        ("--grid", "search each method's settings on the validation split"),
        ("--grid-seeds N", seeds, whole(1, 10_000)),
        ("--budget N", budget, whole(1, 10_000)),
        ("--refit", refit),
        ("--jobs N", "runs at a time (default: 1)", whole(1, 1024), 1),
        ("--engine {local,ray}", where, str, "local"),
        ("--address HOST:PORT", "ray: the cluster's head (default: on this machine)"),
        ("--resources-per-trial cpus=N,gpus=N", needs),
        ("--no-cost", "do not time the steps"),
    )
    add_shared(parser, "runs/RECIPE")
    parser.set_defaults(run=run_compare, extra="lab")


@told
def run_compare(arguments: argparse.Namespace) -> int:
    """Compare, print the table and say where the page is."""
    need("lab", "seht compare")
    from seht.lab import report
    from seht.lab.compare import Comparison, compare
    from seht.lab.ranks import under_torchrun
    from seht.lab.records import RunError

    if under_torchrun():
        raise RunError("seht compare runs its trials in processes of its own: --jobs, no torchrun")
    recipe, rows = parsed(lambda: rows_of(arguments))
    out = Path(arguments.out or Path("runs", recipe.name))
    grid = rows if arguments.grid else None
    scheduler = parsed(lambda: scheduler_of(arguments))
    entries = [row[0] for row in rows] if arguments.grid else [e for row in rows for e in row]

    compare(
        Comparison(
            recipe,
            tuple(entries),
            tuple(range(arguments.first_seed, arguments.first_seed + arguments.seeds)),
            out,
            execution_of(arguments),
            arguments.refit,
        ),
        grid=grid,
        grid_seeds=arguments.grid_seeds or 1,
        scheduler=scheduler,
        costs=not arguments.no_cost,
        what_fits=arguments.methods is None and arguments.preset is None,
        power=arguments.power,
        say=say,
    )
    report.show(out, arguments.power)
    print(out / "report.html")
    return 0


def scheduler_of(arguments: argparse.Namespace) -> Scheduler:
    """The scheduler that the arguments ask for; a mistake is a ``ValueError``."""
    if arguments.engine == "ray":
        from seht.lab.schedulers.on_ray import RayTasks, Resources, need_ray

        if arguments.jobs > 1:
            raise ValueError(
                "--jobs belongs to --engine local; on Ray as many runs go at a time as "
                "--resources-per-trial leaves room for"
            )
        need_ray()
        asked = arguments.resources_per_trial
        return RayTasks(arguments.address, None if asked is None else Resources.parse(asked), say)
    for option in ("address", "resources_per_trial"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} belongs to --engine ray")
    from seht.lab.schedulers.local import InTurn, Processes

    return Processes(arguments.jobs, say) if arguments.jobs > 1 else InTurn(watch)


def watch(trial: Trial) -> Watch | None:
    """A progress bar, if the output is a terminal."""
    from seht.lab import progress

    return progress.Bar(trial.name, transient=True) if sys.stdout.isatty() else None


def say(line: str) -> None:
    """Print it now."""
    print(line, flush=True)


# --- the rows, from methods, alternatives or a preset -----------------------------------------


def rows_of(arguments: argparse.Namespace) -> tuple[Recipe, list[list[Entry]]]:
    """The recipe, and for each row its candidates."""
    from seht.lab.methods import METHODS
    from seht.lab.methods.parse import read, split_list
    from seht.lab.search import BEST, candidates, expand

    for option in () if arguments.grid else ("budget", "grid_seeds"):
        if getattr(arguments, option) is not None:
            said = f"--{option.replace('_', '-')} belongs to --grid"
            raise ValueError(f"{said}; leave it out, or search with --grid")
    if arguments.preset is not None:
        return _preset(arguments)
    if arguments.small:
        raise ValueError("--small belongs to --preset; the small recipe is RECIPE-small")
    if arguments.recipe is None:
        raise ValueError("name a recipe, for example seht compare digits, or give --preset")
    recipe = chosen_recipe(arguments)
    if arguments.methods is None:
        texts = [name for name, method in METHODS.items() if recipe.task in method.tasks]
        texts.sort(key=lambda name: name != "weight-decay")
        texts += more(recipe) if arguments.grid else []
    else:
        texts = split_list(arguments.methods)
    waiting = [text for text in texts if arguments.grid and _over_decay(text)]
    if waiting and not any([*read(text)] == ["weight-decay"] for text in {*texts} - {*waiting}):
        raise ValueError(
            f"{waiting[0]} goes on top of what a row weight-decay finds, and there is none; add "
            "weight-decay to --methods"
        )
    rows = []
    for text in texts:
        if not arguments.grid and f"weight={BEST}" in text:
            raise ValueError(f"{text}: the best weight is what --grid finds; search with --grid")
        found = candidates(text, recipe, arguments.budget) if arguments.grid else expand(text)
        rows.append([_entry(recipe, candidate, over_decay=text in waiting) for candidate in found])
    slugs = [entry.slug for row in rows for entry in row]
    for row in rows:
        for entry in row:
            if slugs.count(entry.slug) > 1:
                raise ValueError(f"{entry.name} is given twice in --methods; leave one out")
    return recipe, rows


def _over_decay(text: str) -> bool:
    from seht.lab.methods.parse import read
    from seht.lab.search import BEST

    return read(text).get("weight-decay", {}).get("weight") == BEST


def more(recipe: Recipe) -> list[str]:
    """What a search compares beyond single methods: the Gauss-Newton trace, with a weight from the
    grid or tuned in the run, and what goes on top of the best weight decay.
    """
    usual = recipe.settings.get("seht-h", {}).get("curvature") == "ggn"
    found = ["seht-h(curvature=ggn,weight=tuned)"]
    found += [f"weight-decay(weight=best)+{name}" for name in ("seht-h(curvature=ggn)", "sam")]
    return found if usual else ["seht-h(curvature=ggn)", *found]


def _preset(arguments: argparse.Namespace) -> tuple[Recipe, list[list[Entry]]]:
    from seht.lab import paper, recipes

    if arguments.recipe is not None or arguments.methods is not None or arguments.grid:
        raise ValueError(
            "--preset brings its own recipe, methods and settings; leave RECIPE, --methods and "
            "--grid out"
        )
    preset = paper.preset(arguments.preset, arguments.small)
    recipe = chosen_recipe(arguments, preset.recipe)
    return recipe, [
        [_entry(recipes.override(recipe, row.changes), row.method, row.changed)]
        for row in preset.rows
    ]


def _entry(recipe: Recipe, text: str, changes: str = "", over_decay: bool = False) -> Entry:
    from seht.lab.compare import Entry
    from seht.lab.methods.parse import parse

    spec = parse(text)
    spec.build(recipe)  # a method that does not fit should fail now, not after an hour
    return Entry(spec, recipe, changes, over_decay)
