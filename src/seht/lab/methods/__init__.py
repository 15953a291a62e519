"""The methods by name, in the order in which a combination applies them.

The order matters where methods wrap each other: NSO before the trace penalties, LinBreg before SAM
before Lookahead before the average of weights.
"""

from __future__ import annotations

from seht.lab.methods.base import Method
from seht.lab.methods.batches import Cutout, Mixup
from seht.lab.methods.features import DropBlock, FeatureRedundancy
from seht.lab.methods.nso import Nso
from seht.lab.methods.optimizers import Asam, LinBregMethod, Lookahead, Sam
from seht.lab.methods.settings import Dropout, LabelSmoothing, Nothing, WeightDecay
from seht.lab.methods.terms import ConfidencePenalty, Fisher, Jacobian, NontargetUniform
from seht.lab.methods.trace import PENALTIES, HtrFull, HtrMiddle
from seht.lab.methods.weights import EarlyStopping, Ema

_ORDER: tuple[type[Method], ...] = (
    *(WeightDecay, Nothing, LinBregMethod, Jacobian, DropBlock, ConfidencePenalty),
    *(LabelSmoothing, Cutout, Mixup, Dropout, NontargetUniform, FeatureRedundancy, Fisher),
    *(Nso, HtrFull, HtrMiddle, *PENALTIES),
    *(Sam, Asam, Lookahead, Ema, EarlyStopping),
)
METHODS = {method.name: method for method in _ORDER}
