"""Learning curves of many methods: each can be told from all others by its name's own piece of line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from pictures import assert_no_label_is_clipped, saved_figures
from server_rounds import CLIENTS, LOCAL, federation, network, run
from toy import same_bits
from typer.testing import CliRunner
from weighed import weighed

from fedstill import Experiment
from fedstill import run as run_experiment
from fedstill.cli import app
from fedstill.methods import fedavg
from fedstill.methods.lookup import build_method
from fedstill.report import COLOURS, style
from fedstill.report import curves as curves_module
from fedstill.report.curves import band, learning_curves

pytest.importorskip("matplotlib")

LONG = 'method{}(form="mean", epsilon=0.5, steps=2000)+simclr(epochs=100)'


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Draw so many methods that end close to each other, and return the figure."""
    figures = saved_figures(monkeypatch)

    def draw(count: int, name: str = "method{}") -> Figure:
        curves = {name.format(place): [([1, 2, 3], [0.1, 0.5, 0.6 + place / 500])] for place in range(count)}
        learning_curves(curves, tmp_path / "curves.png", title="a title")
        return figures[-1]

    return draw


def look(line) -> tuple:
    """Colour, width and the dashes as they are drawn."""
    _, dashes = line._dash_pattern
    return line.get_color(), line.get_linewidth(), tuple(dashes or ())


def pieces_beside_names(axes) -> dict[str, object]:
    """By name, the level line that ends left of it at its height."""
    level = [line for line in axes.lines if not line.get_clip_on() and len(set(line.get_ydata())) == 1]
    found = {}
    for text in axes.texts:
        x, y = text.get_position()
        (found[text.get_text().split()[1]],) = (
            one for one in level if one.get_ydata()[0] == y and x - 0.02 < one.get_xdata()[-1] < x
        )
    return found


def test_a_name_stands_behind_a_piece_of_its_own_line(drawn):
    axes = drawn(12).axes[0]
    curves = [line for line in axes.lines if line.get_clip_on()]
    pieces = pieces_beside_names(axes)
    assert [look(pieces[f"method{place}"]) for place in range(12)] == [look(curve) for curve in curves]
    assert len({look(piece) for piece in pieces.values()}) == 12


def test_a_piece_is_long_enough_to_tell_its_dashes(drawn):
    figure = drawn(30)
    axes = figure.axes[0]
    for piece in pieces_beside_names(axes).values():
        begin, end = (axes.transAxes.transform((x, 0))[0] for x in piece.get_xdata())
        points = (end - begin) * 72 / figure.dpi
        assert points > 1.8 * sum(look(piece)[2])


def test_no_two_of_thirty_two_methods_look_alike():
    styles = [style(place) for place in range(32)]
    assert len(set(styles)) == 32
    assert [colour for colour, _ in styles] == list(COLOURS) * 4
    assert style(32) == style(0)


@pytest.mark.parametrize(("count", "name"), [(12, "method{}"), (30, "method{}"), (12, LONG)])
def test_names_of_many_methods_find_room_beside_the_picture(drawn, count, name):
    figure = drawn(count, name)
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == count
    assert all(below.y1 <= above.y0 for below, above in pairwise(boxes))
    for box in boxes:
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_names_that_would_stand_far_from_their_lines_are_a_list_from_the_highest_end_down(drawn):
    """Eight lines that end within three points: a name at the height of 28 % must not belong to an end at 60 %."""
    axes = drawn(8).axes[0]
    ordered = sorted(axes.texts, key=lambda text: -text.get_position()[1])
    assert [text.get_text().split()[1] for text in ordered] == [f"method{place}" for place in reversed(range(8))]
    assert ordered[0].get_position()[1] > 0.95
    assert not [line for line in axes.lines if not line.get_clip_on() and len(set(line.get_ydata())) > 1]


def test_names_of_lines_that_end_apart_stand_at_their_ends(monkeypatch, tmp_path):
    figures = saved_figures(monkeypatch)
    curves = {name: [([1, 2], [0.1, end])] for name, end in (("a", 0.3), ("b", 0.9))}
    learning_curves(curves, tmp_path / "c.png", title="")
    (axes,) = figures[-1].axes
    low, high = axes.get_ylim()
    heights = {text.get_text().split()[1]: low + text.get_position()[1] * (high - low) for text in axes.texts}
    assert heights == pytest.approx({"a": 30.0, "b": 90.0})


@pytest.mark.parametrize(("methods", "bands"), [(4, 4), (5, 0)])
def test_only_few_methods_have_bands_and_the_title_says_so(monkeypatch, tmp_path, methods, bands):
    figures = saved_figures(monkeypatch)
    seeds = [([1, 2], [0.1, 0.3]), ([1, 2], [0.2, 0.5])]
    learning_curves({f"m{place}": seeds for place in range(methods)}, tmp_path / "c.png", title="t")
    assert len(figures[-1].axes[0].collections) == bands
    assert ("band" in figures[-1].get_suptitle()) == bool(bands)


def test_few_methods_leave_the_picture_as_high_as_ever(drawn):
    assert drawn(3).get_size_inches().tolist() == [8.0, 4.6]


# One-shot: a run of a single round in which everybody takes part is a run like any other, and so are its reports.


ONE = {"rounds": 1, "cohort": CLIENTS, "training": dataclasses.replace(LOCAL, epochs=8)}


def test_the_reported_model_is_the_one_that_was_evaluated():
    """Also of a method that does not send it on, and of one whose first rounds only warm up."""
    for name, options in (
        ("feddf", {"feedback": False, "student": {"steps": 5}}),
        ("feddf", {"warm_up": 5, "student": {"steps": 5}}),
    ):
        result = run(build_method(name, options)[0].method, **ONE)
        data = federation()
        answer = network().apply(result.weights, data.test.x)[0].logits.argmax(1)
        assert float((answer == data.test.y).double().mean()) == pytest.approx(result.history.rows[0]["accuracy"])
    averaged = run(weighed(fedavg(), "uniform"), **ONE)
    assert same_bits(result.weights, averaged.weights)  # a warm-up of five rounds leaves one round of FedAvg


@pytest.mark.parametrize("every", [1, 7])
def test_the_round_is_evaluated_and_saved_however_seldom_others_are(tmp_path, every):
    result = run(fedavg(), run_dir=tmp_path, evaluate_every=every, checkpoint_every=every, **ONE)
    assert "accuracy" in result.history.rows[0]
    again = run(fedavg(), run_dir=tmp_path, evaluate_every=every, checkpoint_every=every, resume=True, **ONE)
    assert same_bits(again.weights, result.weights)
    assert len(again.history.rows) == 1


ONE_SHOT = {
    "name": "one-shot",
    "rounds": 1,
    "cohort": 4,
    "target": 0.5,
    "data": {"source": "digits", "unlabeled": 60},
    "partition": {"scheme": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"epochs": 2, "lr": 0.1},
    "method": {"name": "feddf", "student": {"steps": 5}},
}


def test_a_run_of_one_round_draws_all_its_pictures(tmp_path):
    run_experiment(Experiment.model_validate(ONE_SHOT), run_dir=tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png", "partition.png", "pseudo_labels.png"}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1]


def test_the_command_speaks_of_one_round(tmp_path):
    file = tmp_path / "one.toml"
    file.write_text(Experiment.model_validate(ONE_SHOT).to_toml())
    answer = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    assert "feddf: 1 round in" in answer.output
    assert not re.search(r"(?<![\d.])1 rounds(?!/s)", answer.output + answer.stderr)


class Kept:
    """Keeps the figure that a picture is drawn with."""

    def __init__(self, monkeypatch) -> None:
        import matplotlib.figure

        self.figures: list = []
        real = matplotlib.figure.Figure

        def remembered(*given, **named):
            self.figures.append(real(*given, **named))
            return self.figures[-1]

        monkeypatch.setattr(matplotlib.figure, "Figure", remembered)

    @property
    def axes(self):
        return self.figures[-1].axes[0]


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("methods", [1, 4, 20])
def test_one_round_is_drawn_as_a_bar_a_method(monkeypatch, tmp_path, seeds, methods):
    kept = Kept(monkeypatch)
    curves = {f"method{m}": [([1], [(1 + m + s) / 40]) for s in range(seeds)] for m in range(methods)}
    learning_curves(curves, tmp_path / "curves.png", title="a title", target=0.2)
    assert [bar.get_width() for bar in kept.axes.patches] == pytest.approx(
        [100 * sum((1 + m + s) / 40 for s in range(seeds)) / seeds for m in range(methods)]
    )
    assert [label.get_text() for label in kept.axes.get_yticklabels()] == list(curves)
    assert kept.axes.get_xlabel() == "test accuracy after round 1 (%); dotted: target 20"
    assert ("standard deviation" in kept.figures[-1].get_suptitle()) == (seeds > 1)
    left, right = kept.axes.get_xlim()
    assert left == 0
    assert right > 20
    kept.axes.set_xticks([tick for tick in kept.axes.get_xticks() if tick <= right])  # others are not drawn
    assert_no_label_is_clipped(kept.figures[-1], at_least=2 * methods + 2)


@pytest.mark.parametrize("rounds", [1, 2])
def test_long_names_and_titles_are_broken_into_lines_and_nothing_is_cut_off(monkeypatch, tmp_path, rounds):
    kept, numbers = Kept(monkeypatch), list(range(1, rounds + 1))
    long = 'fedaux(form="mean", epsilon=0.5, student.steps=2000)+simclr(epochs=100, temperature=0.1)'
    curves = {name: [(numbers, [0.7] * rounds)] * 2 for name in ("fedavg", long, "feddf")}
    title = "CIFAR-10: lda(alpha=0.1) over 100 clients; mixed(cnn, mlp, resnet8; reported: ensemble)"
    learning_curves(curves, tmp_path / "curves.png", title=title)
    figure, axes = kept.figures[-1], kept.axes
    texts = [figure._suptitle, *(axes.get_yticklabels() if rounds == 1 else axes.texts)]
    assert any(" ".join(long.split()) in " ".join(text.get_text().split()).replace("+ ", "+") for text in texts)
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    assert axes.get_window_extent().width > figure.bbox.width / 2


def test_bars_name_no_round_where_methods_were_evaluated_in_different_ones(monkeypatch, tmp_path):
    kept = Kept(monkeypatch)
    learning_curves({"a": [([1], [0.5])], "b": [([2], [0.6])]}, tmp_path / "curves.png", title="")
    assert kept.axes.get_xlabel() == "test accuracy (%)"


def test_more_rounds_are_lines_with_whole_rounds_below_them(monkeypatch, tmp_path):
    kept = Kept(monkeypatch)
    learning_curves({"a": [([1, 2, 3], [0.1, 0.2, 0.3])], "b": [([1], [0.2])]}, tmp_path / "curves.png", title="")
    assert not kept.axes.patches
    assert all(tick == int(tick) for tick in kept.axes.get_xticks())
    assert curves_module.band([([1], [0.2])])[1].tolist() == [0.2]


def test_torch_is_the_judge_of_one_shot_averaging():
    """The model of one round is the mean of what each client trained alone from the same start."""
    together = run(weighed(fedavg(), "uniform"), **ONE).weights
    alone = [
        run(fedavg(), rounds=1, cohort=1, training=ONE["training"], federation=only(k)).weights for k in range(CLIENTS)
    ]
    for name, leaf in together.params.items():
        mean = torch.stack([weights.params[name] for weights in alone]).mean(0)
        torch.testing.assert_close(leaf, mean, atol=1e-5, rtol=1e-5)


def only(client: int):
    """The same clients, of whom only one has data left; its id and rows stay."""
    data = federation()
    first, last = data.offsets[client : client + 2].tolist()
    offsets = torch.tensor([0] * (client + 1) + [last - first] * (CLIENTS - client))
    return dataclasses.replace(data, indices=data.indices[first:last], offsets=offsets)


def test_a_picture_of_one_run_has_no_band_and_several_seeds_have():
    rounds, mean, spread = band([([1, 2], [0.1, 0.3]), ([1, 2], [0.3, 0.3])])
    assert rounds.tolist() == [1, 2]
    assert mean.tolist() == pytest.approx([0.2, 0.3])
    assert spread.tolist() == pytest.approx([0.02**0.5, 0.0])
    assert band([([5], [0.5])])[2].tolist() == [0.0]


@pytest.mark.parametrize("rounds", [[1], [1, 2, 3]], ids=["bars", "lines"])
def test_a_reference_is_drawn_grey_at_its_height_and_has_its_name(monkeypatch, tmp_path, rounds):
    figures = saved_figures(monkeypatch)
    curves = {"fedavg": [(rounds, [0.5] * len(rounds))]}
    learning_curves(curves, tmp_path / "curves.png", title="t", references={"pooled": 0.8125})
    (axes,) = figures[-1].axes
    if len(rounds) == 1:
        assert [bar.get_width() for bar in axes.patches] == [50.0, 81.25]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["fedavg", "pooled"]
    else:
        (level,) = (line for line in axes.lines if list(line.get_ydata()) == [81.25, 81.25])
        assert level.get_color() == curves_module.GREY
        assert any("pooled" in text.get_text() for text in axes.texts)
