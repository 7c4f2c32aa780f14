"""benchmarks/hard_samples_cost.py times FedFTG's server phase and rounds, and fails when a promise is not kept."""

import json
import runpy

import pytest
import torch
from doc_pages import ROOT

TINY = ["--small", "--clients", "2", "--client-samples", "4", "--model", "lenet"]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as it is for a script: its own folder
    return runpy.run_path(str(ROOT / "benchmarks" / "hard_samples_cost.py"))


def test_every_part_is_measured_and_written_down(cost, tmp_path, capsys):
    file = tmp_path / "cost.json"
    assert cost["main"]([*TINY, "--json", str(file)]) == 0
    lines = json.loads(file.read_text())["lines"]
    assert [(line["part"], line["name"]) for line in lines[:-1]] == [
        ("phase", "each"), ("phase", "joint"), ("phase", "loop"),
        ("round", "fedavg"), ("round", "fedftg each"), ("round", "fedftg joint"),
    ]  # fmt: skip
    each, joint, loop, fedavg, *rounds = lines[:-1]
    for line in (each, joint, loop):
        assert line["factor"] == pytest.approx(loop["seconds"] / line["seconds"])
    for line in rounds:
        assert line["factor"] == pytest.approx(line["seconds"] / fedavg["seconds"])
        assert line["kept"] is None, "nothing is promised for a CPU"
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(lines)


def test_the_loop_trains_both_and_leaves_the_teachers_alone(cost):
    options = cost["read_options"](TINY)
    engine = cost["make_engine"](options, cost["make_federation"](2, 4), CPU)
    loop = cost["PlainLoop"](engine, options)
    nets = {"generator": loop.generator, "student": loop.student, "teacher": loop.teachers[1]}
    before = {name: [leaf.clone() for leaf in net.parameters()] for name, net in nets.items()}
    loop()
    moved = {
        name: any(not torch.equal(old, new) for old, new in zip(before[name], net.parameters(), strict=True))
        for name, net in nets.items()
    }
    assert moved == {"generator": True, "student": True, "teacher": False}


def test_the_phase_is_promised_four_times_the_loop_on_a_gpu_in_its_faster_way(cost):
    def kept(device, joint):
        lines = cost["phase_lines"]({"each": 2.0, "joint": joint, "loop": 8.0}, device)
        return [line.kept for line in lines]

    assert kept(CPU, 1.0) == [None, None, None]
    assert kept(GPU, 1.0) == [None, True, None]
    assert kept(GPU, 2.5) == [True, None, None]
    assert kept(GPU, 1.9) == [None, True, None]
    assert [line.kept for line in cost["phase_lines"]({"each": 3.0, "joint": 2.1, "loop": 8.0}, GPU)][1] is False


def test_a_round_is_promised_twice_fedavgs_on_a_gpu(cost):
    taken = {"each": 2.1, "joint": 1.9}
    assert [line.kept for line in cost["round_lines"](1.0, taken, GPU)] == [False, True]
    assert [line.kept for line in cost["round_lines"](1.0, taken, CPU)] == [None, None]


@pytest.mark.parametrize(("kept", "code"), [(False, 1), (True, 0), (None, 0)])
def test_a_promise_that_is_not_kept_fails_the_check_only(cost, kept, code):
    line = cost["Line"]("round", "fedftg joint", 1.0, 3.0, kept)
    cost["main"].__globals__["MEASURES"] = {"round": lambda *_: [line]}
    assert cost["main"](["--parts", "round", "--check"]) == code
    assert cost["main"](["--parts", "round"]) == 0


@pytest.mark.parametrize("options", [["--model", "cnnn"], ["--parts", "speed"], ["--generator", "fast"]])
def test_an_unknown_word_is_refused(cost, options, capsys):
    with pytest.raises(SystemExit):
        cost["main"](options)
    assert "usage" in capsys.readouterr().err
