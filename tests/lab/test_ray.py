"""Comparisons on Ray: the figures of local ones, through kills, lost nodes and failing trials."""

import importlib.util
import json
import pickle
import random
import socket
import sys
import time
from dataclasses import replace

import pytest
from small import FEW, digits, options, outcome

import seht
from seht import cli
from seht.lab.compare import Comparison, Entry, compare
from seht.lab.methods.parse import parse
from seht.lab.records import Record, RunError
from seht.lab.schedulers import Following, on_ray
from seht.lab.schedulers.on_ray import Resources
from seht.lab.trials import Execution

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray", allow_module_level=True)

from clusters import Cluster, Dying, Mischief, drive, driven

METHODS = ("weight-decay", "seht-h(warmup=0)")
LONGER = {**FEW, "epochs": "12"}  # long enough to be hit in the middle
CALL = [
    "compare", "digits", "--methods", ",".join(METHODS), "--seeds", "2", "--save-every", "0",
    "--no-cost", *options(LONGER),
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """Of one node with one CPU; a cluster of its own would cost every test some ten seconds."""
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The comparison as it should be, on this machine and in this process."""
    out = tmp_path_factory.mktemp("undisturbed")
    recipe = digits(**LONGER)
    entries = tuple(Entry(parse(t), recipe) for t in METHODS)
    compare(Comparison(recipe, entries, (0, 1), out), costs=False, say=lambda line: None)
    return outcome(out)


def on(cluster):
    return ["--engine", "ray", "--address", cluster.address]


# --- kills ------------------------------------------------------------------------------------


def test_the_same_table_after_a_killed_worker_and_a_killed_driver(
    tmp_path, cluster, undisturbed, capsys
):
    out = tmp_path / "c"
    call = [*CALL, *on(cluster)]
    mischief = Mischief(call, out, tmp_path / "log", cluster.address, random.Random(0))
    mischief.start()
    mischief.kill_worker()
    assert cli.main([*map(str, call), "--out", str(out)]) == 2  # a second driver
    assert f"another process is working in {out};" in capsys.readouterr().err
    mischief.wait(lambda: len(mischief.done) == 1)
    mischief.wait(mischief.running)
    mischief.kill_driver()
    assert mischief.hits == ["worker", "driver"]
    mischief.start()
    mischief.end()
    assert "of 4 runs are done already" in (tmp_path / "log").read_text()
    assert outcome(out) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_ten_kills_of_workers_and_drivers(tmp_path, cluster, undisturbed, seed):
    draw = random.Random(seed)
    log, out = tmp_path / "log", tmp_path / "c"
    mischief = Mischief([*CALL, *on(cluster)], out, log, cluster.address, draw)
    whole = 4 * int(LONGER["epochs"])
    mischief.start()
    for left in range(10, 0, -1):
        # Some epochs on, so that the kills are spread over the comparison; then any moment.
        until = mischief.epochs + draw.uniform(0, 2 * (whole - mischief.epochs) / (left + 1))
        mischief.wait(lambda: mischief.epochs >= until)
        time.sleep(draw.uniform(0, 0.1))
        if left % 2:
            mischief.kill_worker()
        else:
            mischief.kill_driver()
        if mischief.driver.exitcode is not None:
            mischief.start()
    mischief.end()
    assert len(mischief.hits) >= 8 and len(set(mischief.hits)) == 2
    assert outcome(out) == undisturbed


@pytest.mark.slow
def test_a_lost_node(tmp_path, undisturbed):
    """Its trials go on elsewhere, from their checkpoints."""
    cluster = Cluster(cpus=1)
    try:
        cluster.ask("add", 1)
        log, out = tmp_path / "log", tmp_path / "c"
        call = [*CALL, *on(cluster)]
        mischief = Mischief(call, out, log, cluster.address, random.Random(0))
        mischief.start()
        mischief.wait(lambda: len(mischief.running()) == 2)
        cluster.ask("remove")
        assert not list(out.glob("table.csv"))  # in the middle
        mischief.end()
        assert outcome(out) == undisturbed
    finally:
        cluster.close()


# --- the same figures -------------------------------------------------------------------------


@pytest.mark.slow
def test_digits_is_the_same_everywhere(tmp_path, monkeypatch):
    """The recipe as it is: two threads, whatever a task's CPUs make of OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # for Ray to set
    monkeypatch.setenv("RAY_worker_niceness", "0")
    call = ["compare", "digits", "--methods", "weight-decay,sam,seht-d(prob=0.5),seht-h"]
    call += ["--seeds", "2", "--no-cost"]
    engines = {
        "local": [],
        "jobs": ["--jobs", "2"],
        "ray": ["--engine", "ray"],
        "one": ["--engine", "ray", "--resources-per-trial", "cpus=1"],
    }
    found = {}
    for name, extra in engines.items():
        log = tmp_path / f"{name}.log"
        process = drive([*call, *extra, "--out", tmp_path / name], log)
        process.join()
        assert process.exitcode == 0, log.read_text()
        found[name] = outcome(tmp_path / name)
    assert len(found["local"]["table.csv"]) == 4
    assert found["jobs"] == found["local"]
    assert found["ray"] == found["local"]
    assert found["one"] == found["local"]


@pytest.mark.slow
def test_two_drivers_run_no_trial_twice(tmp_path):
    """Also where the comparison's own lock does not keep the second out."""
    cluster = Cluster(cpus=2)
    try:
        comparison = small_comparison(tmp_path / "c", "weight-decay", "mixup", epochs="30")
        ends = [driven(seconds, cluster.address, comparison.trials()) for _ in range(2)]
        found = [end() for end in ends]
    finally:
        cluster.close()
    assert len(found[0]) == 4
    assert found[0] == found[1]  # a second run would have taken other seconds


def seconds(address, trials):
    found = {}
    on_ray.RayTasks(address, say=lambda line: None).run(
        trials, lambda trial, result: found.__setitem__(trial.name, result.seconds)
    )
    return found


# --- failures ---------------------------------------------------------------------------------


def small_comparison(out, *texts, **changes):
    recipe = digits(**changes)
    entries = tuple(Entry(parse(t), recipe) for t in texts)
    return Comparison(recipe, entries, (0, 1), out)


def failing(address, out):
    """In a driver: one trial that diverges, one that kills its worker, one that is fine."""
    import ray

    import seht

    on_ray.RETRIES = 1
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    comparison = small_comparison(out, "none", epochs="1")
    fine = comparison.trials()[0]
    wild = digits(epochs="1", **{"optim.lr": "1e30"})
    trials = [
        Dying(**{**vars(fine), "out": out / "runs/dying/seed-0", "label": "dying"}),
        replace(fine, recipe=wild, out=out / "runs/wild/seed-0", label="wild"),
        fine,
    ]
    found = {}
    scheduler = on_ray.RayTasks(address, say=lambda line: None)
    scheduler.run(trials, lambda trial, result: found.__setitem__(trial.name, result))
    scheduler.run([], lambda trial, result: None)
    seht.__version__ = "9.9"
    try:
        scheduler.run(comparison.trials()[1:], lambda trial, result: None)
    except RunError as error:
        return found, str(error), Record(fine.out).result()
    return found, "not refused", None


def test_trials_that_fail_are_recorded_and_the_others_finish(tmp_path, cluster):
    found, refused, there = driven(failing, cluster.address, tmp_path / "c")()
    assert found["wild, seed 0"].reason.startswith("the training loss is")
    dead = found["dying, seed 0"]
    assert (dead.status, dead.reason.split(",")[0]) == ("failed", "its worker has died 2 times")
    runs = tmp_path / "c" / "runs"
    assert (runs / "dying" / "seed-0.attempts").read_text() == "xx"
    record = json.loads((runs / "dying" / "seed-0" / "result.json").read_text())
    assert record["status"] == "failed" and record["reason"] == dead.reason
    assert found["none, seed 0"].done and there == found["none, seed 0"]
    assert f"has seht {seht.__version__}, the driver 9.9; install the same version" in refused
    assert not list(runs.glob("none/seed-1/*.json"))


@pytest.mark.slow
def test_a_trial_that_does_not_fit_into_memory(tmp_path, monkeypatch):
    """Ray's own monitor ends its worker, here at the first byte; the table says so."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    monkeypatch.setenv("RAY_task_oom_retries", "1")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    log, out = tmp_path / "log", tmp_path / "c"
    process = drive([*CALL, "--engine", "ray", "--epochs", "2000", "--out", out], log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert "failed: out of memory" in (out / "table.md").read_text()


def test_a_failure_does_not_replace_a_result(tmp_path):
    trial = small_comparison(tmp_path / "c", "none", epochs="1").trials()[0]
    failed = trial.fail("its worker has died")
    assert trial.finished() == failed and not failed.done
    assert trial.run() == failed  # until a retry is asked for
    result = replace(trial, execution=Execution(retry=True)).run()
    assert result.done and trial.fail("again") == result == trial.finished()


def test_a_worker_refuses_what_it_cannot_do(tmp_path):
    trial = small_comparison(tmp_path / "c", "none", epochs="1").trials()[0]
    versions = on_ray.versions()
    work = on_ray.task_of(versions, patience=0.0)
    said = work(pickle.dumps(trial))["refused"]
    assert f"does not see {trial.out}" in said and "--out" in said
    trial.out.mkdir(parents=True)
    assert on_ray.task_of({**versions, "torch": "1.0"}, 0.0)(b"")["refused"].count("1.0;") == 1
    said = work(pickle.dumps(replace(trial, recipe=digits(**{"data.size": "5000"}))))
    assert "lower one of them" in said["refused"]  # there are not so many digits
    other_build = {**versions, "torch": versions["torch"].split("+")[0] + "+cu999"}
    assert on_ray.task_of(other_build, 0.0)(pickle.dumps(trial))["result"].done


# --- options ----------------------------------------------------------------------------------


def test_resources():
    assert Resources.parse("cpus=1,gpus=0.5") == Resources(1.0, 0.5)
    assert Resources.parse("gpus=2") == Resources(None, 2.0)
    for text in ("cpu=1", "cpus", "cpus=-1", "gpus=1.5", "cpus=x", "cpus=1,cpus=2", "cpus=nan", ""):
        with pytest.raises(ValueError, match="--resources-per-trial"):
            Resources.parse(text)


def test_what_a_trial_takes(tmp_path):
    trial = small_comparison(tmp_path, "none", threads="2").trials()[0]
    said = []

    def asked(resources, nodes, may_grow=True, **how):
        changed = replace(trial, execution=Execution(**how))
        return resources.of(changed, nodes, may_grow, said.append)

    both = [{"CPU": 1}, {"CPU": 4, "GPU": 1}]
    assert asked(Resources(), both) == {"num_cpus": 2, "num_gpus": 1}
    assert asked(Resources(), both, device="cpu") == {"num_cpus": 2, "num_gpus": 0}
    assert asked(Resources(), [{"CPU": 1}]) == {"num_cpus": 1, "num_gpus": 0}
    assert asked(Resources(1, 0.5), both) == {"num_cpus": 1, "num_gpus": 0.5}
    assert not said
    assert asked(Resources(), [{}], device="cuda") == {"num_cpus": 2, "num_gpus": 1}
    assert said[0].endswith("takes 2 CPUs and 1 GPUs, and no node has so many: it waits for one")
    with pytest.raises(RunError, match="ask for less with --resources-per-trial"):
        asked(Resources(64), both, may_grow=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "ray", "--jobs", "2"], "--jobs belongs to --engine local"),
        (["--address", "auto"], "--address belongs to --engine ray"),
        (["--resources-per-trial", "cpus=1"], "--resources-per-trial belongs to --engine ray"),
        (["--engine", "ray", "--resources-per-trial", "cpus=many"], "not 'many'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options, words):
    assert cli.main(["compare", "digits", *options, "--out", str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "c").exists()


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens(tmp_path, capsys, prefix):
    """Ray would ask there again and again, and say so in lines of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{prefix}127.0.0.1:{server.getsockname()[1]}"  # free, once it is closed
    call = ["compare", "digits", "--methods", "none", "--engine", "ray", "--address", address]
    begun = time.monotonic()
    assert cli.main([*call, "--out", str(tmp_path / "c")]) == 2
    assert time.monotonic() - begun < 2 * on_ray.ANSWER
    said = capsys.readouterr().err
    assert f"nobody answers at --address {address} (" in said and said.count("\n") == 1
    assert "ray start --head" in said


def test_without_ray_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["compare", "digits", "--engine", "ray", "--out", str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'seht[ray]'" in said and said.count("\n") == 1


def test_following_tells_what_is_new(tmp_path):
    trials = small_comparison(tmp_path, "none").trials()
    said = []
    following = Following(said.append, every=0)
    following.look(trials)
    assert not said
    trials[0].run()
    for _ in range(2):
        following.look(trials)
    assert len(said) == 1 and said[0].startswith("none, seed 0: epoch 3/3, loss ")
    assert "top-1" in said[0]
