"""`fedstill init` then `fedstill run`, at the first try, on data that nobody prepared."""

import importlib
import inspect
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cli_runs import answer, fedstill, mistake
from PIL import Image
from quick import first_quick
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from fedstill import Experiment
from fedstill.data.inspect import Findings
from fedstill.experiment.starter import starter_text
from fedstill.storage import toml

PACKAGES = ("numpy", "torch", "scipy.stats")  # the classes of texts: whose function a docstring describes


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def first_run(data: str, *options: str) -> tuple[Experiment, float, str]:
    """Return (the written experiment, the accuracy of its first run, all that init printed)."""
    printed = fedstill("init", data, "--out", "first.toml", *options).output
    settings = ["--set", "compare.references=false", "--set", "engine.threads=1"]
    result = answer("run", "first.toml", *settings, "--out", "run")
    return Experiment.from_toml("first.toml"), result["accuracy_last"], printed


def hospital_table(bunch, file: str) -> float:
    """Write scikit-learn's table with gaps, ids, a constant and a leak; return the share of the largest class."""
    random, table = np.random.default_rng(0), bunch.data.copy()
    table = table.mask(random.random(table.shape) < 0.03)
    table.insert(0, "patient_id", [f"p{number:04d}" for number in random.permutation(len(table))])
    table["ward"] = "a"
    table["outcome_code"] = bunch.target * 10 + 3
    table["hospital"] = random.choice(["north", "south", "east", "west"], len(table))
    table["sex"] = random.choice(["f", "m", ""], len(table), p=[0.5, 0.48, 0.02])
    table["diagnosis"] = bunch.target_names[bunch.target]
    table.to_csv(file, index=False)
    return float(bunch.target.value_counts(normalize=True).max())


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_a_table_with_gaps_ids_and_a_leak(load) -> None:
    majority = hospital_table(load(as_frame=True), "table.csv")
    experiment, accuracy, printed = first_run("table.csv", "--label", "diagnosis", "--owner", "hospital")
    assert set(experiment.data.drop) == {"patient_id", "ward", "outcome_code"}
    assert experiment.partition.scheme == "natural"
    assert (experiment.data.missing, experiment.cohort) == ("mean", 4)
    assert accuracy > majority + 0.2
    assert "leak suspect" in printed


def test_new_rows_of_such_a_table_are_read_by_the_contract_alone() -> None:
    hospital_table(load_wine(as_frame=True), "table.csv")
    first_run("table.csv", "--label", "diagnosis")
    new = pd.read_csv("table.csv").drop(columns="diagnosis").head(12)
    new.loc[0, "sex"] = "x"
    new.loc[1, ["alcohol", "ash"]] = np.nan
    new.to_csv("new.csv", index=False)
    Path("table.csv").unlink()
    first = answer("predict", "run", "new.csv", "--out", "all")
    new.iloc[[1]].to_csv("new.csv", index=False)  # alone it has no mean to be filled with but that of the run
    answer("predict", "run", "new.csv", "--out", "alone")
    one, every = (pd.read_csv(f"{folder}/predictions.csv").set_index("id") for folder in ("alone", "all"))
    assert first["count"] == 12
    pd.testing.assert_frame_equal(one, every.loc[one.index], rtol=1e-5)


def table_with_thirty_words() -> str:
    """Write 1,500 buyers in 30 cities; the city and the amount decide who buys, with noise."""
    random = np.random.default_rng(0)
    city, noise = random.integers(0, 30, 1500), random.standard_normal(1500)
    buys = (city % 3 == 0) ^ (noise + random.standard_normal(1500) * 0.5 > 1)
    columns = {"city": [f"city {c}" for c in city], "amount": noise.round(3), "target": np.where(buys, "yes", "no")}
    pd.DataFrame(columns).to_csv("table.csv", index=False)
    return "table.csv"


def images_of_mixed_sizes() -> str:
    """Write 600 digits as images of 8 to 14 pixels by class, one file that is no image and one that is cut off."""
    digits, random = load_digits(), np.random.default_rng(0)
    for number in range(600):
        folder = Path("pictures") / f"d{digits.target[number]}"
        folder.mkdir(parents=True, exist_ok=True)
        side = int(random.integers(8, 15))
        picture = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8))
        picture.resize((side, side + int(random.integers(0, 4)))).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "cut.png").write_bytes((folder / f"{number}.png").read_bytes()[:60])
    return "pictures"


def docstrings() -> list[tuple[str, str]]:
    """Return (text, package) of 200 functions of each package, the first 40 words of each text."""
    rows = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        functions = (getattr(module, name) for name in sorted(dir(module)) if not name.startswith("_"))
        # no submodules, because their number depends on the tests that ran before
        texts = (inspect.getdoc(function) or "" for function in functions if inspect.isroutine(function))
        long = dict.fromkeys(" ".join(text.split()[:40]) for text in texts if len(text.split()) > 12)
        rows += [(text, package) for text in list(long)[:200]]
    return rows


def texts_in_class_folders() -> str:
    for number, (text, package) in enumerate(docstrings()):
        (Path("texts") / package).mkdir(parents=True, exist_ok=True)
        (Path("texts") / package / f"{number}.txt").write_text(text, encoding="utf-8")
    return "texts"


def table_of_texts() -> str:
    rows = [(number, *row) for number, row in enumerate(docstrings())]
    pd.DataFrame(rows, columns=["id", "review", "label"]).to_csv("reviews.csv", index=False)
    return "reviews.csv"


def tumours() -> str:
    hospital_table(load_breast_cancer(as_frame=True), "tumours.csv")
    return "tumours.csv"


def wines() -> str:
    hospital_table(load_wine(as_frame=True), "wines.csv")
    return "wines.csv"


def test_the_first_file_of_a_table_with_thirty_words_keeps_them() -> None:
    fedstill("init", table_with_thirty_words(), "--out", "first.toml")
    assert Experiment.from_toml("first.toml").data.drop == ()


def test_the_first_file_of_images_of_mixed_sizes_resizes_them_and_skips_broken_files() -> None:
    assert "2 files cannot be read" in fedstill("init", images_of_mixed_sizes(), "--out", "first.toml").output
    experiment = Experiment.from_toml("first.toml")
    assert (experiment.data.size, experiment.data.missing) == (8, "skip")


def test_the_first_file_of_texts_reads_tokens() -> None:
    fedstill("init", texts_in_class_folders(), "--out", "first.toml")
    assert Experiment.from_toml("first.toml").data.tokens is not None
    fedstill("init", table_of_texts(), "--out", "second.toml")
    assert Experiment.from_toml("second.toml").data.inputs == ("review",)


@pytest.mark.parametrize(("kind", "few", "many"), [("images", 1000, 60_000), ("texts", 1000, 60_000)])
def test_a_first_file_for_much_data_asks_for_less_work(kind: str, few: int, many: int) -> None:
    def visits(rows: int) -> tuple[float, bool]:
        """Return how often a row is trained on, and whether there are reference points."""
        looked = Findings("data", kind, rows, "label", {"a": 1, "b": 1}, sizes={(8, 8): rows}, text_words=20)
        experiment = Experiment.model_validate(toml.loads(starter_text(looked, name="data", population=5)))
        return experiment.rounds * experiment.local.epochs, experiment.compare.references

    assert visits(many)[0] < visits(few)[0] / 3
    assert (visits(few)[1], visits(many)[1]) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "options"),
    [
        (tumours, ("--label", "diagnosis", "--owner", "hospital")),
        (wines, ("--label", "diagnosis")),
        (table_with_thirty_words, ()),
        (images_of_mixed_sizes, ()),
        (texts_in_class_folders, ()),
        (table_of_texts, ()),
    ],
)
def test_a_first_run_beats_the_majority_and_with_clients_alike_comes_near_the_pooled_model(write, options) -> None:
    fedstill("init", write(), "--out", "first.toml", *options)
    first = answer("run", "first.toml", "--set", "engine.threads=1", "--out", "run")
    assert first["accuracy_last"] > first["references"]["majority"] + 0.1
    one_split = ["--set", 'partition={scheme="iid", clients=5}', "--set", "cohort=5"]
    alike = answer("run", "first.toml", *one_split, "--set", "engine.threads=1", "--out", "alike")
    assert alike["accuracy_last"] > alike["references"]["majority"] + 0.1
    assert alike["accuracy_last"] >= alike["references"]["pooled"] - 0.05


@pytest.mark.parametrize(("order", "owner"), [("owner/class", "folder1"), ("class/owner", "folder2")])
@pytest.mark.parametrize("suffix", first_quick([".png", ".txt"]))
def test_owners_by_folder_have_their_results_under_the_folders_names(order: str, owner: str, suffix: str) -> None:
    digits, owners = load_digits(), ("north", "south", "east")
    for number in range(90):
        folder = order.replace("owner", owners[number % 3]).replace("class", f"d{digits.target[number] % 2}")
        Path("data", folder).mkdir(parents=True, exist_ok=True)
        file = Path("data", folder, f"{number}{suffix}")
        if suffix == ".png":
            Image.fromarray((digits.images[number] * 15.9).astype(np.uint8)).save(file)
        else:
            file.write_text(f"text {number} of {digits.target[number] % 2}", encoding="utf-8")
    assert f"owner '{owner}': 3 owners of 30 to 30" in fedstill("init", "data", "--owner", owner).output
    answer("run", "data.toml", "--rounds", "1", "--set", "data.client_test_share=0.2", "--out", "run")
    assert set(pd.read_csv("run/parties.csv")["name"]) == set(owners)
    Path("data").rename("moved")
    predicted = answer("predict", "run", "moved", "--out", "answers")
    assert predicted["count"] == 90
    assert set(predicted["labels"]) == {"d0", "d1"}


def test_a_table_of_images_with_owners() -> None:
    digits = load_digits()
    images = [BytesIO() for _ in range(60)]
    for number, file in enumerate(images):
        Image.fromarray((digits.images[number] * 15.9).astype(np.uint8)).save(file, "png")
    columns = {"image": [file.getvalue() for file in images], "label": digits.target[:60] % 2}
    pd.DataFrame({**columns, "scanner": ["a", "b", "c"] * 19 + ["a", None, None]}).to_parquet("scans.parquet")
    printed = fedstill("init", "scans.parquet", "--owner", "scanner").output
    assert "owner 'scanner': 3 owners of 19 to 20 images" in printed
    assert "2 images have no label or no owner" in printed
    answer("run", "scans.toml", "--rounds", "1", "--set", "data.client_test_share=0.2", "--out", "run")
    assert sorted(pd.read_csv("run/parties.csv")["name"]) == ["a", "b", "c"]


def test_init_writes_over_no_file_and_names_data_that_are_not_there() -> None:
    assert "no such file or folder: 'nothing.csv'" in mistake("init", "nothing.csv")
    Path("first.toml").write_text("mine", encoding="utf-8")
    pd.DataFrame({"x": range(40), "y": [0, 1] * 20, "z": [1, 2, 2, 1] * 10}).to_csv("t.csv", index=False)
    assert "'first.toml' exists already" in mistake("init", "t.csv", "--out", "first.toml")
    assert Path("first.toml").read_text(encoding="utf-8") == "mine"
    assert re.search(r"wrote t\.toml; run it with: fedstill run t\.toml", fedstill("init", "t.csv").output)
