"""benchmarks/server_cost.py times the server's passes and rounds, and fails when a promise is not kept."""

import json
import runpy

import pytest
import torch
from doc_pages import ROOT

TINY = ["--teachers", "2", "--samples", "9", "--clients", "2", "--client-samples", "4", "--epochs", "1", "--steps", "1"]
TINY += ["--repeats", "1", "--models", "lenet", "--round-model", "lenet"]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as it is for a script: its own folder
    return runpy.run_path(str(ROOT / "benchmarks" / "server_cost.py"))


def test_every_part_is_measured_and_written_down(cost, tmp_path, capsys):
    file = tmp_path / "cost.json"
    assert cost["main"]([*TINY, "--json", str(file)]) == 0
    lines = json.loads(file.read_text())["lines"]
    parts = [line["part"] for line in lines]
    assert parts == ["pass"] * 7 + ["round"] * 6 + ["memory"]
    ours, together, in_turn, *loops = (line for line in lines if line["part"] == "pass")
    assert [line["name"] for line in loops] == [f"lenet: loop {batch}" for batch in (64, 128, 512, 640)]
    assert ours["factor"] == 1.0
    for line in (together, in_turn, *loops):
        assert line["factor"] == pytest.approx(line["seconds"] / ours["seconds"])
    *rounds, whole = (line for line in lines if line["part"] == "round")
    assert whole["factor"] == pytest.approx(whole["seconds"] / sum(line["seconds"] for line in rounds))
    assert whole["kept"] == (whole["factor"] <= 1.5)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(lines)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_loop_that_ours_is_held_against_gives_the_same_answers(cost, model):
    engine = cost["make_engine"](model, cost["make_federation"](1, 4, 7), CPU)
    teachers, x = cost["some_models"](engine, 3), cost["images"](7)
    inputs = engine._feed_of(x).inputs(slice(None))
    found = cost["plain_loop"](cost["plain_modules"](model, teachers, CPU), inputs, batch=3)
    wanted = engine.outputs(teachers, x, stacked=True).logits
    assert found.shape == (3, 7, 10)
    assert float((found - wanted).abs().max()) < 1e-5
    assert float((found[0] - found[1]).abs().max()) > 1e-3


def test_what_is_promised_depends_on_the_device(cost):
    """On a GPU five times the loop in batches of 64; on a CPU not slower than any loop, up to 10 %."""
    seconds = {"engine": 1.0, "together": 1.0, "in turn": 2.0, "loop 64": 4.9, "loop 128": 0.95, "loop 640": 0.85}

    def kept(device, **changes):
        lines = cost["pass_lines"]("cnn", {**seconds, **changes}, device, 0.0)
        return {line.name.removeprefix("cnn: "): line.kept for line in lines if line.kept is not None}

    assert kept(CPU) == {"loop 64": True, "loop 128": True, "loop 640": False}
    assert kept(GPU) == {"loop 64": False}
    assert kept(GPU, **{"loop 64": 5.1}) == {"loop 64": True}


def test_a_wrong_choice_of_the_engine_is_told(cost):
    seconds = {"engine": 1.3, "together": 1.0, "in turn": 1.3}
    assert "'together' is faster" in cost["pass_lines"]("cnn", seconds, CPU, 0.0)[0].note
    assert "faster" not in cost["pass_lines"]("cnn", {**seconds, "engine": 1.0}, CPU, 0.0)[0].note


@pytest.mark.parametrize(("kept", "code"), [(False, 1), (True, 0), (None, 0)])
def test_a_promise_that_is_not_kept_fails_the_check_only(cost, kept, code):
    line = cost["Line"]("round", "mlp: MrTF's round", 1.0, 2.0, kept)
    cost["main"].__globals__["MEASURES"] = {"round": lambda *_: [line]}
    assert cost["main"](["--parts", "round", "--check"]) == code
    assert cost["main"](["--parts", "round"]) == 0


@pytest.mark.parametrize("options", [["--models", "cnnn"], ["--parts", "speed"], ["--round-model", "vgg"]])
def test_an_unknown_word_is_refused(cost, options, capsys):
    with pytest.raises(SystemExit):
        cost["main"](options)
    assert "unknown" in capsys.readouterr().err
