"""What Ray adds to a trial, beyond the start of the process that runs it.

    python benchmarks/ray_overhead.py --trials 12

The same short trials one after the other, in this process and then as Ray tasks on a cluster of
this machine, which is given as many CPUs as a trial takes: the time from the end of one trial to
the end of the next is the trial's own and what Ray adds. The first trial of either starts, imports
and allocates, and is left out. The figure wanted is a median difference of at most 3 seconds.
"""

import argparse
import importlib.util
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from seht.lab.compare import Comparison, Entry
from seht.lab.recipes import override, recipe
from seht.lab.schedulers.local import InTurn
from seht.lab.schedulers.on_ray import RayTasks

WANTED = 3.0
SHORT = {"epochs": "1", "data.size": "100", "data.validation": "50", "threads": "1"}


def ends(scheduler, trials):
    """Seconds from the start to the end of each trial."""
    begun, found = time.perf_counter(), []
    scheduler.run(trials, lambda trial, result: found.append(time.perf_counter() - begun))
    return found


def each(found):
    """Seconds of a trial: the median, and the least and most."""
    apart = [later - former for former, later in itertools.pairwise(found)]
    return statistics.median(apart), min(apart), max(apart)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed (pip install 'seht[ray]'): nothing to measure")
        return
    import ray

    chosen = override(recipe("digits"), SHORT)
    entries = (Entry("weight-decay", chosen, "weight-decay"),)
    seeds = tuple(range(options.trials + 1))
    with tempfile.TemporaryDirectory() as directory:
        found = {}
        for name, scheduler in (("here", InTurn()), ("ray", RayTasks("local"))):
            trials = Comparison(chosen, entries, seeds, Path(directory, name)).trials()
            if name == "ray":
                quiet = {"log_to_driver": False, "logging_level": "ERROR"}
                start = time.perf_counter()
                ray.init("local", num_cpus=1, include_dashboard=False, **quiet)
                print(f"a cluster on this machine starts in {time.perf_counter() - start:.1f} s")
            found[name] = ends(scheduler, trials)
        ray.shutdown()
    print(f"digits, {options.trials} trials after the first, Ray {ray.__version__}")
    middle = {}
    for name, times in found.items():
        middle[name], least, most = each(times)
        print(
            f"  {name:<5} {middle[name]:7.3f} s a trial ({least:.3f} to {most:.3f}), "
            f"the first {times[0]:.2f} s"
        )
    added = middle["ray"] - middle["here"]
    print(f"Ray adds {added:.3f} s to a trial (wanted: at most {WANTED:g})")


if __name__ == "__main__":
    main()
