"""What a failing test prints: enough to build a program, and to say how it is run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from programs.closures import CLOSURES, MIXES, Closure
from programs.layers import Embedding
from programs.layouts import LAYOUTS
from programs.losses import LOSSES, NLL, Data, Loss, log_softmax
from programs.nodes import Run, Tape
from programs.program import (
    IMAGE_LAYERS,
    SEQUENCE_LAYERS,
    Block,
    Program,
    fits,
    make,
)  # fmt: skip

EXAMPLES, CLASSES, TOKENS = 4, 3, 5
SIZES = {"image": (3, 4, 4), "sequence": (4, 3), "tokens": (4,)}
FORMATS = ["none", "channels-last", "examples-last", "every-other", "expanded"]


@dataclass(frozen=True)
class Part:
    """One block."""

    layer: str
    width: int = 3
    nodes: tuple[str, ...] = ()
    residual: bool = False
    recompute: str = "none"


@dataclass(frozen=True)
class Spec:
    """A program and how its trace is asked for."""

    domain: str = "image"
    parts: tuple[Part, ...] = (Part("conv"),)
    format: str = "none"
    head: str = "linear"
    share: str = "none"
    closure: str = "plain"
    mix: str = "none"
    loss: str = "cross-entropy"
    input_grad: bool = False
    estimator: str = "seht-h"
    curvature: str = "hessian"
    engine: str = "difference"
    form: str = "call"
    seed: int = 0

    @property
    def nodes(self) -> list[str]:
        return [node for part in self.parts for node in part.nodes]

    @property
    def recomputes(self) -> bool:
        """Whether anything lies in an activation checkpoint."""
        return any(part.recompute != "none" for part in self.parts)

    @property
    def repeats(self) -> bool:
        """Whether numbers may be equal but for rounding, which then decides what is largest."""
        return "expanded" in self.format or any("expanded" in node for node in self.nodes)

    @property
    def refusable(self) -> bool:
        """Whether the library may say no; everything else it must do."""
        return (
            self.estimator == "seht-s"
            or (self.curvature == "ggn" and not self.measure.curved)
            or self.share == "storage"
            or (self.engine == "autograd" and self.recomputes)
            # Higher derivatives of fused norms are PyTorch's own, and wrong.
            or (self.curvature == "ggn" and self.how.inner and self.fused)
        )

    @property
    def fused(self) -> bool:
        """Whether it has a norm whose third derivative is wrong in PyTorch."""
        return any(node in ("norm:batch", "norm:layer", "norm:instance") for node in self.nodes)

    @property
    def how(self) -> Closure:
        return CLOSURES[self.closure]

    @property
    def measure(self) -> Loss:
        return NLL if self.head == "log-softmax" else LOSSES[self.loss]

    def build(self) -> "Built":
        """The same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Built(self)


class Built:
    """The model, its batch and its closure, in both forms."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.tape = spec, Tape()
        self.model = self._model().double()
        for parameter in self.model.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        self._share()
        self.x = self._input()
        self.data = Data(torch.arange(EXAMPLES) % CLASSES, torch.randn(EXAMPLES, CLASSES).double())
        self.leaves = [*self.model.parameters()]
        self.leaves += [self.x] if self.x.requires_grad else []

    def _model(self) -> Program:
        spec, shape, blocks = self.spec, torch.Size(SIZES[self.spec.domain]), []
        if spec.domain == "tokens":
            blocks.append(Block([Embedding(TOKENS, 3)], False, "none", self.tape))
            shape = torch.Size((*shape, 3))
        layers = IMAGE_LAYERS if spec.domain == "image" else SEQUENCE_LAYERS
        for i, part in enumerate(spec.parts):
            nodes, before = [layers[part.layer](shape, part.width)], shape
            shape = fits(nodes[0], shape) or shape
            for name in part.nodes:
                node = make(name, shape, self.tape)
                after = fits(node, shape)
                if after is not None:
                    nodes.append(node)
                    shape = after
            recompute = "new" if part.recompute == "old" and i == 0 else part.recompute
            blocks.append(Block(nodes, part.residual and shape == before, recompute, self.tape))
        return Program(blocks, shape.numel(), CLASSES, spec.head)

    def _share(self) -> None:
        """Two weights of one shape: one parameter, or two on one storage."""
        by_shape: dict[torch.Size, list[str]] = {}
        for name, w in self.model.named_parameters():
            if w.dim() > 1:
                by_shape.setdefault(w.shape, []).append(name)
        for names in by_shape.values():
            if self.spec.share != "none" and len(names) > 1:
                one, two = self.model.get_parameter(names[0]), names[1]
                if self.spec.share == "storage":
                    self.model.get_parameter(two).data = one.data
                else:
                    owner, _, last = two.rpartition(".")
                    setattr(self.model.get_submodule(owner), last, one)
                return

    def _input(self) -> Tensor:
        if self.spec.domain == "tokens":
            return torch.randint(TOKENS, (EXAMPLES, *SIZES["tokens"]))
        x = torch.randn(EXAMPLES, *SIZES[self.spec.domain]).double()
        if self.spec.format != "none":
            x = LAYOUTS[self.spec.format][0](x)
        # Equal entries of the input tie, and which of them wins is nobody's business.
        return x.detach().requires_grad_(self.spec.input_grad and self.spec.format != "expanded")

    @property
    def apart(self) -> bool:
        """Whether the loss is a mean over examples."""
        spec = self.spec
        alone = not self.model.couples and spec.mix == "none"
        return alone and spec.measure.apart and spec.how.apart

    def user(self) -> Tensor:
        """The closure as it is written."""
        mix = MIXES[self.spec.mix]

        def loss(z: Tensor) -> Tensor:
            return self.spec.measure.user(z if mix is None else mix.user(z), self.data)

        weights = [p for p in self.model.parameters() if p.dim() > 1]
        return self.spec.how.body(self.model, self.x, loss, weights)

    def plain(
        self, w: dict[str, Tensor], examples: slice = slice(None)
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss of these examples, and what every call of the model put out.

        A log-softmax at a model's end belongs to the loss, as far as Gauss and Newton care.
        """
        run, outputs, mix = Run(self.tape, examples), [], MIXES[self.spec.mix]

        def model(x: Tensor) -> Tensor:
            outputs.append(self.model.logits(x, w, run))
            return log_softmax(outputs[-1]) if self.spec.head == "log-softmax" else outputs[-1]

        def loss(z: Tensor) -> Tensor:
            z = z if mix is None else mix.plain(z)
            return self.spec.measure.plain(z, self.data.of(examples))

        unique = {id(v): v for v in w.values() if v.dim() > 1}
        x = self.x[examples] if examples != slice(None) else self.x
        return self.spec.how.body(model, x, loss, list(unique.values())), outputs
