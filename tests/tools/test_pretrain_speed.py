"""benchmarks/pretrain_speed.py measures views and whole steps, and fails when its promise is not kept."""

import re
import runpy

import pytest
import torch
from doc_pages import ROOT

TINY = ["--device", "cpu", "--model", "mlp", "--batch", "4", "--steps", "2", "--side", "8", "--repeats", "1"]


@pytest.fixture
def speed():
    return runpy.run_path(str(ROOT / "benchmarks" / "pretrain_speed.py"))


def test_a_line_for_the_views_and_one_for_whole_steps(speed, capsys):
    assert speed["main"]([*TINY, "--check"]) == 0  # nothing is promised for a CPU
    views, steps = capsys.readouterr().out.splitlines()
    numbers = [float(re.search(r"([\d,]+) images/s", line)[1].replace(",", "")) for line in (views, steps)]
    assert views.startswith("views")
    assert steps.startswith("step")
    assert "batch 4" in views
    assert "(mlp, cpu, float32" in steps
    assert numbers[0] > numbers[1] > 0  # a step makes views, too


def test_the_promise_is_for_a_gpu(speed):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [speed["kept"](rate, gpu) for rate in (49_999.0, 50_000.0, 50_001.0)] == [False, False, True]
    assert speed["kept"](1.0, cpu)


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--check"], 1)])
def test_a_broken_promise_fails_the_check_only(speed, options, code, capsys):
    speed["main"].__globals__["kept"] = lambda *_: False
    assert speed["main"]([*TINY, *options]) == code
    assert "promised: more than 50,000 images/s" in capsys.readouterr().out


def test_an_unknown_model_is_refused(speed, capsys):
    with pytest.raises(SystemExit):
        speed["main"](["--model", "resnet9"])
    assert "resnet9" in capsys.readouterr().err
