"""Every example runs, and the library does what the reference in plain PyTorch does."""

import runpy
from functools import partial

import numpy as np
import pytest
import torch
from doc_pages import ROOT
from quick import EITHER_ENGINE

import fedstill
from fedstill import Training
from fedstill.methods.lookup import build_method

FILES = sorted((ROOT / "examples").glob("*.py"))
EXAMPLES = [  # my_method.py: see test_adding_a_method; cells of a notebook begin with # %%
    path for path in FILES if "__main__" in path.read_text() or "# %%" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_says_something(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(example), run_name="__main__")
    if example.name == "hospital_table.py":  # it writes the tables of the hospital's page, and trains nothing
        assert "500 patients" in capsys.readouterr().out
        assert {path.name for path in tmp_path.iterdir()} == {"patients.csv", "new_patients.csv"}
        return
    assert "accuracy" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_there_are_examples_and_they_are_short():
    assert {path.name for path in EXAMPLES} >= {
        "fedavg_in_one_file.py",
        "own_method.py",
        "own_data.py",
        "from_a_dataframe.py",
    }
    assert all(len(path.read_text().splitlines()) <= 120 for path in FILES)


def test_the_one_file_reference_imports_nothing_of_ours():
    assert "import fedstill" not in (ROOT / "examples" / "fedavg_in_one_file.py").read_text()


@pytest.mark.parametrize("engine", EITHER_ENGINE)
def test_the_library_trains_as_the_one_file_reference(engine):
    """With a full batch there is one way to run an epoch, so that three rounds must give the same weights."""
    plain = runpy.run_path(str(ROOT / "examples" / "fedavg_in_one_file.py"))
    train_client, average = plain["train_client"], plain["average"]
    train_client.__globals__["batch_size"] = 10_000
    x, y, test_x, test_y = plain["load_data"]()
    owned = plain["split"](y, np.random.default_rng(1))[:4]

    def module():
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return plain["make_model"]()

    shuffle = torch.Generator().manual_seed(0)
    expected = module()
    for _ in range(3):
        models = [train_client(expected, x[rows], y[rows], shuffle) for rows in owned]
        expected = average(models, [len(rows) for rows in owned])

    digits = tuple("0123456789")
    federation = fedstill.Federation(
        fedstill.Dataset("digits", x, y, digits),
        fedstill.Dataset("digits", test_x, test_y, digits),
        torch.cat(owned),
        torch.tensor([0, *np.cumsum([len(rows) for rows in owned])]),
    )
    result = fedstill.federate(
        fedstill.Built(
            method=build_method("fedavg")[0].method,
            model=fedstill.from_module(module(), input_shape=(64,), classes=10),
            federation=federation,
            training=Training(epochs=plain["epochs"], batch_size=10000, lr=plain["lr"]),
            schedule=fedstill.Schedule(rounds=3, cohort=4),
            engines=partial(fedstill.build_engines, engine, "cpu"),
        )
    )
    start = module()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(result.weights.params[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(parameter, start.get_parameter(name), atol=1e-3), "nothing was trained"


@pytest.fixture
def scale():
    return runpy.run_path(str(ROOT / "benchmarks" / "scale.py"))


def test_the_scale_benchmark_reports_every_round(scale, capsys):
    federation = scale["make_federation"](200, 3)
    meter = scale["measure"]("scaffold", federation, cohort=20, rounds=6, on_disk=True)
    assert len(meter.seconds) == len(meter.work) == len(meter.memory) == 6
    scale["report"]("scaffold", meter, scale["resident"]())
    told = capsys.readouterr().out
    assert len(next(line for line in told.splitlines() if "resident MB" in line).split()[2:]) == 5  # all but round 1


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_hundred_thousand_clients_neither_slow_down_nor_grow(scale, method, on_disk):
    federation = scale["make_federation"](100_000, 5)
    meter = scale["measure"](method, federation, cohort=1_000, rounds=20, on_disk=on_disk)
    assert meter.slowdown() < 1.5
    assert scale["slope"](meter.memory[1:]) < 1.0  # MB a round
