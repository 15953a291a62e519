"""The methods by name, in the order in which a combination applies them."""

from __future__ import annotations

from seht.lab.methods.base import Method
from seht.lab.methods.label_smoothing import LabelSmoothing
from seht.lab.methods.mixup import Mixup
from seht.lab.methods.none import Nothing
from seht.lab.methods.sam import Sam
from seht.lab.methods.seht_d import SehtD
from seht.lab.methods.seht_h import SehtH
from seht.lab.methods.weight_decay import WeightDecay

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        WeightDecay,
        Nothing,
        LabelSmoothing,
        Mixup,
        SehtH,
        SehtD,
        Sam,
    )
}
