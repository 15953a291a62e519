"""A step that is broken off at its k-th moment: by an error in an operation, or by Ctrl-C."""

import contextlib
import copy
import signal
import sys

import torch
import torch.nn.functional as F
from abusing import Surroundings, penalty_of, run
from stepping import mlp, rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from seht.replay import state
from seht.tensors import process, undo


class Boom(RuntimeError):
    """The error that is injected."""


class Operations(TorchDispatchMode):
    """Counts the operations that need memory, forward and backward, and fails at one of them.

    What writes in place or makes a view needs none: that is how weights are restored and gradients
    accumulated.
    """

    error = Boom

    def __init__(self, moment=None):
        super().__init__()
        self.moment, self.count = moment, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if all(result.alias_info is None for result in func._schema.returns):
            self.count += 1
            if self.count == self.moment:
                raise Boom(f"operation {self.count}: {func}")
        return func(*args, **(kwargs or {}))


class Interrupts:
    """Counts the lines, calls and returns that Python runs, and presses Ctrl-C at one of them."""

    error = KeyboardInterrupt

    def __init__(self, moment=None):
        self.moment, self.count, self.where = moment, 0, None

    def _line(self, frame, event, arg):
        if not self._inside:
            return None
        self.count += 1
        if self.count == self.moment:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        return self._line

    def __enter__(self):
        self._inside, self._before = True, sys.gettrace()
        sys.settrace(self._line)
        return self

    def __exit__(self, *_):
        self._inside = False
        sys.settrace(self._before)


class Checkpointed(nn.Sequential):
    """Every part but the last in an activation checkpoint."""

    reentrant = False

    def forward(self, x):
        *parts, last = self
        for part in parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return last(x)


class Own(nn.Module):
    """Noise from a generator of the user's own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(9)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return x * noise


class Problem:
    """A small network with all that a step may leave half done, and a penalty on it."""

    def __init__(self, engine, form, *, model="plain", warm=True, hook=False, **options):
        self.form = form
        net = mlp(dropout=0.3)
        if model == "noise":
            net.insert(2, Own())
        if model in ("checkpoints", "reentrant"):
            net = Checkpointed(*net)
            net.reentrant = model == "reentrant"
        self.model = net
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        if hook:
            net[0].weight.register_hook(lambda g: g * 1.0)
        options = {"curvature": "hessian"} | options
        self.penalty = penalty_of(net, engine, warm=warm, **options)
        x, y = rows()
        if model == "reentrant":
            x = x.requires_grad_()
        self.closure = lambda: F.cross_entropy(net(x), y)
        torch.manual_seed(17)

    def step(self, injector=None):
        """What the step gives; for the scalar form only the call is ours to guard."""
        if injector is None:
            return run(self.penalty, self.closure, self.form)
        with injector:
            return (
                self.penalty.backward(self.closure)
                if self.form == "lean"
                else self.penalty(self.closure)
            )

    def everything(self):
        return Everything(self.model, self.penalty)


class Everything(Surroundings):
    """All of it, and the places where the package itself keeps something."""

    def __init__(self, model, penalty):
        super().__init__(model, penalty)
        engine = penalty._course.engine
        self.kept = {
            "record": penalty._course.account._last,
            "calls": penalty._course.account.calls,
            "unmet": penalty._course.account._unmet,
            "engine": copy.deepcopy(engine.state()),
            "lent": dict(state._lent),
            "process": {name: read() for name, read in process.CHANGES.items()},
            "attention": torch.nn.attention._cur_sdpa_kernel_backends(),
            "held": (list(undo._urgent), list(undo._holds)),
            "generators": [
                m.generator.get_state().tolist() for m in model.modules() if isinstance(m, Own)
            ],
        }

    def differs(self, other, *, same_objects=True):
        """What differs, bit for bit, or None; another model has other objects."""
        mine, hooks = self.identities, self.hooks
        if not same_objects:
            self.identities, self.hooks = other.identities, other.hooks
        try:
            self.assert_same(other)
        except AssertionError as error:
            return str(error).split("\n")[0] or "random state"
        finally:
            self.identities, self.hooks = mine, hooks
        return None


def moments(kind, settings):
    """How many moments a step has, and how it leaves everything."""
    for _ in range(3):  # the first ones of a process have more
        problem, injector = Problem(**settings), kind()
        problem.step(injector)
    return injector.count, problem.everything()


def broken_off(kind, moment, settings, done):
    """Break a step off at this moment; then all is as before it, and the next one works.

    Ctrl-C may come after the last thing that can be taken back: then the step is complete.
    """
    problem = Problem(**settings)
    before, injector = problem.everything(), kind(moment)
    with contextlib.suppress(injector.error):
        problem.step(injector)
        return False  # a moment that this run does not have
    after = problem.everything()
    found = after.differs(before)
    if found is not None and kind is not Operations:
        found = found if after.differs(done, same_objects=False) else None
        assert found is None, (moment, found, injector.where)
        return True
    assert found is None, (moment, found)
    problem.step()
    other = Problem(**settings)
    other.step()
    found = problem.everything().differs(other.everything(), same_objects=False)
    assert found is None, (moment, found)
    return True
