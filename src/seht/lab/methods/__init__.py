"""The methods by name, in the order in which a combination applies them.

The order matters where methods wrap each other: NSO before the trace penalties, LinBreg before SAM
before Lookahead before the average of weights.
"""

from __future__ import annotations

from seht.lab.methods.base import Method
from seht.lab.methods.confidence_penalty import ConfidencePenalty
from seht.lab.methods.cutout import Cutout
from seht.lab.methods.dropblock import DropBlock
from seht.lab.methods.dropout import Dropout
from seht.lab.methods.early_stopping import EarlyStopping
from seht.lab.methods.ema import Ema
from seht.lab.methods.fisher import Fisher
from seht.lab.methods.htr import HtrFull, HtrMiddle
from seht.lab.methods.jacobian import Jacobian
from seht.lab.methods.label_smoothing import LabelSmoothing
from seht.lab.methods.linbreg import LinBregMethod
from seht.lab.methods.lookahead import Lookahead
from seht.lab.methods.mixup import Mixup
from seht.lab.methods.mm_frl import FeatureRedundancy, NontargetUniform
from seht.lab.methods.nso import Nso
from seht.lab.methods.sam import Asam, Sam
from seht.lab.methods.trace import PENALTIES
from seht.lab.methods.weight_decay import Nothing, WeightDecay

_ORDER: tuple[type[Method], ...] = (
    *(WeightDecay, Nothing, LinBregMethod, Jacobian, DropBlock, ConfidencePenalty),
    *(LabelSmoothing, Cutout, Mixup, Dropout, NontargetUniform, FeatureRedundancy, Fisher),
    *(Nso, HtrFull, HtrMiddle, *PENALTIES),
    *(Sam, Asam, Lookahead, Ema, EarlyStopping),
)
METHODS = {method.name: method for method in _ORDER}
