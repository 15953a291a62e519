"""Compares PyTorch's whole database of operators: ``python -m programs.opinfo SAMPLES PART PARTS``.

A process of its own, because importing the database forbids backend flags, changes hypothesis's
profile and takes seconds. It prints one line of JSON: how many comparisons ended how, and what was
wrong.
"""

import json
import sys
import warnings
from collections import Counter
from typing import Any

import torch

from programs.operators import Unusable, compare


def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    freeze = torch.backends.disable_global_flags
    freeze.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return [op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes]


def samples(op: Any, count: int) -> list[Any]:
    try:
        # All of them are drawn: a generator under no_grad that is left half-way is cleared away
        # at any time, also in the middle of a closure.
        every = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    except Exception:  # needs a GPU, or a library
        return []
    return every[:: max(1, len(every) // count)][:count]


def run(count: int, part: int, parts: int, engine: str = "difference") -> dict[str, Any]:
    ends: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for op in database()[part::parts]:
        torch.manual_seed(0)
        for sample in samples(op, count):
            try:
                end = compare(op, sample, engine)
            except Unusable:
                end = "unusable"
            ends[end.partition(":")[0]] += 1
            if end.startswith("wrong"):
                wrong.setdefault(op.name, end)
    return {"ends": ends, "wrong": wrong}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(run(*map(int, sys.argv[1:4]), *sys.argv[4:5])))
