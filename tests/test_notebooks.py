"""The notebooks run from top to bottom with small settings, and carry the outputs of a real run."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {"noisy-labels": "epochs = 1", "how-flat": "epochs = 1", "lora": "before, steps = 4, 4"}


@pytest.mark.parametrize(
    "name",
    [
        "noisy-labels",
        pytest.param("how-flat", marks=pytest.mark.slow),
        pytest.param("lora", marks=pytest.mark.slow),
    ],
)
def test_a_notebook_runs(name, monkeypatch):
    pytest.importorskip("nbclient")
    if name == "lora":
        pytest.importorskip("peft")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    sys.modules.pop("notebooks", None)
    from notebooks import executed

    book = executed(ROOT / "notebooks" / f"{name}.ipynb", SMALL[name])
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")


def test_every_notebook_is_tried():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_and_name_no_machine(path):
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, as_version=4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert outputs and all(output.output_type != "error" for output in outputs)
    said = "".join(output.get("text", "") for output in outputs)
    assert "/tmp/" not in said and "/home/" not in said and "Warning" not in said
