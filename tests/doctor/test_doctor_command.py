"""`seht doctor module:function`: the page, the files, and mistakes in one line."""

import json

import pytest

from seht.cli import main


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "kit"))


def test_the_page_and_the_files(tmp_path, capsys):
    files = tmp_path / "doctor.json", tmp_path / "doctor.html"
    options = ["--budget", "5", "--json", str(files[0]), "--html", str(files[1])]
    assert main(["doctor", "patients:memorising", *options]) == 0
    said = capsys.readouterr()
    assert "expect a gain" in said.out and said.err == ""
    assert said.out.rstrip().endswith(str(files[1]))
    assert json.loads(files[0].read_text())["verdict"] in said.out
    page = files[1].read_text()
    assert "expect a gain" in page and "weight=&#34;tuned&#34;" in page
    assert page.count("<svg") == 2 and "<script" not in page and "http" not in page
    # Again over files of its own; a stranger's is not touched.
    other = tmp_path / "notes.html"
    other.write_text("mine")
    assert main(["doctor", "patients:memorising", "--html", str(other)]) == 2
    assert other.read_text() == "mine" and "was not written by seht" in capsys.readouterr().err


def test_json_alone(capsys):
    assert main(["doctor", "patients:absolute", "--budget", "5", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choice"]["curvature"] == "hessian" and found["versions"]["seht"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("patients:failing", "raised RuntimeError: the file with the weights is not there"),
        ("patients:something_else", "must return (model, loss_fn, data) or"),
        ("patients:memorizing", "did you mean 'memorising'"),
        ("nowhere:example", "there is no module 'nowhere'"),
        ("patients", "is not module:function"),
    ],
)
def test_a_target_that_is_none(target, words, capsys):
    assert main(["doctor", target]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == "" and said.err.count("\n") == 1


@pytest.mark.parametrize("options", [["--budget", "1"], ["--seed", "-1"], ["--budget", "nan"]])
def test_an_option_out_of_range(options, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "patients:memorising", *options])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
