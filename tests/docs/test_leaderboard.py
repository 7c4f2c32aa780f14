"""The leaderboard: its records are complete, its pages show them, and the answer to its question is counted right."""

import importlib.util
import statistics
import sys
from math import comb

import pytest
from doc_pages import ROOT

from fedstill.core.types import Need
from fedstill.experiment.candidates import PROVEN
from fedstill.methods import METHODS

PAPERS = ("fedlmd", "fedftg", "fedaux", "mrtf", "d2cfl")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "make_leaderboard_pages", ROOT / "tools" / "make_leaderboard_pages.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there for their names
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def board(tool):
    return tool.load_board()


@pytest.fixture(scope="module")
def accuracy(board):
    return {
        (run["federation"], run["method"], run["seed"]): run["last_rounds"]
        for run in board.records
        if "last_rounds" in run
    }


def mean(accuracy, board, federation, method):
    return statistics.fmean(accuracy[federation, method, seed] for seed in board.script["SEEDS"])


def test_every_method_and_composition_was_run_with_the_settings_of_today(board):
    script = board.script
    missing = list(script["missing"](board.records, [*METHODS, *script["COMPOSITIONS"]], script["SEEDS"]))
    assert missing == [], "run: python benchmarks/leaderboard/run.py, then make pages"


def test_a_tournament_begins_with_the_leaderboard_s_compositions_in_their_order(board):
    assert [entry.text for entry in board.entries if entry.text in PROVEN] == list(PROVEN)


def test_the_pages_are_up_to_date(tool, board):
    for path, text in tool.pages(board).items():
        assert path.read_text(encoding="utf-8") == text, "run: make pages"
    assert {part for path in tool.pages(board) for _, part, _ in tool.PART.findall(path.read_text())} == set(tool.PARTS)


def test_an_edited_figure_is_noticed_and_an_unknown_part_is_refused(tool, board, tmp_path, monkeypatch):
    page = tmp_path / "docs" / "choosing-a-method.md"
    page.parent.mkdir()
    (tmp_path / "README.md").write_text("# Front\n")
    page.write_text(f"{tool.BEGIN.format('the runs')}\n\n99 methods\n\n{tool.END}\nby hand\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    text = tool.pages(board)[page]
    assert "99 methods" not in text
    assert text.endswith("by hand\n")
    page.write_text(f"{tool.BEGIN.format('the winner')}\n{tool.END}\n")
    with pytest.raises(SystemExit, match="no part 'the winner'"):
        tool.pages(board)


def test_the_board_shows_the_means_of_the_records(board, accuracy):
    text = (ROOT / "docs" / "choosing-a-method.md").read_text(encoding="utf-8").partition("## The whole board")[2]
    for method in ("fedavg", "feddyn", *PAPERS):
        (row,) = [
            line.split(" | ") for line in text.splitlines() if line.startswith(f"| [{method}](methods/{method}.md) |")
        ]
        for shown, federation in zip(row[2:8], board.script["BOARD"], strict=True):
            assert float(shown.strip("*")) == pytest.approx(mean(accuracy, board, federation, method), abs=0.0501)


def test_the_compositions_are_the_ten_best_of_the_trials(board):
    """Ranked here by counting how many candidates are better, without the tool."""
    script = board.script
    known = {(run["federation"], run["method"], run["seed"]): run["last_rounds"] for run in board.trials}
    assert not set(script["TRIAL_SEEDS"]) & set(script["SEEDS"])
    places = [(name, seed) for name in script["BOARD"] for seed in script["TRIAL_SEEDS"]]
    texts = {text for _, text, _ in known if "+" in text and all((name, text, seed) in known for name, seed in places)}
    rank = dict.fromkeys(texts, 0.0)
    for name in script["BOARD"]:
        means = {text: statistics.fmean(known[name, text, seed] for seed in script["TRIAL_SEEDS"]) for text in texts}
        for text in texts:
            rank[text] += sum(other > means[text] for other in means.values())
            rank[text] += (sum(other == means[text] for other in means.values()) - 1) / 2
    assert set(sorted(texts, key=rank.get)[:10]) == set(script["COMPOSITIONS"])


def test_the_compositions_that_are_ahead_are_counted_right(tool, board, accuracy):
    def wins(text, paper):
        return sum(
            mean(accuracy, board, name, text) > mean(accuracy, board, name, paper) for name in board.script["BOARD"]
        )

    ahead = {text for text in board.script["COMPOSITIONS"] if all(wins(text, paper) >= 4 for paper in PAPERS)}
    assert set(tool.answer_of(board).ahead) == ahead
    assert tuple(tool.PAPERS) == PAPERS


def toy_board(tool, *, gap):
    """A board on which "scaffold+d2cfl" is `gap` above the papers' methods with each seed, and sends twice as much."""

    def run(federation, method, seed, level, share):
        level += 0.1 * seed
        curve = [level - 50, level - 40, level - 30, level]
        last = {"last": level, "last_rounds": level, "accuracy": curve}
        costs = {"bytes": 100 * share, "seconds": 1.0}
        return {"federation": federation, "method": method, "seed": seed, **last, **costs}

    names = [f"{data}_{skew}" for data in tool.DATA for skew in tool.SKEWS]
    script = {
        "FEDERATIONS": dict.fromkeys(names, "toy, Dirichlet 1"),
        "BOARD": names,
        "SEEDS": (0, 1, 2, 3, 4),
        "COMPOSITIONS": ("scaffold+d2cfl",),
        "LAST": 1,
    }
    levels = {"fedavg": 50.0, **dict.fromkeys(PAPERS, 60.0)}
    records = [run(name, text, seed, level, 1) for name in names for text, level in levels.items() for seed in range(5)]
    gaps = [gap(name, seed) for name in names for seed in range(5)]
    pairs = [(name, seed) for name in names for seed in range(5)]
    records += [
        run(name, "scaffold+d2cfl", seed, 60.0 + more, 2) for (name, seed), more in zip(pairs, gaps, strict=True)
    ]
    return tool.Board(script, records, [])


def test_pairs_and_federations_are_counted_and_the_sign_test_is_the_textbook_s(tool):
    """Ahead on five of six: 25 pairs won, four lost, one equal. Holm multiplies five equal tests by five."""
    board = toy_board(tool, gap=lambda name, seed: -1.0 * (seed > 0) if name == "fashion_mild" else 1.0 + seed / 10)
    versus = board.versus["scaffold+d2cfl", "mrtf"]
    assert (versus.ahead, versus.shown, versus.wins, versus.losses) == (5, 5, 25, 4)
    tail = sum(comb(29, lost) for lost in range(5)) / 2**29
    assert versus.p_signs == pytest.approx(5 * 2 * tail)
    answer = tool.answer_of(board)
    assert answer.ahead == answer.signs == answer.shown == ["scaffold+d2cfl"]


def test_twice_the_bytes_are_paid_for_at_equal_bytes(tool):
    board = toy_board(tool, gap=lambda name, seed: 1.0)
    entry = board.entry("scaffold+d2cfl")
    assert entry.bytes == 2.0
    assert entry.at_equal_bytes["digits_mild"][0] == pytest.approx(61.0 - 40.0), "the second of four rounds"
    assert tool.answer_of(board).ahead == ["scaffold+d2cfl"]
    assert tool.answer_of(board).at_equal_bytes == []


def test_three_federations_of_six_are_not_enough(tool):
    board = toy_board(tool, gap=lambda name, seed: 1.0 if name.startswith("digits") else -1.0)
    assert board.versus["scaffold+d2cfl", "fedaux"].ahead == 3
    assert tool.answer_of(board).ahead == []


def test_a_situation_names_only_methods_that_fit_it(tool, board):
    rows = tool.situations(board)[2:-1]
    for row, (forbidden, most) in zip(rows, tool.SITUATIONS.values(), strict=True):
        for cell in row.split(" | ")[1:]:
            entry = board.entry(cell.split("`")[1])
            assert not entry.needs & forbidden
            assert entry.bytes <= most * 1.05
    assert Need.UNLABELED in next(iter(tool.SITUATIONS.values()))[0]
