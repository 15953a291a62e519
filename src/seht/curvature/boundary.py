r"""The boundary between network and loss, which the Gauss-Newton matrix needs.

:math:`G = J^T H_{out} J`: J the derivative of the network's outputs z, :math:`H_{out}` the loss's
second derivative in z. The outputs are those of the outermost calls of the model in the closure,
of the module named by ``boundary=``, or what the closure marks with :func:`seht.boundary`. A
Hugging Face model that is given ``labels`` returns its own loss; then the outputs are its head's.

A model that ends in ``log_softmax`` returns log-probabilities, in which ``F.nll_loss`` is linear,
so G would be 0, while users mean the logits. The final ``log_softmax`` of a model therefore counts
as part of the loss, unless ``boundary=`` or a mark says otherwise.
"""

from __future__ import annotations

from collections.abc import Container
from contextvars import Token
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from seht.curvature.flat_losses import linear
from seht.curvature.head import find_head, find_module, returns_loss
from seht.curvature.softmax import again, log_softmax_dim
from seht.curvature.unformed import Unformed
from seht.precision.half_weights import HALVES
from seht.task import Task
from seht.tensors.graph import node_of, parents, walk
from seht.tensors.graph_need import Dropped
from seht.tensors.memory import shares_memory
from seht.tensors.process import BOUNDARY
from seht.tensors.trees import mapped


def boundary(outputs: Any) -> Any:
    """Mark the network's outputs z inside a closure: ``logits = seht.boundary(logits)``.

    `curvature="ggn"` takes G = Jᵀ H_out J, with J the derivative of z in the weights and H_out the
    second derivative of the loss in z, so it has to know z. A model that returns its own loss
    hides them. Outside a penalised step this function returns its argument. It costs nothing.

    Args:
        outputs: the logits, or several outputs as a tuple, list or mapping of tensors. Use what the
            function returns from there on, in place of them.

    Example:
        ```python
        penalty = seht.HessianTrace(model, weight=1e-3, curvature="ggn")
        loss = penalty(lambda: F.cross_entropy(seht.boundary(model(x)), y))
        ```
    """
    current: Boundary | None = BOUNDARY.get()
    return outputs if current is None else current.mark(outputs)


class Boundary:
    """Collects the outputs of a pass, and hands out copies of them, which only the loss uses."""

    copied = False
    """Whether this object belongs to a copy of the model that the closure made."""

    def __init__(
        self, task: Task, *, cut: bool = False, dropped: Dropped | None = None, tracker: Any = None
    ) -> None:
        self._model, self._module = task.model, find_module(task.model, task.boundary)
        self._head: nn.Module | None = None
        """The head of a model that was called with labels: its outputs are the network's."""
        self._named = task.boundary is not None
        self._weights = list(task.weights.values())
        self._depth = 0
        self._calls = 0
        self._origins: dict[int, tuple[Tensor, Tensor]] = {}
        """By the identity of a handed-out tensor: the tensor, and the output it was made from;
        while the closure runs.
        """
        self.origins: list[Tensor] = []
        """The outputs as the network returned them, before they were copied."""
        self._hooked: list[Tensor] = []
        self._marked: list[Tensor] = []
        self._kept: frozenset[int] | None = None
        self._cut = cut
        """Whether to make the outputs leaves, so that the network's graph can be freed."""
        self._roots: list[Tensor] = []
        """The last tensors of the network's graph, if it was cut off."""
        self._dropped = dropped
        """If no graph is kept: switched off for the loss, which is differentiated twice."""
        self._tracker = tracker
        """Follows the examples, for per-sample probes, at the centre."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy (or pickle) of the model contains our hooks, too; there they do nothing."""
        return {"copied": True}

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs of the pass: what was marked, or else the model's own."""
        found = self._marked or self._hooked
        if self._kept is None:
            return found
        return [z for place, z in enumerate(found) if place in self._kept]

    @property
    def given(self) -> Container[int]:
        """The identities of the handed-out tensors."""
        return self._origins

    def settle(self, loss: Tensor) -> list[Tensor]:
        """The centre has run: leave out outputs that the loss does not depend on, now and in the
        passes to come, as they served something else, and their graph may be gone. Those passes
        keep their graphs whole. Returns the ends of the one that was cut off.
        """
        roots, self._roots = self._roots, []
        self._cut, self._tracker = False, None
        self._kept = None
        if len(self.outputs) > 1:
            nodes = [node_of(z) for z in self.outputs]
            found = set(walk([loss.grad_fn]))  # past outputs: one may lead to another
            kept = frozenset(place for place, node in enumerate(nodes) if node in found)
            self._kept = kept or None
        return roots

    def mark(self, outputs: Any) -> Any:
        """Take over a structure of tensors marked by the user."""
        return self._alias(outputs, self._marked)

    def __enter__(self) -> Boundary:
        self.forget()
        self._depth = self._calls = 0
        self._head = None
        self._token: Token[Boundary | None] = BOUNDARY.set(self)
        self._handles = [
            self._module.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._module.register_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        BOUNDARY.reset(self._token)
        self.origins = [origin for _, origin in self._origins.values()]
        self._origins.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.copied:
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        self._drop(True)
        self._calls += 1
        if not self._named and not torch.compiler.is_compiling() and returns_loss(kwargs):
            self._look_for_head()
        # A hidden state that comes back is no output any more, but a part of the network.
        return mapped((args, kwargs), self._origin) if self._origins else None

    def _look_for_head(self) -> None:
        name = find_head(self._model) if self._head is None else None
        if name is not None:
            self._head = find_module(self._model, name)
            self._handles.append(self._head.register_forward_hook(self._leave_head))

    def _leave_head(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self.copied or self._marked:  # what comes after a mark belongs to the loss
            return None
        return self._alias(outputs, self._hooked)

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self.copied:
            return None
        self._depth -= 1
        if self._depth > 0 or (self._head is not None and self._hooked):
            return None
        return self._leave_head(module, inputs, outputs)

    def _drop(self, on: bool) -> None:
        if self._dropped is not None:
            self._dropped.switch(on)

    def _alias(self, value: Any, found: list[Tensor]) -> Any:
        self._drop(False)
        return mapped(value, lambda tensor: self._take(tensor, found))

    def _take(self, tensor: Tensor, found: list[Tensor]) -> Tensor:
        if not tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        if isinstance(tensor, Unformed):
            return self._take_unformed(tensor, found)
        # torch.compile cannot trace these tests, and compiled code has no such tensors.
        traced = torch.compiler.is_compiling()
        with torch._C.DisableTorchFunction():  # our own operations are no decisions of the model
            own = found is self._hooked and not self._named and not traced and self._head is None
            dim = log_softmax_dim(tensor) if own else None
            if self._is_weight(tensor):
                tensor = tensor.clone()  # an output that is a weight itself would move with it
            if tensor.dtype in HALVES:
                tensor = tensor.float()  # what follows is divided by the step
            if self._cut and (traced or not is_functorch_wrapped_tensor(tensor)):
                self._roots.append(tensor)
                found.append(tensor.detach().requires_grad_())
            else:
                found.append(tensor.view_as(tensor))
            # The closure may write into what it gets.
            given = found[-1].clone() if dim is None else again(found[-1], dim)
            if self._tracker is not None:
                self._tracker.same(tensor, given)
        self._origins[id(given)] = (given, tensor)
        return given

    def _take_unformed(self, logits: Unformed, found: list[Any]) -> Tensor:
        if self._cut:
            self._roots.append(logits)
        found.append(logits.cut() if self._cut else logits)
        given = found[-1].copy()
        self._origins[id(given)] = (given, logits)
        return given

    def forget(self) -> None:
        """Free the outputs, which may be large."""
        self._hooked, self._marked, self._roots, self.origins = [], [], [], []

    def _is_weight(self, tensor: Tensor) -> bool:
        if torch.compiler.is_compiling():  # addresses cannot be traced
            return isinstance(tensor, nn.Parameter)
        return any(shares_memory(weight, tensor) for weight in self._weights)

    def _origin(self, tensor: Tensor) -> Tensor:
        while id(tensor) in self._origins:
            tensor = self._origins[id(tensor)][1]
        return tensor

    def _mixed(self) -> bool:
        """Whether an output depends on another one, through more than the network."""
        outputs = {z.grad_fn for z in self.outputs if z.grad_fn is not None}
        if self._calls < 2 or not outputs:
            return False
        behind = (parent for node in outputs for parent in parents(node))
        return not outputs.isdisjoint(walk(behind, outputs))

    def check(self, curved: bool) -> None:
        """Refuse outputs in which the loss has no curvature: the trace would silently be 0."""
        if not self.outputs:
            raise RuntimeError(
                'curvature="ggn": the closure never called the model'
                + (" part that boundary= names" if self._named else "")
                + ", so its outputs are unknown; "
                + ("" if self._named else "give the penalty the module that the closure calls, or ")
                + "mark them with seht.boundary(logits)"
            )
        if self._mixed():
            raise RuntimeError(
                'curvature="ggn": what the model puts out goes into the model again, changed on '
                "the way, so that network and loss cannot be told apart; change it inside the "
                "model, or mark what the loss is made from with seht.boundary(logits), after the "
                "last call"
            )
        if not curved:
            raise linear()


def check_boundary(model: nn.Module, name: object) -> None:
    """Refuse a name that no module of the model has, before the first step."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"boundary must be the name of a module, not {name!r}")
    find_module(model, name)
