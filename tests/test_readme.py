"""The README: short, its example runs as it stands, and every figure has a record behind it."""

import re
from pathlib import Path

import seht

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    penalty = names["penalty"]
    assert isinstance(penalty, seht.HessianTrace)
    assert penalty.last.trace > 0
    assert penalty.last.engine == "difference"


def test_it_is_read_to_the_end():
    assert len(README) <= 6000
    first = README.index("![")
    assert len(README[:first].split("\n")) <= 12, "the figure is on the first screen"
    assert "make demo" in README and "make test" in README
    for extra in ("lab", "ray", "finetune"):
        assert f"seht[{extra}]" in README


def test_what_it_links_to_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_its_figures_are_those_of_the_records():
    evidence = (ROOT / "docs" / "evidence" / "index.md").read_text(encoding="utf-8")
    table = README[README.index("| usual training |") : README.index("p < 0.05")]
    found = re.findall(r"[\d.]+ ± [\d.]+|[+−][\d.]+ \[[^\]]+\]", table)
    assert len(found) >= 8
    for figure in found:
        assert figure in evidence, figure
    bench = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for cost in re.search(
        r"costs ([\d.]+) plain ones on a ResNet-18, SAM's ([\d.]+)", README
    ).groups():
        assert re.search(rf"\| {cost}[ |]", bench), cost
    weight = (ROOT / "docs" / "evidence" / "weight.md").read_text(encoding="utf-8")
    both = re.search(r"LSTM's perplexity went from ([\d.]+) to ([\d.]+), tuned", README).groups()
    assert "| {} | {} |".format(*both) in weight


def test_commands_that_it_names_are_there():
    make = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", make, re.MULTILINE), target
    from seht.cli import build_parser
    from seht.lab.methods import METHODS

    parser = build_parser().format_help()
    for command in re.findall(r"`seht ([a-z]+)", README):
        assert command in parser, command
    assert int(re.search(r"(\d+) methods", README).group(1)) == len(METHODS)
