"""``seht check module:function``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from seht.commands.options import SEED, add_options, whole
from seht.commands.targets import call_example, one_batch
from seht.errors import UsageError, one_line

CHECK = """\
Compare each engine's Hessian-trace penalty with differences of ordinary gradients, on copies of
your own model and batch: in float64, and in the model's own precision over some steps. Says in
words whether the penalty's gradient can be trusted, and which module breaks it if not.
"""
CHECK_EPILOG = """\
the function returns the model, the loss function and a batch, or a data set or loader, whose first
batch is taken; what `seht doctor` takes (with held-out data behind it) will do:

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
    text = "can the penalty's gradient be trusted on your model?"
    parser = commands.add_parser("check", help=text, description=CHECK, epilog=CHECK_EPILOG)
    brings = "returns (model, loss_fn, data); the current directory is importable"
    add_options(
        parser,
        ("target module:function", brings),
        ("--engine NAME ...", "check this one only (may be repeated)"),
        ("--curvature NAME", "hessian (default) or ggn, what HessianTrace(model) takes"),
        ("--boundary MODULE", "for ggn: the module whose outputs are the logits"),
        ("--estimator NAME", "seht-h (default), seht-d, seht-s", str, "seht-h"),
        ("--directions N", "random probes (default 3)", whole(1, 10_000), 3),
        ("--seed N", "seed of the probes (default 0)", whole(0, SEED), 0),
        ("--json", "print the report as JSON"),
    )
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Load what the function returns, check it, print the report."""
    model, loss_fn, data, _ = call_example(arguments.target)
    import seht

    try:
        names = ("boundary", "estimator", "directions", "seed")
        options = {name: getattr(arguments, name) for name in names}
        options["curvature"] = arguments.curvature or "hessian"
        report = seht.check(model, loss_fn, one_batch(data), engines=arguments.engine, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(one_line(error)) from error
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    if arguments.curvature is None and not arguments.json:
        print("note: this was the whole trace; without a weight= of yours the penalty takes")
        print("      the Gauss-Newton trace, which --curvature ggn checks")
    return 0 if report.ok else 1
