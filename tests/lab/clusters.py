"""Ray clusters and drivers in processes of their own: the tests' process never speaks to Ray, whose
threads would not survive the forks of other tests.
"""

import importlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from small import HEAVY, command, rows

from seht.lab.places import alone
from seht.lab.trials import Trial

fork = multiprocessing.get_context("fork")


def begin(target, *arguments):
    """Forked with everything in memory that takes seconds to import."""
    for module in (*HEAVY, "ray.cluster_utils", "seht.lab.runner"):
        importlib.import_module(module)
    process = fork.Process(target=target, args=arguments)
    process.start()
    return process


class Cluster:
    """One head on this machine, and as many nodes as are added."""

    def __init__(self, cpus=1, **options):
        self.pipe, theirs = fork.Pipe()
        self.process = begin(_keep, theirs, cpus, options)
        theirs.close()
        self.address = self.pipe.recv()

    def ask(self, word, *arguments):
        self.pipe.send((word, *arguments))
        return self.pipe.recv()

    def close(self):
        self.ask("close")
        self.process.join()


def _keep(pipe, cpus, options):
    from ray.cluster_utils import Cluster

    # Workers that give way to everything else hardly run on a busy machine.
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    here = str(Path(__file__).parent)  # workers unpickle what is defined in tests
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={"num_cpus": cpus, **small, **options})
    pipe.send(cluster.address)
    nodes = []
    while True:
        try:
            word, *arguments = pipe.recv()
        except EOFError:
            break
        if word == "add":
            nodes.append(cluster.add_node(num_cpus=arguments[0], **small))
        elif word == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif word == "close":
            cluster.shutdown()
        pipe.send(word)
        if word == "close":
            break


def working(address):
    """Processes that run a trial for a driver of that cluster, by Ray's title for them."""
    found = []
    for process in psutil.process_iter():
        try:
            title = "".join(process.cmdline())  # `ray::` and the task's name, which is the trial's
            ours = title.startswith("ray::") and ", seed " in title
            if ours and address in " ".join(process.parent().cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def drive(arguments, log):
    """The command in a process of its own."""
    return begin(command, [str(a) for a in arguments], str(log), None)


def driven(function, *arguments):
    """Begin a function in a process of its own; returns what waits for its result."""
    ours, theirs = fork.Pipe()
    process = begin(_call, theirs, function, arguments)
    theirs.close()

    def end():
        try:
            return ours.recv()
        finally:
            process.join()

    return end


def _call(pipe, function, arguments):
    pipe.send(function(*arguments))


@dataclass(frozen=True)
class Dying(Trial):
    """Takes its worker with it, every time."""

    def run(self, watch=None, patience=0.0):
        with alone(self.out, patience), open(self.out.with_suffix(".attempts"), "a") as file:
            file.write("x")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)


class Mischief:
    """Kills workers and drivers of a comparison at random, and sees that nothing is lost by it."""

    def __init__(self, call, out, log, address, draw):
        self.call, self.out, self.log = [*call, "--out", out], Path(out), log
        self.address, self.draw = address, draw
        self.driver, self.done, self.epochs, self.hits = None, {}, 0, []

    def start(self):
        self.driver = drive(self.call, self.log)

    def look(self):
        """Results stay what they were, and no run begins anew."""
        for file in self.out.glob("runs/*/*/result.json"):
            written = file.stat().st_mtime_ns
            assert self.done.setdefault(file, written) == written, f"{file} was written twice"
        epochs = rows(self.out)
        assert epochs >= self.epochs, "a run has begun again"
        self.epochs = epochs

    def wait(self, condition, seconds=120):
        """Until it holds, or the driver is through."""
        until = time.monotonic() + seconds
        while self.driver.exitcode is None and not condition():
            assert time.monotonic() < until, self.log.read_text()
            self.look()
            time.sleep(0.01)

    def running(self):
        return [p for p in self.out.glob("runs/*/*/checkpoint.pt")]

    def kill_worker(self):
        """One in mid-trial."""
        self.wait(lambda: self.running() and working(self.address))
        victims = working(self.address)
        if victims:
            os.kill(self.draw.choice(victims).pid, signal.SIGKILL)
            self.hits.append("worker")

    def kill_driver(self):
        if self.driver.exitcode is None:
            self.driver.kill()
            self.hits.append("driver")
        self.driver.join()

    def end(self):
        self.wait(lambda: False)
        self.driver.join()
        assert self.driver.exitcode == 0, self.log.read_text()
        self.look()
