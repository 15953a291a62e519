"""A user's own data: read as they are, divided and scaled, sealed, and refused in words."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from small import train

from seht.cli import main
from seht.lab.data import DataError, load
from seht.lab.data.own import sealed
from seht.lab.recipes import override, recipe
from seht.lab.records import RunError

BRIEF = {"data.validation": "20", "epochs": "2", "spectrum": "0", "robustness": "false"}
SHAPES = {"own-table": (7,), "own-series": (2, 12), "own-images": (3, 8, 8)}


def write(path, shape=(7,), count=100, **more):
    draw = np.random.default_rng(0)
    arrays = {"x": 3 + 2 * draw.normal(size=(count, *shape)), "y": np.arange(count) % 3}
    np.savez(path, **{**arrays, **more})
    return {**arrays, **more}


def made(path, name="own-table", **changes):
    return sealed(override(recipe(name), {**BRIEF, "data.file": str(path), **changes}))


def joined(data, split):
    batches = list(data.eval_batches(split))
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


@pytest.mark.parametrize("name", SHAPES)
def test_every_example_is_in_one_place_and_scaled(name, tmp_path):
    arrays = write(tmp_path / "a.npz", SHAPES[name])
    data = load(made(tmp_path / "a.npz", name), 3)
    parts = {split: joined(data, split) for split in ("train", "valid", "test")}
    assert [len(y) for _, y in parts.values()] == [60, 20, 20]
    assert data.classes == 3 and data.example == SHAPES[name]
    pool = torch.cat([parts["train"][0], parts["valid"][0]]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(pool.mean(1), torch.zeros(len(pool)), rtol=0, atol=1e-4)
    torch.testing.assert_close(pool.std(1), torch.ones(len(pool)), rtol=0, atol=1e-4)
    # Sorted by one number, the examples and their labels are those of the file.
    x, y = (torch.cat(both) for both in zip(*parts.values(), strict=True))
    order = x.flatten(1)[:, 0].argsort()
    file = torch.from_numpy(arrays["x"]).flatten(1)[:, 0].argsort()
    assert torch.equal(y[order], torch.from_numpy(arrays["y"])[file])
    other = joined(load(made(tmp_path / "a.npz", name), 4), "test")
    assert torch.equal(other[0], parts["test"][0])


def test_a_test_set_of_one_s_own_and_words_as_labels(tmp_path):
    words = np.array(["no", "yes"])
    write(
        tmp_path / "a.npz",
        y=words[np.arange(100) % 2],
        x_test=np.full((4, 7), 3.0),
        y_test=words[[1, 1, 0, 1]],
    )
    data = load(made(tmp_path / "a.npz"), 0)
    x, y = joined(data, "test")
    assert y.tolist() == [1, 1, 0, 1] and x.abs().max() < 1
    assert len(joined(data, "train")[1]) == 80


def test_bytes_are_pixels_and_a_column_may_be_constant(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(100, 1, 8, 8), dtype="u1")
    write(tmp_path / "a.npz", x=pixels)
    x, _ = joined(load(made(tmp_path / "a.npz", "own-images"), 0), "train")
    assert x.std().item() == pytest.approx(1, abs=0.05) and abs(x.mean().item()) < 0.1
    table = np.random.default_rng(0).normal(size=(100, 7))
    table[:, 2] = 5.0
    write(tmp_path / "b.npz", x=table)
    x, _ = joined(load(made(tmp_path / "b.npz"), 0), "train")
    assert x.isfinite().all() and x[:, 2].abs().max() == 0


NAN = np.full((100, 7), np.nan)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"X": np.ones(3)}, "must have x and y"),
        ({"y_test": np.ones(3)}, "must have x and y"),
        ({"x": np.ones((100, 2, 2))}, r"must be \(examples, columns\), not \(100, 2, 2\)"),
        ({"x": np.ones((0, 7)), "y": np.ones(0)}, "examples, columns"),
        ({"x": NAN}, "finite numbers"),
        ({"x": np.full((100, 7), "a")}, "finite numbers"),
        ({"x": np.full((100, 7), 1e39)}, r"x in .* must lie within ±1e\+37; scale it"),
        ({"y": np.ones(99)}, "must be 100 labels"),
        ({"y": NAN[:, 0]}, "must be 100 labels, and some are missing"),
        ({"y": np.ones(100)}, "one class only, 1.0; there must be two or more"),
        ({"y": np.arange(100) / 7}, "100 values in 100 examples; make a few classes"),
        ({"y": np.arange(100) % 40}, "40 values in 100 examples; make a few classes"),
        ({"y": np.arange(100) % 20 / 4 + (np.arange(100) == 7) / 8}, "21 values in 100 examples"),
        ({"x_test": np.ones((5, 6)), "y_test": np.ones(5)}, "x_test in .* not \\(5, 6\\)"),
        ({"x_test": np.ones((5, 7), "u1"), "y_test": np.ones(5)}, "must be float64 as x is"),
        (
            {"x_test": np.ones((5, 7)), "y_test": np.full(5, 3)},
            "y_test in .* has the label 3, which",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_right_is_refused(tmp_path, more, said):
    write(tmp_path / "a.npz", **more)
    with pytest.raises(DataError, match=said) as error:
        load(made(tmp_path / "a.npz"), 0)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path, capsys):
    with pytest.raises(DataError, match=r"none is named: --data\.file mine\.npz"):
        load(recipe("own-table"), 0)
    for command in ("train", "compare"):  # said before anything is made
        assert main([command, "own-table", "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("--data.file mine.npz") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="name its directory in --data-dir"):
        made(tmp_path / "nowhere.npz")
    for name, content in (("a.txt", b"1,2,3"), ("b.npz", b"PK\x03\x04"), ("c.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="not a file of arrays"):
            load(made(tmp_path / name), 0)
    np.save(tmp_path / "d.npy", np.ones(3))
    with pytest.raises(DataError, match="not a file of arrays"):
        load(made(tmp_path / "d.npy"), 0)
    with pytest.raises(ValueError, match=r"data\.file belongs to own-table"):
        override(recipe("digits"), {"data.file": "mine.npz"})


def sheet(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_a_column_far_from_zero_keeps_what_it_says(name, tmp_path):
    """A time in seconds is 1.7e9, where float32 has steps of 128."""
    near = write(tmp_path / "near.npz", SHAPES[name])
    write(tmp_path / "far.npz", SHAPES[name], x=1.7e9 + near["x"])
    for split in ("train", "test"):
        wanted, found = (
            joined(load(made(tmp_path / file, name), 3), split)[0]
            for file in ("near.npz", "far.npz")
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_a_constant_column_far_from_zero_is_only_shifted_in_the_test_set_too(tmp_path):
    arrays = write(tmp_path / "a.npz")
    arrays["x"][:, 0] = 1e7 + 0.1
    test = arrays["x"][:10].copy()
    test[0, 0] += 2
    write(tmp_path / "a.npz", x=arrays["x"], x_test=test, y_test=arrays["y"][:10])
    data = load(made(tmp_path / "a.npz"), 3)
    assert joined(data, "train")[0][:, 0].abs().max() == 0
    assert joined(data, "test")[0][0, 0].item() == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_csv_file_is_a_table(tmp_path, mark):
    """With names or without, with words as labels or numbers, it is the NumPy file."""
    arrays = write(tmp_path / "a.npz", count=60)
    rows = [mark.join(map(repr, map(float, row))) for row in arrays["x"]]
    words = [mark.join((row, "abc"[label])) for row, label in zip(rows, arrays["y"], strict=True)]
    names = mark.join(f'"column {place}"' for place in range(8))
    plain = [mark.join((row, str(label))) for row, label in zip(rows, arrays["y"], strict=True)]
    expected = joined(load(made(tmp_path / "a.npz"), 0), "train")
    for lines in ([names, *words], plain, ["\ufeff" + names, *plain, ""]):
        path = sheet(tmp_path / "mine.csv", "\n".join(lines))
        found = joined(load(made(path), 0), "train")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "text, said",
    [
        ("a,b,y\n1,2,0\n1,n/a,1\n", r"line 3, column 'b': 'n/a' is not a number; .*last column"),
        ("1,2,0\n1,,1\n", "line 2, column 2: '' is not a number"),
        ("a,b,y\n1,2,0\n1,2\n", "line 3 has 2 cells, not 3"),
        ("a,b,y\n1,2,no\n1,2, \n", "line 3 has no label at its end"),
        ("a,b,y\n1,2,0\n1,2,nan\n", "must be 2 labels, and some are missing"),
        ("a,b,y\n", "a row for each example"),
        ("1\n0\n", "its label at the end"),
        ("\n", "is empty"),
        ("1,2,0\nnan,2,1\n1,2,0\n1,2,1\n", "finite numbers; fill or drop"),
    ],
)
def test_a_csv_file_that_is_no_table(tmp_path, text, said):
    with pytest.raises(DataError, match=said) as error:
        load(made(sheet(tmp_path / "mine.csv", text)), 0)
    assert "\n" not in str(error.value)


def test_a_csv_file_for_other_recipes_or_in_another_encoding(tmp_path):
    path = sheet(tmp_path / "mine.csv", "1,2,0\n")
    with pytest.raises(DataError, match=r"a table, for the recipe own-table; own-series reads"):
        load(made(path, "own-series"), 0)
    path.write_bytes("größe,y\n".encode("latin-1"))
    with pytest.raises(DataError, match="not a CSV file in UTF-8"):
        load(made(path), 0)


def test_another_file_is_another_run(tmp_path):
    write(tmp_path / "a.npz")
    first = made(tmp_path / "a.npz")
    assert train(first, "weight-decay", 0, tmp_path / "run").done
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"]["data"]["seal"].startswith("sha256:")
    write(tmp_path / "a.npz", count=90)
    with pytest.raises(DataError, match=r"not the file of data\.seal"):
        load(first, 0)
    with pytest.raises(RunError, match="its data file was another one, or has changed since"):
        train(made(tmp_path / "a.npz"), "weight-decay", 0, tmp_path / "run")


def test_rectangles_are_refused_by_the_cnn(tmp_path):
    write(tmp_path / "a.npz", (1, 8, 12))
    like = made(tmp_path / "a.npz", "own-images", **{"model.width": "4"})
    assert train(like, "weight-decay", 0, tmp_path / "run").done
    square = dataclasses.replace(like, model=dataclasses.replace(like.model, name="cnn"))
    with pytest.raises((RunError, ValueError), match="takes square images"):
        train(square, "weight-decay", 0, tmp_path / "other")


def test_a_table_to_fill(tmp_path, monkeypatch, capsys):
    """The command as the documentation has it, and seht measure on what it left."""
    monkeypatch.chdir(tmp_path)
    write("mine.npz")
    small = ["--epochs", "2", "--data.validation", "20", "--spectrum", "0", "--no-cost"]
    asked = ["--methods", "weight-decay,seht-h,seht-h(weight=tuned)", "--seeds", "2"]
    file = ["--data.file", "mine.npz"]
    assert main(["compare", "own-table", *file, *asked, *small, "--out", "out"]) == 0
    assert "seht-h(weight=tuned)" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "--data.file mine.npz" in page
    assert main(["measure", "out/runs/seht-h/seed-0", "--probes", "2"]) == 0
