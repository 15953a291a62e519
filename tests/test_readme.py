"""The README's example runs as it stands."""

import re
from pathlib import Path

import seht

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    penalty = names["penalty"]
    assert isinstance(penalty, seht.HessianTrace)
    assert penalty.last.trace > 0
    assert penalty.last.engine == "difference"


def test_what_it_links_to_exists():
    for target in re.findall(
        r"\]\(((?:src|docs|benchmarks|examples|CITATION)[^)]*)\)", README.read_text()
    ):
        assert (README.parent / target).exists(), target
