"""What would a penalised step of the bench's MLP cost if it were written for this network alone?

    python benchmarks/by_hand.py --rounds 20 --threads 2

By hand nothing is recorded, checked or put back: the decisions of three layers are known, the
perturbed weights have buffers of their own, and cross-entropy's derivatives are written down. Its
gradient is compared with nested autograd first. Every row is timed in turns with plain steps, as in
`seht bench`; `bare` are two and three gradients with the same weights, and nothing else.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.lab.bench.cases import CASES, Problem
from seht.lab.bench.runners import Penalty, Runner
from seht.lab.bench.timing import Clock, Timing, keep_memory
from seht.probes import rademacher

LAYERS = 3
STEP = {"G": 1e-3, "H": 1e-3}


class ByHand(Runner):
    """SEHT-H with one probe on an MLP with two hidden layers."""

    def __init__(self, problem: Problem, weight: float = 1e-6) -> None:
        super().__init__(problem, weight)
        linears = list(problem.model.linears)
        self._weights = [linear.weight for linear in linears]
        self._biases = [linear.bias for linear in linears]
        self._moved = [torch.empty_like(w) for w in self._weights]
        self._x, self._y = problem.x.flatten(1), problem.y
        self._rows = torch.arange(len(self._y))

    @property
    def leaves(self) -> list[Tensor]:
        """Weights first, then biases."""
        return self._weights + self._biases

    def signs(self) -> list[Tensor]:
        """This draw's probe."""
        return [rademacher(w.shape, LAYERS * self.draw + k) for k, w in enumerate(self._weights)]

    def _forward(self, weights: list[Tensor], sides: list[Tensor] | None) -> list[Tensor]:
        """The hidden layers and the logits; at the given sides of every ReLU."""
        outs: list[Tensor] = []
        for k, (w, b) in enumerate(zip(weights, self._biases, strict=True)):
            z = F.linear(outs[-1] if outs else self._x, w, b)
            if k < LAYERS - 1:
                z = z.relu() if sides is None else torch.ops.aten.threshold_backward(z, sides[k], 0)
            outs.append(z)
        return outs

    def _at(self, signs: list[Tensor], length: float) -> list[Tensor]:
        with torch.no_grad():
            for w, s, out in zip(self._weights, signs, self._moved, strict=True):
                torch.add(w, s, alpha=length, out=out)
        return [out.detach().requires_grad_() for out in self._moved]

    def _hand_out(self, found: list[Tensor]) -> None:
        for leaf, gradient in zip(self.leaves, found, strict=True):
            leaf.grad = gradient


class HandG(ByHand):
    """tr(G): the centre's graph and one perturbed, with one backward pass for both."""

    def run(self) -> None:
        """The gradient of the loss and of the weighted trace."""
        e, share = STEP["G"], self.weight / len(self._y)
        *sides, z = self._forward(self._weights, None)
        moved = self._at(self.signs(), e)
        ahead = self._forward(moved, [side.detach() for side in sides])[-1]
        with torch.no_grad():
            p = z.softmax(1)
            d = (ahead - z) / e
            d -= torch.linalg.vecdot(p, d).unsqueeze(1)
            own = p * d
            variance = torch.linalg.vecdot(own, d).unsqueeze(1)
            above = own * (2 * share / e)
            below = (own * d - p * variance) * share - above
            p[self._rows, self._y] -= 1
            below += p / len(self._y)
        found = torch.autograd.grad([z, ahead], [*self.leaves, *moved], [below, above])
        total = list(found[: 2 * LAYERS])
        for sum_, part in zip(total, found[2 * LAYERS :], strict=False):
            sum_ += part
        self._hand_out(total)


class HandH(ByHand):
    """tr(H): three passes, one after the other."""

    def run(self) -> None:
        """The gradient of the loss and of the weighted trace."""
        e = STEP["H"]
        c = 2 * self.weight / e**2
        *sides, z = self._forward(self._weights, None)
        sides = [side.detach() for side in sides]
        total = list(torch.autograd.grad((1 - c) * F.cross_entropy(z, self._y), self.leaves))
        signs = self.signs()
        for length in (e, -e):
            moved = self._at(signs, length)
            loss = F.cross_entropy(self._forward(moved, sides)[-1], self._y)
            for sum_, part in zip(
                total, torch.autograd.grad(c / 2 * loss, [*moved, *self._biases]), strict=True
            ):
                sum_ += part
        self._hand_out(total)


class Bare(Runner):
    """So many gradients of the loss, with nothing between them."""

    def __init__(self, problem: Problem, count: int) -> None:
        super().__init__(problem)
        self._count = count

    def run(self) -> None:
        """The last one counts."""
        leaves = list(self.problem.model.parameters())
        for _ in range(self._count):
            found = torch.autograd.grad(self.problem.closure(), leaves)
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient


def error(hand: ByHand, curvature: str) -> float:
    """The relative distance of its penalty's gradient from that of nested autograd."""
    hand.draw = 7
    leaves, signs = hand.leaves, [s.float() for s in hand.signs()]
    probed = leaves[:LAYERS]
    if curvature == "hessian":
        first = torch.autograd.grad(hand.problem.closure(), probed, create_graph=True)
        slope = sum((g * s).sum() for g, s in zip(first, signs, strict=True))
        second = torch.autograd.grad(slope, probed, create_graph=True)
        trace = sum((h * s).sum() for h, s in zip(second, signs, strict=True))
    else:
        z = hand.problem.logits(hand.problem.x)
        dummy = torch.zeros_like(z, requires_grad=True)
        back = torch.autograd.grad(z, probed, dummy, create_graph=True)
        inner = sum((g * s).sum() for g, s in zip(back, signs, strict=True))
        [d] = torch.autograd.grad(inner, dummy, create_graph=True)
        p = z.softmax(1)
        trace = ((p * d * d).sum(1) - (p * d).sum(1) ** 2).mean()
    truth = torch.autograd.grad(trace, leaves, materialize_grads=True)
    plain = torch.autograd.grad(hand.problem.closure(), leaves)
    weight, hand.weight = hand.weight, 1.0
    hand.run()
    hand.weight = weight
    ours = [leaf.grad - g for leaf, g in zip(leaves, plain, strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in zip(ours, truth, strict=True))
    return (off / sum(float(b.square().sum()) for b in truth)) ** 0.5


def main() -> None:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scale", default="full", help="full is the bench's; tiny shows Python")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    problem = CASES["mlp"].problem(options.scale, train=60)
    g, h = HandG(problem), HandH(problem)
    for name, found in (("tr(G)", error(g, "ggn")), ("tr(H)", error(h, "hessian"))):
        print(f"{name} by hand is {found:.1e} off nested autograd")
    rows: dict[str, Runner] = {"two bare": Bare(problem, 2), "tr(G) by hand": g}
    rows["tr(G)"] = Penalty(problem, curvature="ggn")
    rows |= {"three bare": Bare(problem, 3), "tr(H) by hand": h}
    rows["tr(H)"] = Penalty(problem, curvature="hessian")
    for runner in rows.values():
        if isinstance(runner, Penalty):
            runner.settle()
    clock = Clock(problem)
    found = {key: Timing() for key in rows}
    for turn in range(-2, options.rounds):
        for key, runner in rows.items():
            ratio = clock.ratio(runner, max(0, turn))
            if turn >= 0:
                found[key].ratios.append(ratio)
    print(f"a plain step takes {1e3 * clock.plain_median:.2f} ms on {options.threads} thread(s)")
    for key, timing in found.items():
        low, high = timing.quartiles
        print(f"{key:14} {timing.ratio:.2f} plain steps ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
