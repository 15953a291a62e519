"""The commands ``seht train`` and ``seht compare``: their arguments, and what they print.

What they need is imported when they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seht.lab.compare import Entry
    from seht.lab.config import Recipe

TRAIN = """\
Train one method on one recipe. The run is kept in a directory: killed and started again, the same
command goes on and ends with the same figures.
"""
TRAIN_EPILOG = """\
examples:
  seht train digits --method 'seht-h(curvature=ggn,weight=1e-3)'
  seht train cifar10-small --method seht-d+label-smoothing --seed 3 --epochs 5 --model.width 8
  seht train digits --help          every field of the recipe with its value

Every field of the recipe is an option; --settings.METHOD.OPTION VALUE sets a method's.
"""
COMPARE = """\
Train every method with every seed, measure what each costs and how flat its minimum is, and write
the table and the page. What is done is skipped: killed and started again, the same command goes on.
"""
COMPARE_EPILOG = """\
examples:
  seht compare digits
  seht compare cifar10-low --methods 'weight-decay,sam,seht-h(curvature=ggn)' --seeds 3
  seht compare digits --methods 'weight-decay,seht-h(weight=1e-3|1e-2|1e-1)' --grid
  seht compare --preset table1 --small

The first method is the baseline. Alternatives, written a|b|c, are rows of their own, or with --grid
the candidates of one row.
"""


def add_train(commands: Any) -> None:
    """``seht train RECIPE --method M``."""
    parser = _parser(commands, "train", "train one method", TRAIN, TRAIN_EPILOG)
    parser.add_argument("recipe", metavar="RECIPE", help="its name, for example digits")
    parser.add_argument(
        "--method", default="weight-decay", metavar="M", help="(default: weight-decay)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="processes that share every batch (DDP), one for each device (default: 1)",
    )
    _shared(parser, "runs/train/RECIPE/METHOD/seed-N")
    parser.set_defaults(run=run_train)


def add_compare(commands: Any) -> None:
    """``seht compare RECIPE``."""
    parser = _parser(
        commands, "compare", "every method, several seeds: a table", COMPARE, COMPARE_EPILOG
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="its name, for example digits")
    parser.add_argument(
        "--methods", metavar="A,B", help="the first is the baseline (default: all that fit)"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="seeds 0 to N - 1 (default: 5)"
    )
    parser.add_argument("--preset", metavar="NAME", help="rows of the paper: table1, figure1, ...")
    parser.add_argument("--small", action="store_true", help="the preset's recipe for CPUs")
    parser.add_argument(
        "--grid", action="store_true", help="search each method's settings on the validation split"
    )
    parser.add_argument(
        "--grid-seeds", type=int, default=1, metavar="N", help="of the search (default: 1)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)"
    )
    parser.add_argument("--no-cost", action="store_true", help="do not time the steps")
    _shared(parser, "runs/RECIPE")
    parser.set_defaults(run=run_compare)


def _parser(commands: Any, name: str, text: str, about: str, epilog: str) -> Any:
    return commands.add_parser(
        name,
        help=text,
        description=about,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )


def _shared(parser: Any, default: str) -> None:
    parser.add_argument("--out", metavar="DIR", help=f"(default: {default})")
    parser.add_argument("--data-dir", metavar="DIR", help="where to look for the data first")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cpu, cuda (default: auto)"
    )
    parser.add_argument(
        "--save-every",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="between two checkpoints (default: 30)",
    )
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument(
        "-h", "--help", action=_Help, nargs=0, help="this, and the recipe's fields if it is named"
    )
    for name in field_names():
        if name != "settings":
            parser.add_argument(
                f"--{name}", dest=f"field:{name}", default=None, help=argparse.SUPPRESS
            )
    parser.set_defaults(extras=True)


def field_names() -> Iterator[str]:
    """``epochs``, ``data.size``, ``model.width`` ...: the same for every recipe."""
    from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe

    parts = {"data": DataConfig, "model": ModelConfig, "optim": OptimConfig}
    for field in dataclasses.fields(Recipe):
        if field.name in parts:
            for inner in dataclasses.fields(parts[field.name]):
                yield f"{field.name}.{inner.name}"
        elif field.name != "name":
            yield field.name


class _Help(argparse.Action):
    """The usual help and, after a recipe's name, its fields."""

    def __call__(self, parser: Any, namespace: Any, *_: Any) -> None:
        parser.print_help()
        name = getattr(namespace, "recipe", None)
        if name is not None:
            from seht.lab import recipes

            try:
                recipe = recipes.recipe(name)
            except ValueError as error:
                parser.error(str(error))
            print(f"\nfields of {name}:")
            for dotted, kind, value, about in recipes.fields(recipe):
                print(f"  --{dotted:<20} {value!s:<12} {kind}{'; ' if about else ''}{about}")
        parser.exit(0)


# --- running ----------------------------------------------------------------------------------


def told(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Whatever the user can put right becomes one line and exit code 2."""

    def run(arguments: argparse.Namespace) -> int:
        from seht.commands.targets import UsageError
        from seht.lab import progress
        from seht.lab.ranks import leads
        from seht.lab.records import RunError
        from seht.lab.report import ReportError

        try:
            with warnings.catch_warnings():
                progress.plain_warnings()
                return function(arguments)
        except (RunError, ReportError) as error:
            if not leads():
                return 2  # the first rank says it
            raise UsageError(str(error)) from error
        except KeyboardInterrupt:
            print("\nseht: interrupted; the same command goes on from here", file=sys.stderr)
            return 130

    return run


@told
def run_train(arguments: argparse.Namespace) -> int:
    """Train, and say where the results are."""
    from seht.lab import progress
    from seht.lab.ranks import leads
    from seht.lab.records import RunError

    if arguments.devices < 1:
        raise RunError("--devices must be at least 1")
    recipe, (spec,) = _read(lambda: (_recipe(arguments), [_spec(arguments.method)]))
    default = Path("runs", "train", recipe.name, spec.slug, f"seed-{arguments.seed}")
    out = Path(arguments.out or default)
    from seht.lab.runner import train

    result = train(
        recipe,
        spec.text,
        arguments.seed,
        out,
        data_dir=arguments.data_dir,
        device=arguments.device,
        devices=arguments.devices,
        watch=progress.make(f"{spec.text}, seed {arguments.seed}"),
        save_every=arguments.save_every,
        retry=arguments.retry,
    )
    if not leads():
        return 0 if result.done else 1
    if not result.done:
        print(f"failed: {result.reason}")
    for which, metrics in result.metrics.items():
        print(f"{which + ':':<6}" + ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
    if result.trace is not None:
        trace = result.trace
        print(
            f"trace {trace['estimate']:.4g} ± {trace['stderr']:.2g}, "
            f"weight norm {result.weight_norm:.4g}, training loss {result.train_loss:.4g}"
        )
    print(out)
    return 0 if result.done else 1


@told
def run_compare(arguments: argparse.Namespace) -> int:
    """Compare, print the table and say where the page is."""
    from seht.lab import progress, report
    from seht.lab.compare import Comparison, compare
    from seht.lab.ranks import under_torchrun
    from seht.lab.records import RunError
    from seht.lab.trials import InTurn, Processes, Trial

    if under_torchrun():
        raise RunError("seht compare runs its trials in processes of its own: --jobs, no torchrun")
    recipe, rows = _read(lambda: _rows(arguments))
    out = Path(arguments.out or Path("runs", recipe.name))
    grid = rows if arguments.grid else None
    entries = [row[0] for row in rows] if arguments.grid else [e for row in rows for e in row]

    def watch(trial: Trial) -> progress.Watch | None:
        return progress.Bar(trial.name, transient=True) if sys.stdout.isatty() else None

    compare(
        Comparison(
            recipe,
            tuple(entries),
            tuple(range(arguments.seeds)),
            out,
            arguments.data_dir,
            arguments.device,
            arguments.save_every,
            arguments.retry,
        ),
        grid=grid,
        grid_seeds=arguments.grid_seeds,
        scheduler=Processes(arguments.jobs) if arguments.jobs > 1 else InTurn(watch),
        costs=not arguments.no_cost,
        what_fits=arguments.methods is None and arguments.preset is None,
        say=lambda line: print(line, flush=True),
    )
    report.show(out)
    print(out / "report.html")
    return 0


def _read(make: Callable[[], Any]) -> Any:
    """What the user has written; a mistake in it is said in one line."""
    from seht.lab.records import RunError

    try:
        return make()
    except ValueError as error:
        raise RunError(" ".join(str(error).split())) from error


def _recipe(arguments: argparse.Namespace, name: str | None = None) -> Recipe:
    from seht.lab import recipes

    recipe = recipes.recipe(name or arguments.recipe)
    given = {
        key.removeprefix("field:"): value
        for key, value in vars(arguments).items()
        if key.startswith("field:") and value is not None
    }
    return recipes.override(recipe, given | dict(_settings(arguments.rest)))


def _settings(rest: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--settings.seht-d.weight 0.1`` and ``--settings.seht-d.weight=0.1``."""
    from seht.estimators import unknown

    words = iter(rest)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--settings."):
            if not name.startswith("-"):
                raise ValueError(f"{word!r} is one argument too many; see seht COMMAND --help")
            options = ["method", "methods", "seed", "seeds", "out", "data-dir", "device"]
            known = [f"--{option}" for option in [*options, *field_names()]]
            raise ValueError(unknown("option", name, known))
        if not equals:
            value = next(words, "")
        if not value:
            raise ValueError(f"{name} needs a value")
        yield name.removeprefix("--"), value


def _spec(text: str) -> Any:
    from seht.lab.methods.parse import parse

    return parse(text)


def _rows(arguments: argparse.Namespace) -> tuple[Recipe, list[list[Entry]]]:
    """The recipe, and for each row its candidates."""
    from seht.lab.methods import METHODS
    from seht.lab.methods.parse import split_list
    from seht.lab.search import candidates, expand

    for name in ("seeds", "grid_seeds", "jobs"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.preset is not None:
        return _preset(arguments)
    if arguments.small:
        raise ValueError("--small belongs to --preset; the small recipe is RECIPE-small")
    if arguments.recipe is None:
        raise ValueError("name a recipe, for example seht compare digits, or give --preset")
    recipe = _recipe(arguments)
    if arguments.methods is None:
        texts = [name for name, method in METHODS.items() if recipe.task in method.tasks]
        texts.sort(key=lambda name: name != "weight-decay")
    else:
        texts = split_list(arguments.methods)
    rows = []
    for text in texts:
        found = candidates(text, recipe) if arguments.grid else expand(text)
        rows.append([_entry(recipe, candidate) for candidate in found])
    slugs = [entry.slug for row in rows for entry in row]
    for row in rows:
        for entry in row:
            if slugs.count(entry.slug) > 1:
                raise ValueError(f"{entry.name} is given twice in --methods; leave one out")
    return recipe, rows


def _preset(arguments: argparse.Namespace) -> tuple[Recipe, list[list[Entry]]]:
    from seht.lab import presets, recipes

    if arguments.recipe is not None or arguments.methods is not None or arguments.grid:
        raise ValueError("--preset brings its own recipe and methods; leave the others out")
    preset = presets.preset(arguments.preset, arguments.small)
    recipe = _recipe(arguments, preset.recipe)
    return recipe, [
        [_entry(recipes.override(recipe, row.changes), row.method, row.changes)]
        for row in preset.rows
    ]


def _entry(recipe: Recipe, text: str, changes: dict[str, str] | None = None) -> Entry:
    from seht.lab.compare import Entry

    spec = _spec(text)
    spec.build(recipe)  # what does not fit is said now, not after an hour
    if not changes:
        return Entry(spec.text, recipe, spec.slug)
    said = ",".join(f"{name}={value}" for name, value in changes.items())
    return Entry(spec.text, recipe, f"{spec.slug}@{said}", f"{spec.text}@{said}")
