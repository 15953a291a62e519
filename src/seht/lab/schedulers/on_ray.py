"""Trials as Ray tasks, on this machine or a cluster: Ray queues, places and retries them.

What a trial needs comes with it, what it makes goes to its directory, which driver and workers have
to see under the same path. So a task that Ray starts again, after its worker or its node is gone,
goes on from the trial's last checkpoint; and a driver that is killed leaves nothing behind but
trials that its next start goes on with.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from seht.errors import one_line
from seht.extras import need
from seht.lab.records import Record, Result, RunError, versions, writing
from seht.lab.schedulers import Done, Following
from seht.lab.trials import Trial

RETRIES = 5
"""How often Ray starts a trial again whose worker or node has died."""
PATIENCE = 120.0
"""Seconds for a former attempt to leave the trial's directory: its node may be out of sight but
alive, and a file server keeps a lost client's locks for its lease, often 90 seconds."""
ANSWER = 10.0
"""Seconds for the head of a cluster to answer at its address."""
STORE = 100 * 2**20
"""Bytes of Ray's object store on a cluster of our own: what tasks return is small."""


class RayTasks:
    """A :class:`~seht.lab.schedulers.Scheduler`: one task for each trial.

    Args:
        address: of a cluster's head (``host:port``), ``auto`` for the one on this machine;
            ``None``: ``RAY_ADDRESS`` or, where that is not set, a cluster on this machine for the
            time of the run.
        resources: what Ray sets aside for a trial.
        say: is told how the trials go.
    """

    def __init__(
        self,
        address: str | None = None,
        resources: Resources | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.resources, self.say = resources or Resources(), say

    def run(self, trials: Sequence[Trial], done: Done) -> None:
        if not trials:
            return
        ray = need_ray()
        with self.connected(ray):
            task = ray.remote(max_retries=RETRIES)(task_of(versions(), PATIENCE))
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            left: dict[Any, Trial] = {}
            following = Following(self.say)
            try:
                asked = [self.resources.of(t, nodes, self.may_grow, self.say) for t in trials]
                for trial, resources in zip(trials, asked, strict=True):
                    with writing(trial.out):
                        trial.out.mkdir(parents=True, exist_ok=True)  # workers look for it
                    named = task.options(name=trial.name, **resources)
                    left[named.remote(pickle.dumps(anywhere(trial)))] = trial
                while left:
                    ready, _ = ray.wait(list(left), timeout=following.every)
                    for ref in ready:
                        trial = left.pop(ref)
                        done(trial, outcome(ray, ref, trial))
                    following.look(left.values())
            finally:
                for ref in left:  # only after an error
                    ray.cancel(ref, force=True)

    @property
    def may_grow(self) -> bool:
        """Whether nodes may come that are not there yet."""
        return self.address != "local"

    @contextmanager
    def connected(self, ray: Any) -> Iterator[None]:
        """Be a driver of the cluster; of one that this program has joined already, as it is."""
        if ray.is_initialized():
            yield
            return
        import logging

        options: dict[str, Any] = {"address": self.address}
        if self.address == "local":
            options |= {"include_dashboard": False, "object_store_memory": STORE}
        try:
            knock(self.address)
        except OSError as error:
            raise RunError(
                f"nobody answers at --address {self.address} ({error}); start a cluster there with "
                "ray start --head, or give the address that it has printed"
            ) from error
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            line = one_line(error)
            raise RunError(
                f"no Ray cluster at --address {self.address}: {line}; one that wants a token needs "
                "RAY_AUTH_MODE=token here"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def knock(address: str) -> None:
    """Raise ``OSError`` if nothing listens there; Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER):
            pass


def need_ray() -> Any:
    """The ray package, imported on demand, with little output and without usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without an end of its own, Ray would try a trial that is too large for its node for ever.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    need("ray", "--engine ray")
    import ray

    return ray


def anywhere(trial: Trial) -> Trial:
    """The same trial with absolute paths."""
    data_dir = trial.execution.data_dir
    how = replace(trial.execution, data_dir=data_dir and os.path.abspath(data_dir))
    return replace(trial, out=trial.out.absolute(), execution=how)


def task_of(ours: dict[str, str], patience: float) -> Callable[[bytes], dict[str, Any]]:
    """The function that a worker runs. It has no module, so that it can be sent to any node.

    A worker with another seht has to be able to say so: nothing of seht is imported, and no trial
    unpickled, before the versions are compared.
    """

    def work(packed: bytes) -> dict[str, Any]:
        import pickle
        import platform
        import warnings

        host = platform.node()
        try:
            import torch

            import seht
        except ImportError as error:
            return {"refused": f"the Ray worker on {host} cannot import seht: {error}"}
        theirs = {"seht": seht.__version__, "torch": torch.__version__}
        for name, version in theirs.items():
            # The build may differ: a driver without a GPU has another torch than its workers.
            if version.split("+")[0] != ours[name].split("+")[0]:
                return {
                    "refused": f"the Ray worker on {host} has {name} {version}, the driver "
                    f"{ours[name]}; install the same version on both"
                }
        from seht.lab.records import RunError

        trial = pickle.loads(packed)
        if not trial.out.is_dir():
            return {
                "refused": f"the Ray worker on {host} does not see {trial.out}; choose a directory "
                "that every machine has under that path, with --out"
            }
        try:
            with warnings.catch_warnings(record=True) as heard:
                result = trial.run(patience=patience)
        except RunError as error:
            return {"refused": str(error)}
        return {"result": result, "warnings": [str(warning.message) for warning in heard]}

    return work


def outcome(ray: Any, ref: Any, trial: Trial) -> Result:
    """The result of a trial; if its worker died, its failure is recorded here."""
    from ray import exceptions

    failed = partial(trial.fail, patience=PATIENCE)
    times = f"{RETRIES + 1} times"
    try:
        said = ray.get(ref)
    except exceptions.OutOfMemoryError:
        return failed("out of memory: Ray has ended its worker, again and again, to save the node")
    except exceptions.WorkerCrashedError as error:
        if not trial.begun:
            raise RunError(
                "Ray's workers die before they begin to train; their logs, in Ray's directory on "
                "the node (/tmp/ray/session_latest/logs), say why"
            ) from error
        return failed(f"its worker has died {times}, perhaps for want of memory")
    except exceptions.NodeDiedError:
        return failed(f"the node it ran on was lost {times}")
    except exceptions.RayTaskError:
        raise  # a mistake in the program: with its traceback
    except exceptions.RayError as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(f"Ray: {line}; run the same command again to continue") from error
    if "refused" in said:
        raise RunError(said["refused"])
    for text in said["warnings"]:
        warnings.warn(text, stacklevel=1)
    if Record(trial.out).result() is None:
        raise RunError(
            f"{trial.out.absolute()} is another directory on the Ray worker than here; choose one "
            "that all machines share, with --out"
        )
    result: Result = said["result"]
    return result


@dataclass(frozen=True)
class Resources:
    """What Ray reserves for a trial, which affects where and when it runs and never its result.

    CPUs and GPUs; ``None``: as many CPUs as the recipe has threads, and a GPU where
    the cluster has one and the trial may use it.
    """

    cpus: float | None = None
    gpus: float | None = None

    @classmethod
    def parse(cls, text: str) -> Resources:
        """``cpus=1,gpus=0.5``; either may be left out."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in ("cpus", "gpus") or name in found:
                raise ValueError(
                    f"--resources-per-trial {text!r}: {name!r} is neither cpus nor gpus, or given "
                    "twice; write for example cpus=1,gpus=0.5"
                )
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not 0 <= number < math.inf or (number > 1 and number != int(number)):
                raise ValueError(
                    f"--resources-per-trial {text!r}: {name} must be a whole number, or a share "
                    f"between 0 and 1, not {value!r}"
                )
            found[name] = number
        return cls(**found)

    def of(
        self,
        trial: Trial,
        nodes: Sequence[Mapping[str, float]],
        may_grow: bool,
        say: Callable[[str], None],
    ) -> dict[str, float]:
        """Options of the trial's task; an error where no node has so much, nor ever will."""
        cpus, gpus = self.cpus, self.gpus
        if cpus is None:
            most = max(node.get("CPU", 0) for node in nodes)
            cpus = min(trial.recipe.threads, most or trial.recipe.threads)
        if gpus is None:
            device = trial.execution.device
            there = any(node.get("GPU", 0) >= 1 for node in nodes)
            gpus = float(device == "cuda" or (device == "auto" and there))
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            asked = f"{trial.name} takes {cpus:g} CPUs and {gpus:g} GPUs, and no node has so many"
            if not may_grow:
                raise RunError(f"{asked}; ask for less with --resources-per-trial")
            say(f"{asked}: it waits for one")
        return {"num_cpus": cpus, "num_gpus": gpus}
