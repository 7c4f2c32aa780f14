"""FedAUX's toy (Fig. 2): an ensemble weighted by certainty knows the flowers that the uniform one does not."""

import re
import runpy
import sys

import pytest
import torch
from doc_pages import ROOT

from fedstill.server.distill.targets import pool_targets

EXAMPLE = ROOT / "examples" / "iris_certainty.py"


@pytest.fixture(scope="module")
def toy():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def answers(toy):
    """(logits, share, accuracy of a belief) at the flowers."""
    federation = toy["three_clients"]()
    x = federation.train.x
    return (
        toy["clients_logits"](federation, x),
        toy["certainties"](federation, x),
        lambda belief: toy["accuracy"](federation, belief),
    )


def test_each_client_holds_one_species(toy):
    federation = toy["three_clients"]()
    labels = federation.train.y[federation.indices].reshape(3, 50)
    assert [set(own.tolist()) for own in labels] == [{0}, {1}, {2}]


def test_each_client_answers_its_own_species_everywhere(answers):
    logits, _, _ = answers
    assert logits.shape == (3, 150, 3)
    for client in range(3):
        assert set(logits[client].argmax(-1).tolist()) == {client}


def test_the_weighted_ensemble_is_well_above_the_uniform_one(answers):
    logits, share, accuracy = answers
    uniform, weighted = accuracy(pool_targets(logits)), accuracy(pool_targets(logits, share=share))
    assert uniform == pytest.approx(1 / 3, abs=0.01)  # the paper: 33 %
    assert weighted > 0.88  # the paper: 88 %


def test_certainties_are_shares_that_belong_to_their_own_flowers(answers):
    _, share, _ = answers
    torch.testing.assert_close(share.sum(0), torch.ones(150, dtype=share.dtype))
    own = torch.stack([share[client, 50 * client : 50 * (client + 1)].mean() for client in range(3)])
    assert bool((own > 0.8).all())


def test_equal_certainties_are_the_uniform_ensemble(answers):
    logits, share, _ = answers
    torch.testing.assert_close(
        pool_targets(logits, share=torch.full_like(share, 1 / 3)), pool_targets(logits), rtol=1e-5, atol=1e-7
    )


def test_the_page_shows_what_the_example_says(answers):
    logits, share, accuracy = answers
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    shown = {
        name: float(value)
        for name, value in re.findall(r"^\| (uniform|weighted)[^|]*\| ([\d.]+) %", page, re.MULTILINE)
    }
    found = {"uniform": pool_targets(logits), "weighted": pool_targets(logits, share=share)}
    assert shown == {name: pytest.approx(100 * accuracy(belief), abs=0.05) for name, belief in found.items()}


def test_it_draws_a_picture_when_it_is_asked_to(toy, tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.setattr(sys, "argv", ["iris_certainty.py", "--picture", str(tmp_path / "iris.png")])
    toy["main"]()
    assert "weighted by certainty" in capsys.readouterr().out
    with Image.open(tmp_path / "iris.png") as drawn, Image.open(ROOT / "docs/images/iris_certainty.png") as shown:
        assert drawn.size == shown.size
        assert len(drawn.getcolors(maxcolors=1 << 20)) > 100
