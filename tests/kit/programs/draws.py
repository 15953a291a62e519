"""Programs by number, and the smallest program that still goes wrong."""

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from programs.closures import CLOSURES, MIXES
from programs.losses import LOSSES
from programs.program import IMAGE_LAYERS, SEQUENCE_LAYERS, menu
from programs.spec import FORMATS, SIZES, Part, Spec


def part(draw: random.Random, image: bool) -> Part:
    kinds = menu(image)
    chosen = [draw.choice(list(kinds)) for _ in range(draw.randint(0, 3))]
    nodes = tuple(f"{kind}:{draw.choice(kinds[kind])}" for kind in chosen)
    # PyTorch keeps the noise of rrelu where a checkpoint does not fill it again.
    recompute = ["none"] if "random:rrelu" in nodes else ["none", "none", "none", "new", "old"]
    return Part(
        draw.choice(list(IMAGE_LAYERS if image else SEQUENCE_LAYERS)),
        draw.choice([3, 3, 2]),
        nodes,
        draw.random() < 0.3,
        draw.choice(recompute),
    )


def often(draw: random.Random, usual: str, names: list[str]) -> str:
    """The usual one every other time."""
    return usual if draw.random() < 0.5 else draw.choice(names)


def drawn(number: int) -> Spec:
    """The program of that number; what its parts cannot do together is put right here."""
    draw = random.Random(number)
    domain = draw.choice(list(SIZES))
    floats = domain != "tokens"
    parts = tuple(part(draw, domain == "image") for _ in range(draw.choice([1, 2, 2])))
    usable = [n for n, c in CLOSURES.items() if floats or not c.needs_floats]
    closure = often(draw, "plain", usable)
    curvature = draw.choice(["hessian", "hessian", "ggn"])
    # The fused log-softmax is differentiated by its result, so that an inner gradient would pass
    # through the outputs there, and past them in the formula: two Gauss-Newton matrices.
    linear = (CLOSURES[closure].inner and curvature == "ggn") or draw.random() < 0.8
    estimator = draw.choice(["seht-h", "seht-h-2", "gaussian", "seht-d", "seht-s"])
    own = estimator == "seht-s"
    return Spec(
        domain=domain,
        parts=parts,
        format=draw.choice(FORMATS) if floats else "none",
        head="linear" if linear else "log-softmax",
        share=draw.choice(["none"] * 4 + ["tied", "storage"]),
        closure=closure,
        mix=often(draw, "none", list(MIXES)),
        loss=draw.choice(list(LOSSES)),
        input_grad=floats and draw.random() < 0.3,
        estimator=estimator,
        curvature=curvature,
        engine="difference" if own else draw.choice(["difference", "difference", "autograd"]),
        # Which weights kept one direction for all examples is in the penalty's record only.
        form=draw.choice(["call", "backward", "steps", "call" if own else "function"]),
        seed=number,
    )


def smaller(spec: Spec) -> Iterator[Spec]:
    """Every program that is one thing less."""
    for i, one in enumerate(spec.parts):
        if len(spec.parts) > 1:
            yield replace(spec, parts=spec.parts[:i] + spec.parts[i + 1 :])
        less = [
            replace(one, nodes=one.nodes[:k] + one.nodes[k + 1 :]) for k in range(len(one.nodes))
        ]
        less += [replace(one, residual=False), replace(one, recompute="none")]
        less += [replace(one, layer="conv" if spec.domain == "image" else "linear")]
        yield from (replace(spec, parts=(*spec.parts[:i], o, *spec.parts[i + 1 :])) for o in less)
    plain = Spec()
    for field in fields(Spec):
        if field.name not in ("domain", "parts", "seed"):
            yield replace(spec, **{field.name: getattr(plain, field.name)})


def smallest(spec: Spec, wrong: Callable[[Spec], bool], tries: int = 60) -> Spec:
    """Less and less of it, as long as it stays wrong."""
    for _ in range(tries):
        less = next((one for one in smaller(spec) if one != spec and wrong(one)), None)
        if less is None:
            return spec
        spec = less
    return spec
