"""More repeatable closures: what autograd holds constant, and weights that the closure changes.

A constant must be the centre's in every pass, however it is made; a closure may put its own
weights in order before it uses them, once.
"""

import copy

import torch
import torch.nn.functional as F
from repeatable import loss

BUILDERS = {}


def keep(builder):
    BUILDERS[builder.__name__] = builder
    return builder


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.no_grad():  # needless, and common
            return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class Detour(Sine):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.enable_grad():
            y = x.sin()
        return y.detach()


@keep
def detached_weight(model, x, y):
    def closure():
        h = model[2](model[0](x))
        return loss(model[4](h) + F.linear(h.tanh(), model[4].weight.detach()), y)

    return closure


@keep
def weight_over_its_detached_norm(model, x, y):
    def closure():
        w = model[0].weight
        return loss(model[4](F.linear(x, w / w.data.norm()).tanh()), y)

    return closure


@keep
def view_of_a_weight_under_no_grad(model, x, y):
    def closure():
        with torch.no_grad():
            w = model[4].weight.t()
        h = model[0](x)
        return loss(model[4](h.relu()) + h.tanh() @ w, y)

    return closure


@keep
def targets_under_inference_mode(model, x, y):
    def closure():
        with torch.inference_mode():
            target = F.dropout(model(x), 0.2).softmax(1)
            target *= 0.5
        return loss(F.dropout(model(x + 0.1), 0.2), target.clone())

    return closure


@keep
def targets_under_no_grad(model, x, y):
    def closure():
        with torch.no_grad():
            target = model(x).softmax(1)
            with torch.enable_grad():
                z = model(x + 0.1)
            target = target**2
            target /= target.sum(1, keepdim=True)
        return loss(z, target)

    return closure


@keep
def moving_teacher(model, x, y):
    teacher = copy.deepcopy(model)

    def closure():
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            target = teacher(x).softmax(1)
        return loss(model(x), target)

    return closure


@keep
def constant_that_is_changed_in_place(model, x, y):
    """Each run must start from what the centre found, not from what the run before left."""

    def closure():
        h = model[0](x)
        best = h.argmax(1)
        best += 1
        best %= 6
        worst = h.argmin(1)
        worst.view(-1)[::2].add_(1).remainder_(6)
        with torch.no_grad():
            size = h.std(1)
        size[0] *= 2
        h = h * F.one_hot(best, 6) + h.tanh() * F.one_hot(worst, 6)
        return loss(model[4](h / size.unsqueeze(1)), y)

    return closure


@keep
def custom_function_with_no_grad_inside(model, x, y):
    return lambda: loss(model[4](Sine.apply(model[0](x)).relu()), y)


@keep
def custom_function_with_enable_grad_inside(model, x, y):
    return lambda: loss(model[4](Detour.apply(model[0](x)).relu()), y)


@keep
def gradient_inside_the_closure(model, x, y):
    """An adversarial example."""

    def closure():
        a = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(model(a), y), a)
        return loss(model(x + 0.1 * g.sign()), y)

    return closure


# --- weights that the closure changes -------------------------------------------------------------


@keep
def clamped_under_no_grad(model, x, y):
    def closure():
        with torch.no_grad():
            model[0].weight.clamp_(-0.3, 0.3)
            model[4].weight[0].fill_(0.1)
        return loss(model(x), y)

    return closure


@keep
def clamped_through_data(model, x, y):
    def closure():
        model[0].weight.data.clamp_(-0.3, 0.3)
        return loss(model(x), y)

    return closure


@keep
def assigned_through_data(model, x, y):
    """A layer with a norm constraint, as in networks for EEG."""

    def closure():
        model[0].weight.data = model[0].weight.data.clamp(-0.3, 0.3)
        return loss(model(x), y)

    return closure
