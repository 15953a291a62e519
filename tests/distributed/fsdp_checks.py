"""What `penalty.backward` must do on a model sharded by `fully_shard`; run by `torchrun`.

    torchrun --nproc_per_node 2 fsdp_checks.py trajectory:relu:float64 failures ...

Every argument is one check, `name` or `name:with:arguments`. How each went is printed, or written
as JSON to the file that FSDP_RESULTS names, for each rank.
"""

import json
import os
import sys
import time
import traceback
from datetime import timedelta

import fsdp_failures  # noqa: F401  these define the checks
import fsdp_gradients  # noqa: F401
import fsdp_models  # noqa: F401
import fsdp_refusals  # noqa: F401
import fsdp_trajectory  # noqa: F401
import fsdp_tuned  # noqa: F401
import torch
import torch.distributed as dist
from fsdp_problems import CHECKS, DEVICE


def main(arguments):
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    results = {}
    for argument in arguments:
        name, *given = argument.split(":")
        try:
            begin = time.process_time()
            found = CHECKS[name](*given) or "ok"
            results[argument] = f"{found}, in {time.process_time() - begin:.1f} s"
        except BaseException:
            results[argument] = "FAILED\n" + traceback.format_exc()
            break  # the other rank may be elsewhere now
    out = os.environ.get("FSDP_RESULTS")
    if out:
        with open(f"{out}.{dist.get_rank()}", "w") as file:
            json.dump(results, file)
    elif dist.get_rank() == 0:
        print("\n".join(f"{name}: {result}" for name, result in results.items()))
    failed = any(result.startswith("FAILED") for result in results.values())
    if not failed:
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
