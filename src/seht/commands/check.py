"""``seht check module:function``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from seht.commands.numbers import SEED, whole
from seht.commands.targets import call_target, describe
from seht.errors import UsageError

CHECK = """\
Compare each engine's Hessian-trace penalty with differences of ordinary gradients, on copies of
your own model and batch: in float64, and in the model's own precision over some steps. Says in
words whether the penalty's gradient can be trusted, and which module breaks it if not.
"""
CHECK_EPILOG = """\
the function returns the model, the loss function and a batch:

  # train.py
  def example():
      model = Net().train()
      x, y = next(iter(loader))
      return model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x, y)

  seht check train:example

Say what you will run, and the verdict is about that:

  seht check train:example --curvature ggn --boundary lm_head --engine auto

A small model and a batch of a few examples are enough: what is wrong is wrong at every size.
Exit code 0: every engine is trusted; 1: one is wrong, imprecise, failed or inconclusive; 2: a
mistake in the call.
"""


def add_check(commands: Any) -> None:
    """``seht check module:function``."""
    parser = commands.add_parser(
        "check",
        help="can the penalty's gradient be trusted on your model?",
        description=CHECK,
        epilog=CHECK_EPILOG,
    )
    parser.add_argument(
        "target",
        metavar="module:function",
        help="returns (model, loss_fn, batch); the current directory is importable",
    )
    parser.add_argument(
        "--engine", action="append", metavar="NAME", help="check this one only (may be repeated)"
    )
    parser.add_argument(
        "--curvature", default="hessian", metavar="NAME", help="hessian (default) or ggn"
    )
    parser.add_argument(
        "--boundary", metavar="MODULE", help="for ggn: the module whose outputs are the network's"
    )
    parser.add_argument(
        "--estimator", default="seht-h", metavar="NAME", help="seht-h (default), seht-d, seht-s"
    )
    parser.add_argument(
        "--directions",
        type=whole(1, 10_000),
        default=3,
        metavar="N",
        help="random probes (default 3)",
    )
    parser.add_argument(
        "--seed", type=whole(0, SEED), default=0, metavar="N", help="of the probes (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Load the triple, check it, print the report."""
    triple = call_target(arguments.target)
    if not isinstance(triple, (tuple, list)) or len(triple) != 3:
        raise UsageError(
            f"{arguments.target} must return (model, loss_fn, batch), not {describe(triple)}"
        )
    import seht

    try:
        report = seht.check(
            *triple,
            engines=arguments.engine,
            curvature=arguments.curvature,
            boundary=arguments.boundary,
            estimator=arguments.estimator,
            directions=arguments.directions,
            seed=arguments.seed,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(" ".join(str(error).split())) from error
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0 if report.ok else 1
