"""The truth of a program: nested autograd on its plain form, in float64.

The probe is drawn as the estimator says; nothing else of the library is used.
"""

from dataclasses import dataclass

import torch
from persample_reference import directions
from torch import Tensor

from programs.spec import EXAMPLES, Built
from seht import SehtD, SehtH, SehtS, probes
from seht.estimators import Estimator

ESTIMATORS: dict[str, Estimator] = {
    "seht-h": SehtH(),
    "seht-h-2": SehtH(probes=2),
    "gaussian": SehtH(distribution="gaussian"),
    "seht-d": SehtD(prob=0.4, layer_prob=0.6, rescale=True),
    "seht-s": SehtS(),
}


class Invalid(Exception):
    """No program: PyTorch cannot differentiate it, or does so wrongly."""


@dataclass
class Answer:
    """Loss, trace, and the gradients of both."""

    loss: float
    trace: float
    slope: list[Tensor]
    gradient: list[Tensor]
    drawn: bool = True
    """Whether any weight was."""


def gradient(value: Tensor, leaves: list[Tensor], keep: bool = False) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(
        torch.autograd.grad(
            value, leaves, create_graph=keep, retain_graph=True, materialize_grads=True
        )
    )


def taken(leaves: list[Tensor]) -> list[Tensor]:
    """What is in ``.grad``, which is empty afterwards."""
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


class Truth:
    """One program's truth; the run of the user's closure that goes with it is recorded here."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.chosen = {n: w for n, w in built.model.named_parameters() if w.dim() > 1}
        self.weights = dict(built.model.named_parameters(remove_duplicate=False))
        try:
            self._record()
            loss, slope = self._users()
            self.loss, self.outputs = built.plain(self.weights)
        except RuntimeError as error:  # a gradient that is none, or through a recomputation
            raise Invalid(str(error)) from error
        self.slope = gradient(self.loss, built.leaves)
        self._compare(loss, slope)

    def _record(self) -> None:
        self.built.tape.recording = True
        self.seed_random()
        self.built.user()
        self.built.tape.recording = False

    def _users(self) -> tuple[float, list[Tensor]]:
        """What a plain training step computes."""
        self.seed_random()
        loss = self.built.user()
        loss.backward()
        return loss.item(), taken(self.built.leaves)

    def seed_random(self) -> None:
        """Before every run of the closure."""
        torch.manual_seed(self.built.spec.seed + 1)

    def _compare(self, loss: float, found: list[Tensor]) -> None:
        """The two forms are one function, or this program says nothing of the library."""
        gap = [a - b for a, b in zip(found, self.slope, strict=True)]
        apart = dot(gap, gap).sqrt().item() / max(dot(self.slope, self.slope).sqrt().item(), 1e-3)
        same = abs(loss - self.loss.item()) < 1e-6 * (1 + abs(loss))
        if not (same and apart < 1e-6):
            if self.built.spec.how.inner or self.built.spec.repeats:
                raise Invalid("PyTorch's own gradient is wrong, or rounding decided between equals")
            raise AssertionError(f"the two forms differ: {loss}, {self.loss}, {apart}")

    def answer(self, seed: int, shared: frozenset[str] = frozenset()) -> Answer:
        """With the probes of this seed."""
        spec, leaves = self.built.spec, self.built.leaves
        estimator = ESTIMATORS[spec.estimator]
        drawn = estimator.layers(len(self.chosen), probes.layer_seed(seed))
        if not drawn:
            trace = torch.zeros(())
        elif spec.estimator == "seht-s":
            trace = self._examples(seed, shared)
        else:
            trace = self._probes(seed, drawn, estimator)
        slope = gradient(trace, leaves)
        return Answer(self.loss.item(), trace.item(), self.slope, slope, bool(drawn))

    def _probes(self, seed: int, drawn: tuple[int, ...], estimator: Estimator) -> Tensor:
        names, total = list(self.chosen), torch.zeros(())
        weights = [self.chosen[names[i]] for i in drawn]
        for k in range(estimator.probes):
            sigma = [
                estimator.entries(w.shape, probes.entry_seed(seed, k, i), w.device).double()
                for i, w in zip(drawn, weights, strict=True)
            ]
            total = total + self._along(weights, sigma)
        return total * (estimator.scale / estimator.probes)

    def _along(self, weights: list[Tensor], sigma: list[Tensor]) -> Tensor:
        if self.built.spec.curvature == "hessian":
            g = gradient(self.loss, weights, keep=True)
            h = gradient(dot(g, sigma), weights, keep=True)
            return dot(h, sigma)
        z = [part for part in self.outputs if part.requires_grad]
        u = [torch.zeros_like(part, requires_grad=True) for part in z]
        back = gradient(dot(z, u), weights, keep=True)
        dz = gradient(dot(back, sigma), u, keep=True)
        return self._curvature(self.loss, z, dz)

    @staticmethod
    def _curvature(loss: Tensor, z: list[Tensor], dz: list[Tensor]) -> Tensor:
        g = gradient(loss, z, keep=True)
        if not any(part.requires_grad for part in g):
            return torch.zeros(())
        # Products along a copy: dz itself depends on z's own inputs, and is differentiated later.
        v = [torch.zeros_like(part, requires_grad=True) for part in z]
        h = gradient(dot(g, v), z, keep=True)
        hv = gradient(dot(h, dz), v, keep=True)
        return dot(hv, dz)

    def _examples(self, seed: int, shared: frozenset[str]) -> Tensor:
        """Every example alone, with weights of its own."""
        s = directions(self.chosen, EXAMPLES, seed, shared)
        total = torch.zeros(())
        for n in range(EXAMPLES):
            e = torch.zeros((), dtype=torch.float64, requires_grad=True)
            own = {id(w): w + e * s[name][n] for name, w in self.chosen.items()}
            moved = {k: own.get(id(w), w) for k, w in self.weights.items()}
            loss, outputs = self.built.plain(moved, slice(n, n + 1))
            total = total + self._one(loss / EXAMPLES, outputs, e)
        return total

    def _one(self, loss: Tensor, outputs: list[Tensor], e: Tensor) -> Tensor:
        if self.built.spec.curvature == "hessian":
            (first,) = gradient(loss, [e], keep=True)
            (second,) = gradient(first, [e], keep=True)
            return second
        z = [part for part in outputs if part.requires_grad]
        u = [torch.zeros_like(part, requires_grad=True) for part in z]
        (back,) = gradient(dot(z, u), [e], keep=True)
        return self._curvature(loss, z, gradient(back, u, keep=True))

    def exact(self) -> float:
        """The trace itself, entry by entry (or column by column of the network's Jacobian)."""
        total = 0.0
        for w in self.chosen.values():
            for i in range(w.numel()):
                unit = torch.zeros(w.numel(), dtype=w.dtype)
                unit[i] = 1
                total += self._along([w], [unit.view(w.shape)]).item()
        return total
