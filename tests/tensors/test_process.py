"""Whatever a step changes in the whole process is back when it is over, however it ends."""

import importlib
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import every_engine
from stepping import FORMS, WEIGHT, entropy, mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import seht
from seht.tensors import process
from seht.tensors.process import CHANGES, VARIABLES, Change, unshortened

ROOT = Path(seht.__file__).parent


def everything():
    """All that is declared, as it is now."""
    found = {name: read() for name, read in CHANGES.items()}
    return found | {variable.name: variable.get() for variable in VARIABLES}


@pytest.fixture
def surroundings(monkeypatch):
    """A process in which every change is one: a group, Fabric, a compiler, shortened products, a
    hook.
    """
    importlib.import_module(process._COMPILER)
    for name in process._FABRIC:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{process._FLAG: False}))
    before = process.PRODUCTS.read()
    torch.set_float32_matmul_precision("high")
    hook = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    hook.remove()
    process.PRODUCTS.write(before)


class Boom(Exception):
    """What a closure raises."""


def interrupt():
    for _ in range(2):  # the second one breaks in before the next operation
        signal.raise_signal(signal.SIGINT)


def fail():
    raise Boom


ENDS = {"well": lambda: None, "failed": fail, "interrupted": interrupt}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("form", FORMS)
@every_engine
def test_everything_is_back(surroundings, engine, form, end):
    curvatures = ("hessian", "ggn")
    seen, before = [], everything()
    for curvature in curvatures:
        model = mlp()
        closure = entropy(model)
        penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, curvature=curvature)

        def look(closure=closure):
            loss, again = closure(), seht.replaying()
            seen.append(everything())
            if again:
                ENDS[end]()
            return loss * 1

        try:
            penalty.backward(look) if form == "lean" else penalty(look).backward()
            assert end == "well"
        except (Boom, KeyboardInterrupt):
            assert end != "well"
        found = everything()
        assert found.pop("seht_asked") > before["seht_asked"]  # a count
        assert found == {name: before[name] for name in found}
    changed = {name for name in before if any(each[name] != before[name] for each in seen)}
    kernels = {"kernels of attention"}  # for nested gradients, which no compiled code has
    others = kernels if engine == "difference" else {"buffers that compiled code gives up"}
    assert before.keys() - changed == others | {"cuDNN", "the profiler's log"}


class Look(TorchDispatchMode):
    """Whether cuDNN is on, at each operation."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(torch.backends.cudnn.enabled)
        return func(*args, **(kwargs or {}))


def test_recurrent_layers_go_without_cudnn():
    model, x = nn.GRU(2, 3).double(), torch.randn(4, 5, 2).double()
    look = Look()

    def closure():
        with look:
            return model(x)[0].square().mean()

    seht.HessianTrace(model, weight=WEIGHT, engine="autograd").backward(closure)
    assert look.seen == {True, False}
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (unshortened, torch.get_float32_matmul_precision),
        (process.math_attention, process.ATTENTION.read),
        (process.without_cudnn, process.CUDNN.read),
        (process.own_gradients, process.FABRIC.read),
        (process.quiet_profiler, process.KINETO.read),
    ],
)
def test_the_last_of_two_threads_puts_it_back(surroundings, change, read):
    """The second must not take the change for what the user wanted, nor the first end it early."""
    before, inside, leave = read(), threading.Event(), threading.Event()

    def second():
        with change():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=second)
    with change():
        changed = read()
        thread.start()
        inside.wait(10)
    assert read() == changed != before
    leave.set()
    thread.join()
    assert read() == before


def test_a_change_that_fails_half_way_is_taken_back():
    value = [1, 2]

    def half():
        value[0] = 5
        raise Boom

    change = Change(value.copy, lambda old: value.__setitem__(slice(None), old))
    with pytest.raises(Boom), change.on(half):
        pass
    assert value == [1, 2]
    with change.on(value.clear):
        assert value == []
    assert value == [1, 2]


def test_nothing_is_changed_elsewhere():
    """What would be a change of the process stands in one file."""
    pattern = re.compile(
        r"ContextVar\(|signal\.signal\(|register_module_\w+_hook|register_optimizer_step|"
        r"set_float32_matmul|allow_tf32 =|cudnn\.flags|environ\[|setattr\((torch|sys\.modules)"
    )
    library = [path for path in ROOT.rglob("*.py") if "lab" not in path.relative_to(ROOT).parts]
    found = {
        path.relative_to(ROOT).as_posix() for path in library if pattern.search(path.read_text())
    }
    assert found == {"tensors/process.py"}
