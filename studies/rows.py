"""The rows that the study's tasks are made of, in the words of the lab.

Alternatives, written a|b, are the candidates of a search on validation examples; ``{key}`` stands
for what the search of the same task chose for the row of that key, ``{task:key}`` for what another
task's did, ``{task:key=weight}`` for one option of that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One ``seht compare``; rows by key, the first one its baseline."""

    name: str
    rows: dict[str, str]
    grid: bool = False
    refit: bool = False
    cost: bool = False


# As printed: the full Hessian on every step from the first one, without a bound.
_PRINTED = "every=1,warmup=0,limit=none"
FIXED = {
    "plain": "weight-decay",
    "early-stopping": "early-stopping",
    "seht-h printed": f"seht-h(weight=1e-3,probes=5,curvature=hessian,{_PRINTED})",
    "seht-d printed": f"seht-d(weight=1e-3,prob=0.01,{_PRINTED})",
    "tr(G) tuned": "seht-h(weight=tuned)",
}
RIVALS = {
    "weight decay": "weight-decay(weight=5e-4|5e-3|1e-2|2e-2|5e-2)",
    "ema": "ema(decay=0.9|0.98|0.99|0.995|0.999)",
    "label smoothing": "label-smoothing(eps=0.1|0.2|0.3|0.4|0.6)",
    "mixup": "mixup(alpha=0.2|0.5|1|2|8)",
    "confidence penalty": "confidence-penalty(weight=0.1|0.3|0.5|1|3)",
    "sam": "sam(rho=0.05|0.1|0.15|0.2|0.25)",
    "asam": "asam(rho=0.2|0.5|1|2|3)",
    "nso": "nso(sigma=1e-2|2e-2|3e-2|6e-2|1e-1)",
    "fisher": "fisher(weight=1e-3|3e-3|1e-2|3e-2|1e-1)",
}
PAPERS = {
    "seht-h": f"seht-h(weight=1e-4|1e-3|3e-3|1e-2|3e-2,curvature=hessian,{_PRINTED})",
    "seht-d": f"seht-d(weight=3e-2|3e-1|1|3|10,prob=0.05,{_PRINTED})",
    "seht-d rescaled": f"seht-d(weight=1e-4|1e-3|3e-3|1e-2|3e-2,prob=0.05,rescale=true,{_PRINTED})",
}
OURS = {
    "tr(G)": "seht-h(weight=1e-3|3e-3|1e-2|3e-2|1e-1)",
    "seht-s": "seht-s(weight=1e-3|3e-3|1e-2|3e-2|1e-1)",
    "tr(G) share": "seht-h(share=1|2|4|8|16)",
}
ON_TOP = {
    "tr(G) on weight decay": "{weight decay}+seht-h(weight=1e-3|3e-3|1e-2|3e-2|1e-1)",
    "sam on weight decay": "{weight decay}+sam(rho=0.05|0.1|0.15|0.2|0.25)",
}
AGAIN = ("weight decay", "sam", "tr(G)", "tr(G) share")
EVERY = (
    Stage("fixed", FIXED),
    Stage("search", RIVALS | PAPERS | OURS, grid=True),
    Stage("top", ON_TOP, grid=True),
    Stage(
        "again",
        {key: f"{{{key}}}" for key in AGAIN} | {"tr(G) tuned": FIXED["tr(G) tuned"]},
        refit=True,
    ),
)
"""All methods: the tasks whose runs take seconds."""

_MATTER = ("weight decay", "label smoothing", "mixup", "sam", "nso")
EIGHT = (
    Stage(
        "fixed",
        {
            "plain": "weight-decay",
            "early-stopping": "early-stopping",
            "tr(G) share": "{digits-noisy:tr(G) share}",
            "tr(G) tuned": "seht-h(weight=tuned)",
        },
    ),
    Stage("search", {key: RIVALS[key] for key in _MATTER}, grid=True),
)
"""The eight that matter, and the recipe's own weight decay: tr(G) is carried over, not searched."""
SEARCHED = (
    *EIGHT,
    Stage("ours", {"tr(G)": OURS["tr(G)"]}, grid=True),
    Stage("top", ON_TOP, grid=True),
)
"""The same where runs take seconds: tr(G) is searched as well, alone and on top."""
_ON_BATCH_NORM = ("tr(G)", "tr(G) share")
IMAGES = (
    Stage(
        "fixed",
        {key: FIXED[key] for key in ("plain", "early-stopping", "seht-d printed", "tr(G) tuned")},
    ),
    Stage("search", RIVALS | {key: OURS[key] for key in _ON_BATCH_NORM}, grid=True),
    Stage("top", ON_TOP, grid=True),
    Stage("carried", {"tr(G) share carried": "{digits-noisy:tr(G) share}"}),
)
"""Every rival and every way to tr(G) on a network with batch norm, which has no SEHT-S. Of the
paper's rows the one that costs little: the others take three to eleven plain steps each."""
TEXT = (
    EIGHT[0],
    Stage("search", {key: RIVALS[key] for key in _MATTER if key != "mixup"}, grid=True),
)
LARGE = (
    Stage(
        "fixed",
        {
            "plain": "weight-decay",
            "tr(G) tuned": "seht-h(weight=tuned)",
            "weight decay": "{cifar10-16-noisy:weight decay}",
            "tr(G)": "{cifar10-16-noisy:tr(G)}",
            "tr(G) share": "{digits-noisy:tr(G) share}",
            "sam": "{cifar10-16-noisy:sam}",
            "mixup": "{cifar10-16-noisy:mixup}",
        },
    ),
)
"""In the order in which their runs are made: where time ends, the most telling ones are there."""

_CARRIED = ("weight decay", "mixup", "sam")
CARRIED = (
    Stage(
        "carried",
        {
            "plain": "weight-decay",
            "early-stopping": "early-stopping",
            **{key: f"{{digits-noisy:{key}}}" for key in (*_CARRIED, "tr(G) share")},
            "tr(G) tuned": "seht-h(weight=tuned)",
        },
    ),
)
"""What the search on digits-noisy has chosen, for all methods alike, on tasks without a search."""


def photographs(task: str, *more: str) -> tuple[Stage, ...]:
    """What the search on other photographs has chosen, with ``more`` of its rows at the end."""
    rows = {
        "plain": "weight-decay",
        "early-stopping": "early-stopping",
        **{key: f"{{{task}:{key}}}" for key in _MATTER},
        "tr(G) share": "{digits-noisy:tr(G) share}",
        "tr(G) tuned": "seht-h(weight=tuned)",
    }
    rest = {key: f"{{{task}:{key}}}" for key in more}
    return (Stage("carried", rows), *([Stage("more", rest)] if rest else []))


ON_NOISY, ON_CLEAN = photographs("cifar10-16-noisy", "tr(G)", "fisher"), photographs("cifar10-16")
"""The eight with the settings of the smaller photographs; with wrong labels the searched weight,
and the rival that was the best of them there."""

STRONGER = Stage("stronger", {"tr(G)": "{digits-noisy:tr(G)}", "tr(G) share 4": "seht-h(share=4)"})

STOPPED = (
    Stage(
        "stopped",
        {
            "early-stopping": "early-stopping",
            "tr(G) tuned": "seht-h(weight=tuned)",
            "stopped tr(G) tuned": "early-stopping+seht-h(weight=tuned)",
            "tr(G) share": "{digits-noisy:tr(G) share}",
            "stopped tr(G) share": "early-stopping+{digits-noisy:tr(G) share}",
        },
    ),
)
"""Early stopping alone, tr(G) alone, and both: held-out examples are there for either."""

_W = "{digits-noisy:tr(G)=weight}"
PRICE = Stage(
    "price",
    {
        "weight decay": "{digits-noisy:weight decay}",
        **{
            f"every {k}": f"seht-h(weight={_W},curvature=ggn,every={k},warmup=0.1)"
            for k in (1, 2, 4, 8)
        },
        **{
            f"every 2 from {late}": f"seht-h(weight={_W},curvature=ggn,every=2,warmup={late})"
            for late in (0.25, 0.5, 0.75)
        },
        **{
            f"every {k} on a quarter": (
                f"seht-h(weight={_W},curvature=ggn,every={k},warmup=0.1,part=0.25)"
            )
            for k in (1, 2)
        },
        "every 4 from 0.5": f"seht-h(weight={_W},curvature=ggn,every=4,warmup=0.5)",
        "seht-d": (
            f"seht-d(weight={_W},prob=0.05,rescale=true,curvature=ggn,every=1,warmup=0.1,limit=none)"
        ),
        "seht-d half": (
            f"seht-d(weight={_W},prob=0.5,rescale=true,curvature=ggn,every=1,warmup=0.1,limit=none)"
        ),
        "seht-s every 4": f"seht-s(weight={_W},curvature=ggn,every=4,warmup=0.1)",
    },
    cost=True,
)

_H = f"curvature=hessian,{_PRINTED}"
_BEST = "{digits-clean:seht-h=weight}"
PAPER = Stage(
    "paper",
    {
        "plain": "weight-decay",
        "seht-h printed": f"seht-h(weight=1e-3,probes=5,{_H})",
        "seht-d 0.01": f"seht-d(weight=1e-3,prob=0.01,{_H})",
        "seht-d 0.05 10 probes": f"seht-d(weight=1e-3,probes=10,prob=0.05,{_H})",
        "seht-h 1 probe": f"seht-h(weight={_BEST},probes=1,{_H})",
        "seht-h 5 probes": f"seht-h(weight={_BEST},probes=5,{_H})",
        "seht-h 10 probes": f"seht-h(weight={_BEST},probes=10,{_H})",
        "seht-d best": "{digits-clean:seht-d}",
        "dropout": "dropout(rate=0.3)",
        "dropout + seht-h": f"dropout(rate=0.3)+seht-h(weight={_BEST},probes=1,{_H})",
        "dropout + seht-d": "dropout(rate=0.3)+{digits-clean:seht-d}",
        "tr(G)": "{digits-clean:tr(G)}",
    },
    cost=True,
)
