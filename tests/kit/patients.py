"""Small models for the doctor, one for each thing that it may say; targets of `seht doctor`."""

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 24


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def network(bend=nn.Tanh, outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), bend(), nn.Linear(32, outputs))


def batches(count=3, *, wrong=False, seed=1):
    """Classes by the first entries, or (wrong) by chance."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(SIZE, 8, generator=draw)
        y = torch.randint(0, 3, (SIZE,), generator=draw) if wrong else x[:, :3].argmax(1)
        found.append((x, y))
    return found


def trained(model, data, steps, rate=0.02):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, data[step % len(data)]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def memorising():
    data = batches(wrong=True)
    return trained(network(), data, 300), cross_entropy, data, batches(wrong=True, seed=2)


def underfitting():
    """One linear layer for classes that it can tell, and more data than it could learn by heart."""
    data = batches(30)
    model = trained(nn.Sequential(nn.Linear(8, 3)), data, 60)
    return model, cross_entropy, data, batches(30, seed=2)


def untrained():
    return network(), cross_entropy, batches(), batches(seed=2)


def without_held_out():
    data = batches()
    return trained(network(), data, 60), cross_entropy, data


def absolute(bend=nn.Tanh):
    def loss_fn(model, batch):
        return (model(batch[0]) - F.one_hot(batch[1], 3)).abs().mean()

    return network(bend), loss_fn, batches()


def connectionist():
    """CTC, whose backward cannot be differentiated."""

    def loss_fn(model, batch):
        x, targets = batch
        scores = model(x).log_softmax(-1)
        times = torch.full((x.shape[1],), x.shape[0])
        return F.ctc_loss(scores, targets, times, torch.full((x.shape[1],), targets.shape[1]))

    torch.manual_seed(3)
    return network(outputs=5), loss_fn, (torch.randn(12, 4, 8), torch.randint(1, 5, (4, 3)))


class OwnLoss(nn.Module):
    """Returns its own loss, as Hugging Face's models do, and says what its head is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x, y):
        logits = self.lm_head(self.body(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def own_loss():
    return OwnLoss(), lambda model, batch: model(*batch)["loss"], batches(), batches(seed=2)


def failing():
    raise RuntimeError("the file with the weights\nis not there")


def something_else():
    return network()
