"""The page "Adding a method": its example is complete, short, correct, and runs without touching the library."""

import json
import math
import runpy
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from doc_pages import ROOT, blocks
from quick import EITHER_ENGINE
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.core.errors import FedstillError
from fedstill.core.types import Batch, Local, Need, Output
from fedstill.methods import METHODS
from fedstill.methods.lookup import build_method
from fedstill.partition import PARTITIONS

PAGE, EXAMPLE = ROOT / "docs" / "adding-a-method.md", ROOT / "examples" / "my_method.py"
PATH = "examples/my_method.py:my_method"
SHORT = ["--set", "rounds=2", "--set", "local.steps=2", "--format", "json"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Somebody's folder with nothing but the file."""
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def answer(*words: str) -> dict:
    found = CliRunner().invoke(app, [*words, *SHORT])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_the_page_shows_the_file_as_it_is():
    assert blocks(PAGE, "python")[0].text == EXAMPLE.read_text(encoding="utf-8")


def test_a_whole_method_has_fewer_than_forty_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 40


def test_it_is_registered_nowhere():
    assert "my_method" not in METHODS
    assert not [path for path in (ROOT / "src").rglob("*.py") if "my_method" in path.read_text(encoding="utf-8")]


def test_it_runs_from_the_command_line_by_its_path(folder):
    answer("run", "--set", f"method={PATH}", "--out", "mine")
    answer("run", "--set", "method=fedavg", "--out", "plain")
    mine, plain = (
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("mine", "plain")
    )
    assert len(mine) == len(plain) == 2
    assert mine[0]["train_loss"] != plain[0]["train_loss"]
    assert PATH in (folder / "mine" / "config.toml").read_text()


def test_it_is_compared_and_joined_with_other_methods(folder):
    mixture = f"{PATH}(strength=0.1)+fedprox"
    told = json.dumps(answer("compare", "--methods", f"fedavg,{mixture}", "--seeds", "1"))
    assert mixture.rpartition("/")[2] in told  # tables show a file without its folder
    assert '"fedavg"' in told


def joins(text: str) -> bool:
    try:
        build_method(text)
    except FedstillError:
        return False
    return True


def test_it_joins_whatever_a_built_in_method_of_its_kind_joins(folder):
    others = [name for name in METHODS if name != "fedlmd"]
    assert joins(f"{PATH}+scaffold")
    for name in others:
        assert joins(f"{PATH}+{name}") == joins(f"fedlmd+{name}"), name


def test_it_can_be_imported_as_a_module_too(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "examples").rename(folder / "somebodys_package")
    (method,) = (phase.method for phase in build_method("somebodys_package.my_method:my_method(strength=0.5)"))
    assert method.objective.needs == {Need.LABEL_COUNTS}


def test_a_wrong_option_or_function_is_one_line_that_names_the_right_one(folder):
    for text, near in ((f"{PATH}(strengh=1.0)", "strength"), ("examples/my_method.py:my_methd", "my_method")):
        found = CliRunner().invoke(app, ["compare", "--methods", f"fedavg,{text}", "--seeds", "1"])
        assert found.exit_code == 2
        assert near in found.stderr.splitlines()[-1]


def test_the_term_is_what_the_client_lost_of_the_classes_it_lacks(example):
    """p = (1/3, 1/3, 1/3), q = (1/2, 1/4, 1/4), only class 2 absent: 1/3 ln((1/3) / (1/4)); padding counts nothing."""
    term = example["keep_absent_classes"](2.0)
    trained, received = torch.tensor([[math.log(2.0), 0.0, 0.0], [5.0, 0.0, -5.0]]), torch.zeros(2, 3)
    batch = Batch(torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([1.0, 0.0]))
    local = Local(*[None] * len(Local._fields))._replace(
        label_counts=torch.tensor([4.0, 3.0, 0.0]), frozen={"start": Output(received, received)}
    )
    found = term.loss(Output(trained, trained), batch, local)
    assert float(found) == pytest.approx(2.0 * math.log(4.0 / 3.0) / 3.0)
    nothing_absent = local._replace(label_counts=torch.ones(3))
    assert float(term.loss(Output(trained, trained), batch, nothing_absent)) == 0.0


def trained(method, engine: str) -> torch.Tensor:
    source = fedstill.load("digits")
    parts = PARTITIONS["lda"](source.train.y.numpy(), 20, seed=0, alpha=0.1)
    weights = fedstill.federate(
        fedstill.Built(
            method=method,
            model=fedstill.build_model("mlp", input_shape=(1, 8, 8), classes=10, hidden=(16,), init="torch"),
            federation=fedstill.make_federation(source, parts),
            training=fedstill.Training(epochs=1, batch_size=20, lr=0.1, momentum=0.5),
            schedule=fedstill.Schedule(rounds=2, cohort=5),
            engines=partial(fedstill.build_engines, engine, "cpu"),
        )
    ).weights
    return torch.cat([leaf.flatten() for leaf in weights.params.values()])


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_with_its_knob_at_zero_it_is_fedavg_bit_for_bit(example, engine):
    plain = trained(build_method("fedavg")[0].method, engine)
    assert torch.equal(trained(example["my_method"](strength=0.0), engine), plain)
    assert float((trained(example["my_method"](), engine) - plain).abs().max()) > 1e-4


def test_both_engines_train_alike(example):
    batched, looped = (trained(example["my_method"](), engine) for engine in ("batched", "looped"))
    np.testing.assert_allclose(batched.numpy(), looped.numpy(), rtol=0, atol=1e-5)


def test_the_tables_name_all_that_a_term_may_look_at_and_declare():
    cells = [line.split("|")[1].strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    names = [cell.strip("`") for cell in cells]
    fields, needs = list(Local._fields), [need.name for need in Need]
    assert [name for name in names if name in fields] == fields
    assert [name for name in names if name in needs] == needs


def test_the_pages_method_with_a_memory_runs_and_tells_how_far_clients_went():
    space: dict = {"__name__": "snippet"}
    for block in blocks(PAGE, "python")[:3]:
        exec(compile(block.text, str(PAGE), "exec"), space)
    source = fedstill.load("digits")
    result = fedstill.federate(
        fedstill.Built(
            method=space["steady"](),
            model=fedstill.build_model("mlp", input_shape=(1, 8, 8), classes=10, hidden=(16,), init="torch"),
            federation=fedstill.make_federation(source, PARTITIONS["iid"](source.train.y.numpy(), 10, seed=0)),
            training=fedstill.Training(batch_size=20, lr=0.1),
            schedule=fedstill.Schedule(rounds=2, cohort=3),
            engines=partial(fedstill.build_engines, "auto", "cpu"),
        )
    )
    assert [row["accepted"] for row in result.history.rows] == [3, 3]
    assert all(row["server/distance"] > 0 for row in result.history.rows)
