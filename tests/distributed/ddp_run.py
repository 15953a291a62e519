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

import torch
import torch.distributed as dist


def main(out, names):
    import ddp_checks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    results = {}
    for name in names:
        torch.manual_seed(1000 + rank)  # ranks with random numbers of their own
        check, arguments = ddp_checks.CHECKS[name]
        start = time.perf_counter()
        error = None
        try:
            check(*arguments)
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.perf_counter() - start}
        Path(f"{out}.{rank}").write_text(json.dumps(results))
        if error is not None:
            print(f"rank {rank}, {name}:\n{error}", file=sys.stderr, flush=True)
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)
    main(sys.argv[1], sys.argv[2].split(","))
