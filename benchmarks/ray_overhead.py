"""What Ray adds to a trial, beyond the start of the process that runs it.

    python benchmarks/ray_overhead.py --trials 12

The same short trials one after the other, in this process and then as Ray tasks on a cluster of
this machine with one CPU, which is what a trial takes. From the end of one trial to the end of the
next it takes the trial's own time, from its lock to its result, and what is added; a busy machine
makes the first longer and hardly the second. The first trial of either starts, imports and
allocates, and is left out. The figure wanted is a median of at most 3 seconds.
"""

import argparse
import importlib.util
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from seht.lab.compare import Comparison, Entry
from seht.lab.methods.parse import parse
from seht.lab.places import lock_of
from seht.lab.recipes import override, recipe
from seht.lab.schedulers.local import InTurn
from seht.lab.schedulers.on_ray import RayTasks

WANTED = 3.0
SHORT = {"epochs": "1", "data.size": "100", "data.validation": "50", "threads": "1"}


def added(scheduler, trials):
    """Seconds of each trial beyond its own, the first trial's end, and the median of their own."""
    begun, ends = time.time(), []
    scheduler.run(trials, lambda trial, result: ends.append((time.time(), trial)))
    own, more = [], []
    for (former, _), (later, trial) in itertools.pairwise(ends):
        files = (lock_of(trial.out), trial.out / "result.json")
        start, end = (file.stat().st_mtime for file in files)
        own.append(end - start)
        more.append(later - former - own[-1])
    return more, ends[0][0] - begun, statistics.median(own)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed (pip install 'seht[ray]'): nothing to measure")
        return
    import ray

    chosen = override(recipe("digits"), SHORT)
    entries = (Entry(parse("weight-decay"), chosen),)
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
            found[name] = added(scheduler, trials)
        ray.shutdown()
    print(f"digits, {options.trials} trials after the first, Ray {ray.__version__}")
    for name, (more, first, own) in found.items():
        print(
            f"  {name:<5} {own:.3f} s a trial and {statistics.median(more):.3f} s more "
            f"({min(more):.3f} to {max(more):.3f}); the first ends after {first:.1f} s"
        )
    ray_adds, here_adds = (statistics.median(found[name][0]) for name in ("ray", "here"))
    print(f"Ray adds {ray_adds - here_adds:.3f} s to a trial (wanted: at most {WANTED:g})")


if __name__ == "__main__":
    main()
