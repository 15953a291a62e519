"""Memory formats and views: what they compute is plain, where the numbers lie is not."""

import torch
from torch import Tensor

from programs.nodes import Function


def channels_last(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def examples_last(x: Tensor) -> Tensor:
    """The example is the fastest index in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def every_other(x: Tensor) -> Tensor:
    """A view of a tensor of twice the size, with gaps."""
    return torch.stack([x, 2 * x], -1)[..., 0]


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = y[:, -1] * 0.5
    y[:, 1:].mul_(1.5)
    return y


def written_plain(x: Tensor) -> Tensor:
    return torch.cat([0.5 * x[:, -1:], 1.5 * x[:, 1:]], 1)


def part_relu(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :1].relu_()
    return y


def part_relu_plain(x: Tensor) -> Tensor:
    mask = (x.detach() > 0).to(x.dtype)
    return torch.cat([x[:, :1] * mask[:, :1], x[:, 1:]], 1)


def averaged(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True).expand(x.shape)


def averaged_plain(x: Tensor) -> Tensor:
    return (x.sum(-1, keepdim=True) / x.shape[-1]) * torch.ones_like(x)


LAYOUTS: dict[str, tuple[Function, Function]] = {
    "channels-last": (channels_last, torch.clone),
    "examples-last": (examples_last, torch.clone),
    "every-other": (every_other, torch.clone),
    "transposed": (lambda x: x.transpose(-1, -2), lambda x: x.transpose(-1, -2).contiguous()),
    "sliced": (lambda x: x[..., 1:], lambda x: x[..., 1:].contiguous()),
    "strided": (lambda x: x[..., ::2], lambda x: x[..., ::2].contiguous()),
    "flipped": (lambda x: x.flip(-1), lambda x: x.flip(-1)),
    "rolled": (lambda x: x.roll(1, 1), lambda x: torch.cat([x[:, -1:], x[:, :-1]], 1)),
    "expanded": (averaged, averaged_plain),
    "expanded-sum": (
        lambda x: x + x.amax((1, -1), keepdim=True).expand_as(x),
        lambda x: x + x.movedim(1, -2).flatten(-2).max(-1).values.view(
            x.shape[0], 1, *x.shape[2:-1], 1
        ),
    ),
    "windows": (
        lambda x: x.unfold(-1, 2, 1)[..., 0],
        lambda x: x[..., :-1].contiguous(),
    ),
    "chunks": (
        lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
        lambda x: torch.cat(
            [x[..., (x.shape[-1] + 1) // 2 :], x[..., : (x.shape[-1] + 1) // 2]], -1
        ),
    ),
    "unbound": (lambda x: torch.stack(x.unbind(1)[::-1], 1), lambda x: x.flip(1)),
    "reshaped": (
        lambda x: x.reshape(x.shape[0], -1).view(x.shape[0], *x.shape[1:][::-1]),
        lambda x: x.contiguous().view(x.shape[0], *x.shape[1:][::-1]),
    ),
    "written": (written, written_plain),
    "part-relu": (part_relu, part_relu_plain),
    "index": (lambda x: x[:, [0, -1, 0]], lambda x: torch.cat([x[:, :1], x[:, -1:], x[:, :1]], 1)),
    "squeezed": (lambda x: x.unsqueeze(1).transpose(1, 2).squeeze(2), torch.clone),
}  # fmt: skip
