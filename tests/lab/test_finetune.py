"""Fine-tuning: the two halves are the whole network, classes are balanced, weights are good."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from real_data import needs
from small import train

from seht.errors import MissingExtraError
from seht.lab.data import examples, load
from seht.lab.recipes import override, recipe

pretrained = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite_pytorch") is None, reason="not installed"
)


@pretrained
def test_the_two_halves_are_the_whole():
    from seht.lab.models import lite0

    torch.manual_seed(0)
    pixels = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    state = torch.get_rng_state()
    whole = lite0.pretrained().eval()
    assert torch.equal(state, torch.get_rng_state())
    x = F.interpolate(pixels.float(), (96, 96), mode="bicubic", align_corners=False)
    with torch.no_grad():
        wanted = whole.extract_features((x - 127) / 128).mean((2, 3))
        top = lite0.Lite0Top(classes=10).eval()
        found = top.act(top.norm(top.conv(top.blocks(lite0.bottom(pixels))))).mean((2, 3))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pretrained
def test_each_run_has_weights_of_its_own():
    from seht.lab.models.lite0 import Lite0Top

    first, second = Lite0Top(classes=10), Lite0Top(classes=10)
    with torch.no_grad():
        first.conv.weight.zero_()
    assert second.conv.weight.abs().max() > 0
    assert Lite0Top(classes=10).conv.weight.abs().max() > 0


def test_as_many_of_each_class():
    y = torch.randint(5, (1000,), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))
    found = examples.balanced(order, y)
    assert sorted(found.tolist()) == list(range(1000))
    for count in (10, 100, 500):
        assert (y[found[:count]].bincount() == count // 5).all()
    mine = [place for place in order.tolist() if y[place] == 3]
    assert [place for place in found.tolist() if y[place] == 3] == mine  # the seed's order


def test_balanced_training_and_validation_parts():
    changes = {"data.balanced": "true", "data.size": "100", "data.validation": "20"}
    data = load(override(recipe("digits-noisy"), {**changes, "data.noise": "0"}), 5)
    for split, each in (("train", 8), ("valid", 2)):
        y = torch.cat([batch.y for batch in data.eval_batches(split)])
        assert (y.bincount(minlength=10) == each).all()


def test_without_the_extra(monkeypatch):
    from seht.lab.models import lite0

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'seht\[finetune\]'"):
        lite0.pretrained()


@pretrained
def test_norms_keep_the_statistics_they_came_with():
    """Those of a few images are another network's: fine-tuning with them lost to a linear layer."""
    from seht.lab.models.lite0 import Lite0Top

    torch.manual_seed(0)
    model = Lite0Top(classes=10)
    before = {name: value.clone() for name, value in model.named_buffers()}
    x = torch.randn(4, 112, 6, 6)
    with torch.no_grad():
        trained = model.train()(x)
        judged = model.eval()(x)
    assert torch.equal(trained, judged) and len(before) > 10
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    model.train()
    assert model.training and model.blocks.training and not model.norm.training
    assert all(weight.requires_grad for weight in model.parameters())


@pretrained
def test_the_last_layer_alone():
    from seht.lab.models.lite0 import Lite0Top

    model = Lite0Top(classes=10, linear=True)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained == ["linear.weight", "linear.bias"]
    assert override(recipe("finetune"), {"model.name": "lite0-linear"}).task == "features"


@pretrained
@needs("cifar10")
@pytest.mark.slow
def test_fine_tuning_is_no_worse_than_the_last_layer_alone(tmp_path):
    """From 80 images, on 1,000 others; both far above chance, as the weights are good."""
    found = {}
    for name in ("lite0", "lite0-linear"):
        changes = {"data.size": "80", "data.validation": "1000", "data.within": "false"}
        made = override(recipe("finetune"), {**changes, "model.name": name, "robustness": "false"})
        result = train(made, "weight-decay", 1_000_000, tmp_path / name, test=False)
        found[name] = result.metrics["last"]["valid_top1"]
    assert found["lite0"] > found["lite0-linear"] - 1 > 55
