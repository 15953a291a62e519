"""Threads: models of their own work (tests/engines/test_failures.py); one model is an error."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from abusing import Surroundings, every_way, penalty_of, run
from helpers import Snapshot
from stepping import mlp, rows
from torch import nn

import seht


def in_a_thread(work):
    """What it returned, or the exception that it raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        return future.exception() or future.result()


@pytest.mark.supports("two threads in a step of one model", cell="refused")
@every_way
def test_two_threads_on_one_model(engine, form, curvature):
    """The second is told so while the first is inside its step, which goes on undisturbed."""
    model, (x, y) = mlp(), rows()
    first, second = penalty_of(model, engine, curvature), penalty_of(model, engine, curvature)
    answers = []

    def closure():
        loss = F.cross_entropy(model(x), y)
        if len(answers) < 2:
            closure_too = lambda: F.cross_entropy(model(x), y)
            answers.append(in_a_thread(lambda: run(second, closure_too, form)))
            answers.append(in_a_thread(lambda: model(x)))
        return loss

    run(first, closure, form)
    step, call = answers[:2]
    assert isinstance(step, RuntimeError) and "another thread" in str(step)
    assert "copy of the model, or hold one lock" in str(step)
    assert isinstance(call, RuntimeError) and "use a copy of it elsewhere" in str(call)
    assert second.step == 0
    other = mlp()
    plain = penalty_of(other, engine, curvature)
    run(plain, lambda: F.cross_entropy(other(x), y), form)
    Snapshot(model).assert_same(Snapshot(other), random=False)
    run(second, lambda: F.cross_entropy(model(x), y), form)  # it may, once the first is through


@every_way
def test_racing_threads_never_damage_the_weights(engine, form, curvature):
    model, (x, y) = mlp(), rows()
    before = Surroundings(model)
    done, told = [], []

    def work():
        penalty = penalty_of(model, engine, curvature)
        for _ in range(15):
            try:
                run(penalty, lambda: F.cross_entropy(model(x), y), form)
                done.append(penalty.step)
            except RuntimeError as error:
                told.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done and all("another thread" in text for text in told)
    after = Surroundings(model)
    for name, p in before.snapshot.state.items():
        if name in before.snapshot.gradient:
            assert torch.equal(p, after.snapshot.state[name]), name
    assert after.identities == before.identities and after.busy == before.busy == {}
    assert after.modes == before.modes and after.everywhere == before.everywhere


@every_way
def test_one_lock_is_enough(engine, form, curvature):
    model, (x, y), lock, failures = mlp(norm=False), rows(), threading.Lock(), []

    def work():
        penalty = penalty_of(model, engine, curvature)
        try:
            for _ in range(5):
                with lock:
                    run(penalty, lambda: F.cross_entropy(model(x), y), form)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@every_way
@pytest.mark.parametrize("whole", [True, False])
def test_a_closure_that_calls_the_model_in_a_thread(engine, form, curvature, whole):
    """The modes that make derivatives right are the calling thread's: silently wrong otherwise."""
    model, (x, y) = mlp(), rows()

    def closure():
        with ThreadPoolExecutor(1) as pool:
            if whole:
                return pool.submit(lambda: F.cross_entropy(model(x), y)).result()
            return F.cross_entropy(pool.submit(model, x).result(), y)

    penalty = penalty_of(model, engine, curvature)
    before = Surroundings(model, penalty)
    with pytest.raises(RuntimeError, match=r"called in another thread.*thread of the step only"):
        run(penalty, closure, form)
    Surroundings(model, penalty).assert_same(before)


def test_a_frozen_network_shared_by_threads_keeps_its_buffers():
    """Which thread it is lent to changes from pass to pass, which may look unrepeatable."""
    shared, failures = mlp(seed=9).eval().requires_grad_(False), []
    x, y = rows()

    models = [mlp(seed=k) for k in range(2)]  # the random state is shared by all threads
    buffers = [id(b) for b in shared.buffers()]

    def work(model):
        penalty = seht.HessianTrace(model, weight=0.01)
        try:
            for _ in range(15):
                penalty.backward(lambda: F.cross_entropy(model(x) + shared(x), y))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, seht.UnrepeatableError) for error in failures)
    assert [id(b) for b in shared.buffers()] == buffers  # given back to whom they belong


@every_way
def test_replicas_in_threads_are_refused(engine, form, curvature):
    inner = mlp()
    model = nn.DataParallel(inner)
    model.device_ids = [0, 1]  # as on a machine with two GPUs
    with pytest.raises(RuntimeError, match="use DistributedDataParallel, one process"):
        run(penalty_of(model, engine, curvature), lambda: model(rows()[0]).sum(), form)
