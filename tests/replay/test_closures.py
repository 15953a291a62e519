"""What a closure may do and return while an engine runs it, and what is left behind."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seht

ENGINES = ["autograd", "difference"]


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(36, 3),
    ).double()  # fmt: skip


@pytest.fixture
def batch():
    return torch.randn(6, 2, 5, 5).double(), torch.arange(6) % 3


def statistics(model):
    return {name: b for name, b in model.named_buffers() if "running" in name or "num" in name}


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
class TestClosures:
    def test_tensors_that_leave_are_ordinary(self, engine, batch):
        model, (x, y) = network(), batch

        def closure():
            logits = model(x)
            return F.cross_entropy(logits, y), {"logits": logits, "features": model[0](x)}

        loss, trace, aux = seht.loss_and_trace(model, closure, engine=engine)
        for tensor in (loss, trace, aux["logits"], aux["features"]):
            assert type(tensor) is torch.Tensor
        # ... and can be used afterwards like any other: here with the fused norms again.
        more = nn.BatchNorm1d(3).double()(aux["logits"]).square().sum() + loss
        more.backward()
        assert model[0].weight.grad.isfinite().all()
        assert torch.equal(aux["logits"].argmax(1), aux["logits"].detach().argmax(1))

    def test_aux_is_returned_as_it_is(self, engine, batch):
        model, (x, y) = network(), batch
        marker = object()
        loss, trace, aux = seht.loss_and_trace(
            model, lambda: (F.cross_entropy(model(x), y), marker), engine=engine
        )
        assert aux is marker
        penalty = seht.HessianTrace(model, weight=0.1, engine=engine)
        total, aux = penalty(lambda: (F.cross_entropy(model(x), y), marker))
        assert aux is marker
        assert total.requires_grad
        assert loss.dim() == trace.dim() == 0

    def test_statistics_move_once_and_as_in_a_plain_step(self, engine, batch):
        model, (x, y) = network(), batch
        plain = copy.deepcopy(model)
        torch.manual_seed(1)
        plain_loss = F.cross_entropy(plain(x), y)
        torch.manual_seed(1)
        loss, _ = seht.loss_and_trace(
            model, lambda: F.cross_entropy(model(x), y), engine=engine, probes=3
        )
        assert model[1].num_batches_tracked == 1
        assert_close(statistics(model), statistics(plain))
        torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)

    def test_the_objects_in_the_model_stay_the_same(self, engine, batch):
        model, (x, y) = network(), batch
        tensors = [*model.parameters(), *model.buffers()]
        seht.loss_and_trace(model, lambda: F.cross_entropy(model(x), y), engine=engine)
        now = [*model.parameters(), *model.buffers()]
        assert all(a is b for a, b in zip(tensors, now, strict=True))
        assert all(p.grad is None for p in model.parameters())

    def test_hessian_trace_moves_no_statistics(self, engine, batch):
        model, (x, y) = network(), batch
        before = copy.deepcopy(statistics(model))
        seht.hessian_trace(model, lambda: F.cross_entropy(model(x), y), engine=engine)
        assert all(torch.equal(before[n], b) for n, b in statistics(model).items())

    def test_several_forward_passes_in_one_closure(self, engine, batch):
        model, (x, y) = network(), batch
        plain = copy.deepcopy(model)
        model.eval()[1].train(), plain.eval()[1].train()
        for _ in range(2):
            plain(x)
        seht.loss_and_trace(model, lambda: F.cross_entropy(model(x) + model(x), y), engine=engine)
        assert model[1].num_batches_tracked == 2
        assert_close(statistics(model), statistics(plain))

    def test_global_random_state_ends_where_one_closure_leaves_it(self, engine, batch):
        model, (x, y) = network(), batch
        torch.manual_seed(4)
        F.cross_entropy(model(x), y)
        after_plain = torch.get_rng_state()
        for probes in (1, 3):
            torch.manual_seed(4)
            seht.hessian_trace(
                model, lambda: F.cross_entropy(model(x), y), engine=engine, probes=probes
            )
            assert torch.equal(torch.get_rng_state(), after_plain)

    def test_a_failing_closure_changes_nothing(self, engine, batch):
        model, (x, _) = network(), batch
        before = copy.deepcopy(model.state_dict())

        def closure():
            model(x)
            raise KeyError("no such batch")

        with pytest.raises(KeyError, match="no such batch"):
            seht.loss_and_trace(model, closure, engine=engine)
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        x = torch.randn(2, 3, 4)  # no mode is left on
        assert type(F.layer_norm(x.requires_grad_(), [4]).grad_fn).__name__.startswith(
            "NativeLayer"
        )

    def test_inside_inference_and_no_grad(self, engine, batch):
        model, (x, y) = network().eval(), batch
        value = seht.hessian_trace(
            model, lambda: F.cross_entropy(model(x), y), engine=engine, seed=1
        )
        with torch.no_grad():
            plain = seht.hessian_trace(
                model, lambda: F.cross_entropy(model(x), y), engine=engine, seed=1
            )
        assert not plain.requires_grad
        torch.testing.assert_close(plain, value.detach())

    def test_probes_are_averaged(self, engine, batch):
        model, (x, y) = network().eval(), batch
        closure = lambda: F.cross_entropy(model(x), y)

        def at(seed, **options):
            return seht.hessian_trace(model, closure, engine=engine, seed=seed, **options).item()

        three = at(9, probes=3)
        task = seht.course.make_task(
            model, closure, seht.probes.choose(model), seht.SehtH(probes=3), 9
        )
        weights = list(task.weights.values())
        g = torch.autograd.grad(closure(), weights, create_graph=True)
        values = []
        for probe in task.probes():
            s = [probe[name].double() for name in task.weights]
            v = sum((a * b).sum() for a, b in zip(g, s, strict=True))
            h = torch.autograd.grad(v, weights, retain_graph=True)
            values.append(sum((a * b).sum() for a, b in zip(h, s, strict=True)).item())
        close = {"autograd": 1e-10, "difference": 1e-6}[engine]
        assert three == pytest.approx(sum(values) / 3, rel=close)
        assert at(9) == pytest.approx(values[0], rel=close)  # more probes go on where fewer end
