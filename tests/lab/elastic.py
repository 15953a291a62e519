"""Runs of several ranks under torchrun's own elastic agent, in processes that can be killed.

The agent starts its workers by a fork: what takes seconds to import is there already.
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path

from small import HEAVY, train

from seht.lab.progress import Lines


def _rank(recipe, method, out, options):
    import torch

    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    Path(out).parent.mkdir(exist_ok=True)
    (Path(out).parent / f"{Path(out).name}.pid-{rank}").write_text(str(os.getpid()))
    result = train(
        recipe, method, 0, out, device="cpu", save_every=0, watch=Lines(method), **options
    )
    assert result.done, result.reason


def _agent(recipe, methods, out, restarts, log, options):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    for method in methods:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            max_restarts=restarts,
            monitor_interval=0.05,
            start_method="fork",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=f"{os.getpid()}",
        )
        where = Path(out) / method if len(methods) > 1 else Path(out)
        elastic_launch(config, _rank)(recipe, method, str(where), options)
    os._exit(0)


def launch(recipe, *methods, out, restarts=0, **options):
    """Two ranks, under an agent in a process of its own; ``out`` has a directory for each method
    where there are several, and ``out.log`` what they printed.
    """
    for module in (*HEAVY, "torch.distributed.launcher.api", "pytorch_optimizer"):
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    arguments = (recipe, methods, str(out), restarts, f"{out}.log", options)
    process = fork.Process(target=_agent, args=arguments)
    process.start()
    return process


def end(process, out):
    process.join(150)
    if process.exitcode is None:
        process.terminate()
        process.join()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()
