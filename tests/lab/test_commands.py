"""``seht train`` and ``seht compare``: what they take, print and refuse."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small import FEW, options

from seht import cli
from seht.lab.commands.train import outcome
from seht.lab.records import Result


def test_train_from_the_command_line(run, tmp_path):
    code, out, err = run("train", "digits", "--method", "seht-d(prob=0.5)", *options())
    assert code == 0
    assert err.count("\n") == 1 and "warm-up of 50 steps outlasts the training of 12" in err
    assert "epoch 3/3" in out
    table = out.partition("epoch 3/3")[2].splitlines()[1:-1]
    assert re.fullmatch(r" +last epoch  best epoch \(\d\)", table[0])
    names = {re.split(r"  +", line)[0] for line in table[2:]}
    assert {"test accuracy, %", "test calibration error, %", "trace", "weight norm"} <= names
    assert not any("_" in name for name in names)  # result.json has the fields' own names
    where = tmp_path / out.splitlines()[-1]
    assert where == tmp_path / "runs/train/digits/seht-d_prob=0.5/seed-0"
    config = json.loads((where / "config.json").read_text())
    assert config["recipe"]["model"]["width"] == int(FEW["model.width"])


def test_figures_in_words():
    """Those of text and of a run that has less of them, too."""
    last = {"valid_perplexity": 331.0, "test_perplexity_4bit": 340.0, "test_top5": 99.0, "new": 1.0}
    last["test_top1_noise3"] = last["train_rise_noise3_predicted"] = 0.5
    found = Result("done", None, "none", 0, 1, 4, 1.0, {"last": last, "best": {"epoch": 1}})
    names = [re.split(r"  +", line)[0] for line in outcome(found)[2:]]
    assert names == [
        "validation perplexity",
        "test perplexity at 4 bits",
        "test top-5 accuracy, %",
        "new",
        "test accuracy with 3 % noise, %",
        "training loss: rise at 3 % noise, by the trace",
    ]


def test_fields_before_and_after_the_recipe(run, tmp_path):
    few = options({k: v for k, v in FEW.items() if k != "epochs"})
    code, _, err = run(
        "train", "--epochs", "1", "digits", "--settings.seht-h.weight", "0.5",
        "--settings.seht-h.probes=2", "--method", "seht-h", "--out", "r",
        "--optim.weight-decay", "0.25", "--settings.seht-h.warmup", "0", *few,
    )  # fmt: skip
    assert (code, err) == (0, "")
    recipe = json.loads((tmp_path / "r" / "config.json").read_text())["recipe"]
    assert recipe["epochs"] == 1 and recipe["optim"]["weight_decay"] == 0.25
    assert recipe["settings"]["seht-h"]["weight"] == 0.5
    assert recipe["settings"]["seht-h"]["probes"] == 2


def test_a_failed_run_has_exit_code_1(run):
    code, out, _ = run("train", "digits", *options(), "--optim.lr", "1e30")
    assert code == 1 and out.splitlines()[-2].startswith("failed: the training loss is")


def test_compare_from_the_command_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr("seht.lab.cost.SECONDS", 0.3)
    code, out, err = run(
        "compare", "digits", "--methods", "weight-decay,seht-h(weight=1e-3|1e-2)", "--seeds", 2,
        "--settings.seht-h.warmup", "0", *options({**FEW, "epochs": "1"}),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "[6/6]" in out and "timing seht-h(weight=0.01) against weight-decay" in out
    assert out.splitlines()[-1] == "runs/digits/report.html"
    for name in ("table.md", "table.csv", "report.html", "cost.json"):
        assert (tmp_path / "runs" / "digits" / name).stat().st_size
    table = (tmp_path / "runs" / "digits" / "table.csv").read_text()
    assert str(tmp_path) not in table


def test_help_names_the_recipes_fields(run):
    for command in ("train", "compare"):
        code, out, _ = run(command, "digits", "--help")
        assert code == 0
        for words in ("--model.width", "--epochs", "--optim.lr", "0.05", "examples:"):
            assert words in out
        fields = out.partition("fields of digits:\n")[2]
        assert "None" not in fields.replace("None:", "") and "()" not in fields  # as one types it
        assert max(map(len, fields.splitlines())) <= 100
    assert "fields of" not in run("train", "--help")[1]
    assert "did you mean 'digits'" in run("train", "digit", "--help")[2]


def test_a_method_of_one_s_own(tmp_path):
    """The script of docs/methods.md, also in the processes of --jobs."""
    page = (Path(__file__).parents[2] / "docs/methods.md").read_text("utf-8")
    (tmp_path / "mine.py").write_text(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0])
    rows = ["--methods", "none,logit-decay(weight=0.1)", "--seeds", "1", "--jobs", "2", "--no-cost"]
    done = subprocess.run(
        [sys.executable, "mine.py", "compare", "digits", *rows, *options(), "--out", "out"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "logit-decay(weight=0.1), seed 0: test top1" in done.stdout
    said = subprocess.run(
        [sys.executable, "mine.py", "list"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert "logit-decay         Large logits cost something" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digit"], "unknown recipe 'digit'; did you mean 'digits'"),
        (["train", "digits", "--method", "seth-h"], "'seth-h'; did you mean 'seht-h'"),
        (["train", "digits", "--method", "seht-h(wieght=1)"], "did you mean 'weight'"),
        (["train", "digits", "--epoch", "3"], "unknown option '--epoch'; did you mean '--epochs'"),
        (["train", "digits", "--seeds", "3"], "'--seeds'; did you mean '--seed'"),
        (["train", "digits", "--device", "tpu"], "--device tpu, "),
        (["train", "digits", "--model.widht=3"], "did you mean '--model.width'"),
        (["train", "digits", "--epochs", "three"], "epochs must be a whole number, not 'three'"),
        (["train", "digits", "--epochs", "0"], "epochs must be"),
        (["train", "digits", "--settings.seht-h.weight"], "needs a value"),
        (["train", "digits", "more"], "'more' is one argument too many"),
        (["train"], "required: RECIPE"),
        (["train", "digits", "--data.size", "9999"], "data.size"),
        (["train", "digits", "--settings.seht-h.wieght", "1", "--method", "seht-h"], "weight"),
        (["train", "digits", "--settings.cutot.size", "3"], "'cutot'; did you mean 'cutout'"),
        (["train", "digits", "--settings.cutout.sise", "3"], "'sise'; did you mean 'size'"),
        (["train", "digits", "--optim.weight-deca", "0"], "did you mean '--optim.weight_decay'"),
        (["train", "digits", "--paper", "table1"], "unknown option '--paper'"),
        (
            ["train", "digits", "--optim.schedule", "plateau", "--data.validation", "0"],
            "looks at the validation loss",
        ),
        (["train", "digits", "--seed", "x"], "must be a whole number from 0"),
        (["compare", "digits", "--data.size", "9999"], "data.size"),
        (["compare"], "name a recipe"),
        (["compare", "digits", "--seeds", "0"], "--seeds: must be a whole number from 1 to"),
        (["compare", "digits", "--methods", "none,,mixup"], "a method is missing"),
        (["compare", "digits", "--methods", "none,none"], "none is given twice"),
        (["compare", "digits", "--small"], "belongs to --preset"),
        (["compare", "digits", "--grid-seeds", "2"], "--grid-seeds belongs to --grid;"),
        (["compare", "--preset", "demo", "--small"], "preset demo is small already; leave --small"),
        (["compare", "--preset", "demo", "--grid"], "leave RECIPE, --methods and --grid out"),
        (["train", "digits", "--precision", "8"], "--precision 8: "),
        (["compare", "--preset", "tabel1"], "did you mean 'table1'"),
        (["compare", "digits", "--preset", "table1"], "brings its own recipe"),
        (["compare", "pydocs", "--methods", "none,cutout"], "cutout works on images"),
        (["compare", "gpt-small", "--methods", "linbreg"], "linbreg takes the place of SGD"),
        (["train", "cancer", "--method", "dropblock"], "dropblock works on images, and recipe"),
        (["train", "digits", "--data.noise", "1"], "data.noise must be in [0, 1), not 1.0"),
        (["compare", "digits", "--data.noise", "-0.1"], "data.noise must be in [0, 1), not -0.1"),
        (
            ["compare", "digits", "--data.noise", "0.5", "--data.noise-kind", "pair"],
            "data.noise must be below 0.5 with data.noise_kind pair, not 0.5",
        ),
        (["train", "pydocs", "--data.noise", "0.1"], "and pydocs is text; leave it out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(run, tmp_path, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and not out
    assert re.search(re.escape(message), err), err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if "error:" in line]) == 1
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("recipe, extra", [("finetune", "finetune"), ("italy-power", "series")])
def test_a_missing_extra_is_named_before_anything_is_fetched(
    run, tmp_path, monkeypatch, command, recipe, extra
):
    from seht import extras
    from seht.lab.data import files

    installed = extras._installed
    missing = extras.PACKAGES[extra]
    monkeypatch.setattr(extras, "_installed", lambda name: name not in missing and installed(name))
    monkeypatch.setattr(files, "find", lambda *_: pytest.fail("it looks for the images first"))
    code, out, err = run(command, recipe)
    assert code == 2 and not out
    assert f"pip install 'seht[{extra}]'" in err and err.count("\n") == 1
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("command", [["train", "digits"], ["compare", "digits", "--seeds", "1"]])
def test_a_directory_that_cannot_be_written(run, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    code, out, err = run(*command, "--out", tmp_path / "file" / "run", *options())
    assert code == 2 and not out
    assert err.startswith("seht: error: cannot write") and "Not a directory" in err
    assert "--out" in err and err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_presets_have_their_rows(run, tmp_path):
    from seht.lab.commands.compare import rows_of

    arguments, rest = cli.build_parser().parse_known_args(
        ["compare", "--preset", "lr-lstm", "--small", "--epochs", "1"]
    )
    arguments.rest = rest
    recipe, rows = rows_of(arguments)
    assert recipe.name == "wikitext2-lstm-small" and recipe.epochs == 1
    entries = [entry for (entry,) in rows]
    assert {entry.recipe.optim.lr for entry in entries} >= {0.001, 20.0, 40.0}
    assert all(entry.recipe.epochs == 1 for entry in entries)
    assert len({entry.slug for entry in entries}) == len({e.name for e in entries}) == len(rows)


def test_help_does_not_load_what_only_runs_need():
    code = (
        "import sys; from seht import cli; cli.build_parser();"
        "heavy = {'lightning_fabric', 'rich', 'sklearn', 'tensorboard', 'matplotlib', 'pooch',"
        "'pytorch_optimizer', 'scipy', 'jinja2'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
