"""Started by torchrun: run the checks named and write down how each came out.

Every rank runs every check. The first failure ends the run, as the ranks may have lost each other.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import ddp_checks
import torch
import torch.distributed as dist
from ddp_common import DEVICE


def main(out, names):
    torch.set_num_threads(1)
    backend = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    results = {}
    for name in names:
        torch.manual_seed(1000 + rank)  # ranks with random numbers of their own
        check, arguments = ddp_checks.CHECKS[name]
        start = time.process_time()
        error = None
        try:
            check(*arguments)
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.process_time() - start}
        Path(f"{out}.{rank}").write_text(json.dumps(results))
        if error is not None:
            print(f"rank {rank}, {name}:\n{error}", file=sys.stderr, flush=True)
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)
    main(sys.argv[1], sys.argv[2].split(","))
