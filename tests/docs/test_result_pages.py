"""Pages of reproduced papers are made from the runs and are up to date; numbers in these tests are done by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from bench_cases import recipe_of, run_of, small
from doc_pages import ROOT

from fedstill.bench import Cell

RECIPE = """
from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment

def cells(mu, columns):
    rows = {"fedavg": "fedavg", "fedprox": f"fedprox(mu={mu})", "fedntd": "fedntd"}
    return tuple(
        Cell(row, f"lda-{alpha}", Experiment(rounds=2, partition={"scheme": "lda", "alpha": alpha}, method=method))
        for row, method in rows.items()
        for alpha in columns
    )

def tables(mu):
    return {
        "1": Table("1", "Two columns", cells(mu, (0.1, 0.5)), note="A note."),
        "figure-2": Table("figure-2", "One column", cells(mu, (0.1,))[:2]),
    }

RECIPE = Recipe(
    paper="toy",
    title="A toy paper",
    presets={"correct": "as it should be", "released": "as it was"},
    tables={"correct": tables(0.5), "released": tables(1.0)},
)
"""
METHODS = ("fedavg", "fedprox", "fedntd")
SECTIONS = [
    "What",
    "Data",
    "Hardware",
    "Command per table",
    "Results",
    "Deviations and choices",
    "What is not reproduced and why",
]
WHY = "Why ours differs"  # of papers whose claims our runs do not show
READMES = [file.parent / "README.md" for file in sorted((ROOT / "benchmarks").glob("*/recipe.py"))]
EXPECTED = """
["1"."lda-0.1"]
fedavg = { best = 41.00, speedup = 1.00 }
fedprox = { best = 44.50, speedup = 2.00 }
fedntd = { best = 47.25, speedup = 2.00 }
"""


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("make_result_pages", ROOT / "tools" / "make_result_pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def toy(tool, tmp_path, monkeypatch):
    """A repository with one paper of which nothing has been run."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks" / "toy"
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "expected.toml").write_text(EXPECTED)
    (folder / "README.md").write_text(f"# Toy\n\n{tool.BEGIN}\n{tool.END}\n\nThe end.\n")
    return tmp_path


def call(tool, monkeypatch, *words):
    """Exit code of the tool."""
    monkeypatch.setattr(sys, "argv", ["make_result_pages.py", *words])
    try:
        tool.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def run(tool, row, accuracy, *, seed=0, preset="correct", column="lda-0.1"):
    (paper,) = tool.papers()
    cells = paper.recipe.tables[preset]["1"].cells
    (cell,) = [cell for cell in cells if (cell.row, cell.column) == (row, column)]
    who = {"key": tool.cell_key(cell.experiment), "row": row, "column": column, "preset": preset, "method": row}
    how = {"seconds": 1800.0, "at_once": 1, "device": "cpu toy", "torch": "2", "fedstill": "0", "date": "2026-01-01"}
    return {**who, "seed": seed, "rounds": 2, "evaluated": 1, "accuracy": accuracy, **how}


def write_results(root, *runs):
    file = root / "docs" / "results" / "toy.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"paper": "toy", "runs": list(runs)}))


def three_methods(tool):
    """FedAvg with two seeds: best 40 and 44, last-ten means 35 and 41."""
    return [
        run(tool, "fedavg", [30.0, 40.0]),
        run(tool, "fedavg", [38.0, 44.0], seed=1),
        run(tool, "fedprox", [42.0, 43.0]),
        run(tool, "fedntd", [45.0, 48.0]),
    ]


def pictures(root):
    return sorted(path.name for path in (root / "docs" / "results").glob("*/*.png"))


@pytest.mark.slow
def test_generated_parts_are_up_to_date(tool, monkeypatch, capsys):
    assert call(tool, monkeypatch, "--check") == 0, f"{capsys.readouterr().out} run: make pages"


@pytest.mark.slow
def test_the_readme_s_table_of_claims_is_the_generated_one(tool):
    readme, read = (ROOT / "README.md").read_text(encoding="utf-8"), tool.papers()
    assert f"\n{tool.claims_tables(read, '', only_run=True)}\n" in readme, "run: make pages"
    assert all(paper.claims for paper in read), "each paper states its main claims in expected.toml"


def test_a_claim_s_row_follows_the_runs(tool, toy, monkeypatch):
    claim = 'table = "1"\ncolumn = "lda-0.1"\nsetting = "Toy"\norder = ["fedntd > fedavg"]\nmeasure = "best"\n'
    (toy / "benchmarks" / "toy" / "expected.toml").write_text(f"{EXPECTED}\n[[claim]]\n{claim}")
    front = toy / "README.md"
    front.write_text(f"# Front\n\n{tool.BEGIN}\n{tool.END}\n")
    call(tool, monkeypatch)
    assert "fedntd" not in front.read_text(), "the front page has only claims with a run"
    row = "Toy; best round | fedntd 47.25 > fedavg 41.00 | not run | *not shown* |"
    assert f"| [toy](../../benchmarks/toy/README.md) | {row}" in (toy / "docs" / "results" / "README.md").read_text()
    ahead = [(40.0, 50.0), (41.0, 52.0), (42.0, 54.0)]  # by 10, 11 and 12: 11 -+ 4.3027 / sqrt(3)
    write_results(
        toy,
        *(run(tool, "fedavg", [1.0, low], seed=seed) for seed, (low, _) in enumerate(ahead)),
        *(run(tool, "fedntd", [1.0, high], seed=seed) for seed, (_, high) in enumerate(ahead)),
    )
    call(tool, monkeypatch)
    ours = "fedntd 52.00 ± 2.00, fedavg 41.00 ± 1.00. Ahead by +11.00 [+8.52, +13.48] (3 seeds)"
    assert f"| fedntd 47.25 > fedavg 41.00 | {ours} | *holds* |" in front.read_text()


def test_a_claim_about_a_form_of_ours_stands_in_a_table_of_its_own_and_shows_its_column(tool, toy, monkeypatch):
    order = 'order = ["fedntd > fedntd before distillation"]'
    claim = f'table = "1"\ncolumn = "lda-0.5"\nsetting = "Toy"\n{order}\nmeasure = "last"\nof = "fedstill"\n'
    (toy / "benchmarks" / "toy" / "expected.toml").write_text(f"{EXPECTED}\n[[claim]]\n{claim}")
    mine = run(tool, "fedntd", [50.0, 60.0], column="lda-0.5")
    write_results(toy, *three_methods(tool), {**mine, "beside": {"accuracy_aggregated": [40.0, 44.0]}})
    call(tool, monkeypatch)
    theirs, ours = (toy / "docs" / "results" / "README.md").read_text().split(tool.OURS)
    assert "Toy" not in theirs
    assert "fedntd 55.00, fedntd before distillation 42.00. Ahead by +13.00 (one seed)" in ours
    assert "lda-0.5" in (toy / "docs" / "results" / "toy.md").read_text()


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_every_paper_has_the_same_sections(readme):
    lines = readme.read_text(encoding="utf-8").splitlines()
    sections = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert [section for section in sections if section != WHY] == SECTIONS
    if WHY in sections:
        assert sections[sections.index(WHY) - 1] == "Results"


def test_a_paper_without_runs_says_so(tool, toy, monkeypatch):
    assert call(tool, monkeypatch, "--check") != 0
    assert call(tool, monkeypatch) == 0
    readme = (toy / "benchmarks" / "toy" / "README.md").read_text()
    assert "Nothing has been run yet." in readme
    assert readme.startswith("# Toy\n")
    assert readme.endswith("The end.\n")
    assert "| A toy paper |" in (toy / "docs" / "results" / "README.md").read_text()
    assert not (toy / "docs" / "results" / "toy.md").exists()
    assert call(tool, monkeypatch, "--check") == 0


def test_no_paper_at_all_is_an_empty_index(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert call(tool, monkeypatch) == 0
    assert "# Results" in (tmp_path / "docs" / "results" / "README.md").read_text()
    assert call(tool, monkeypatch, "--check") == 0


def test_ours_stand_beside_the_paper_s(tool, toy, monkeypatch):
    write_results(toy, *three_methods(tool))
    call(tool, monkeypatch)
    page = (toy / "docs" / "results" / "toy.md").read_text()
    assert "4 runs, 2.0 hours" in page
    line = next(line for line in page.splitlines() if line.startswith("| fedavg"))
    assert "42.00 ± 2.83" in line  # best: (40 + 44) / 2, deviation sqrt(8)
    assert "38.00 ± 4.24" in line  # last ten: (35 + 41) / 2, deviation sqrt(18)
    assert "41.00" in line
    readme = (toy / "benchmarks" / "toy" / "README.md").read_text()
    assert "| fedavg | 42.00 / 38.00 / 41.00 |" in readme
    assert "| fedntd | 48.00 / 46.50 / 47.25 |" in readme


def test_columns_and_presets_in_which_nothing_was_run_are_left_out(tool, toy, monkeypatch):
    write_results(toy, *three_methods(tool))
    call(tool, monkeypatch)
    page = (toy / "docs" / "results" / "toy.md").read_text()
    assert "lda-0.5" not in page
    assert "## Preset `released`" not in page
    assert "side by side" not in page


def test_a_column_of_one_method_without_its_fedavg_is_left_out(tool, toy, monkeypatch):
    write_results(toy, *three_methods(tool), run(tool, "fedntd", [50.0, 60.0], column="lda-0.5"))
    call(tool, monkeypatch)
    assert "lda-0.5" not in (toy / "docs" / "results" / "toy.md").read_text()


def test_a_table_of_which_only_other_tables_runs_are_there_is_left_out(tool, toy, monkeypatch):
    """As FedLMD's Table 4: its column for the CNN is the default column of Table 3 by another name."""
    recipe = toy / "benchmarks" / "toy" / "recipe.py"
    again = RECIPE.replace(
        "cells(mu, (0.1,))[:2]", 'tuple(Cell(c.row, "cnn", c.experiment) for c in cells(mu, (0.1,)))'
    )
    recipe.write_text(again)
    write_results(toy, *three_methods(tool))
    call(tool, monkeypatch)
    assert "Figure 2" not in (toy / "docs" / "results" / "toy.md").read_text()
    recipe.write_text(RECIPE)
    call(tool, monkeypatch)
    assert "Figure 2" in (toy / "docs" / "results" / "toy.md").read_text()


def test_a_method_that_the_paper_prints_and_nobody_ran_is_shown_as_missing(tool, toy, monkeypatch):
    write_results(toy, run(tool, "fedavg", [30.0, 40.0]))
    call(tool, monkeypatch)
    assert "| fedntd | – / – / 47.25 |" in (toy / "benchmarks" / "toy" / "README.md").read_text()


def test_a_cell_that_two_presets_run_differently_is_shown_side_by_side(tool, toy, monkeypatch):
    write_results(toy, *three_methods(tool), run(tool, "fedprox", [10.0, 20.0], preset="released"))
    call(tool, monkeypatch)
    page = (toy / "docs" / "results" / "toy.md").read_text()
    released = page.partition("## Preset `released`")[2]
    assert "### Table 1" in released
    assert "### Figure 2" not in released  # all of it stands in Table 1
    assert "| 1 | lda-0.1 | fedprox | 43.00 / 42.50 | 20.00 / 15.00 | 44.50 |" in page
    assert "| 1 | lda-0.1 | fedavg |" not in page  # the same run in both


def test_a_picture_is_drawn_once_and_again_when_its_data_change(tool, toy, monkeypatch):
    drawn = []
    real = tool.learning_curves
    monkeypatch.setattr(tool, "learning_curves", lambda *given, **named: (drawn.append(1), real(*given, **named))[1])
    runs = three_methods(tool)
    write_results(toy, *runs)
    call(tool, monkeypatch)
    assert pictures(toy) == ["correct-table-1-lda-0.1.png"]
    assert all(path.stat().st_size < 200_000 for path in toy.rglob("*.png"))
    assert "(toy/correct-table-1-lda-0.1.png)" in (toy / "docs" / "results" / "toy.md").read_text()
    call(tool, monkeypatch)
    assert len(drawn) == 1
    write_results(toy, *runs[1:], run(tool, "fedavg", [30.0, 39.0]))
    assert call(tool, monkeypatch, "--check") != 0
    call(tool, monkeypatch)
    assert len(drawn) == 2
    assert call(tool, monkeypatch, "--check") == 0


def test_pictures_that_no_page_shows_are_removed(tool, toy, monkeypatch):
    runs = three_methods(tool)
    write_results(toy, *runs)
    call(tool, monkeypatch)
    write_results(toy, *runs[:2])
    call(tool, monkeypatch)
    assert pictures(toy) == []
    assert call(tool, monkeypatch, "--check") == 0


def test_a_missing_picture_and_an_edited_page_are_noticed(tool, toy, monkeypatch, capsys):
    write_results(toy, *three_methods(tool))
    call(tool, monkeypatch)
    (toy / "docs" / "results" / "toy" / "correct-table-1-lda-0.1.png").unlink()
    page = toy / "docs" / "results" / "toy.md"
    page.write_text(page.read_text().replace("42.00", "52.00"))
    capsys.readouterr()
    assert call(tool, monkeypatch, "--check") != 0
    told = capsys.readouterr().out
    assert "toy.md" in told
    assert "correct-table-1-lda-0.1.png" in told


def test_a_swapped_picture_is_noticed_and_drawn_again(tool, toy, monkeypatch, capsys):
    write_results(toy, *three_methods(tool), *(run(tool, row, [1.0, 2.0], column="lda-0.5") for row in METHODS))
    call(tool, monkeypatch)
    one, other = (toy / "docs" / "results" / "toy" / f"correct-table-1-lda-{alpha}.png" for alpha in (0.1, 0.5))
    before = one.read_bytes()
    one.write_bytes(other.read_bytes())
    capsys.readouterr()
    assert call(tool, monkeypatch, "--check") != 0
    told = capsys.readouterr().out
    assert one.name in told
    assert other.name not in told
    call(tool, monkeypatch)
    assert one.read_bytes() == before
    one.write_bytes(b"no picture")
    assert call(tool, monkeypatch, "--check") != 0


def test_a_run_that_no_cell_of_the_recipe_knows_is_named_and_fails(tool, toy, monkeypatch, capsys):
    lost = {**run(tool, "fedntd", [50.0, 60.0], seed=3), "key": "0123456789"}
    write_results(toy, *three_methods(tool), lost)
    for words in ([], ["--check"]):
        assert call(tool, monkeypatch, *words) == tool.STRAY
        told = capsys.readouterr().out
        assert "toy.json: fedntd lda-0.1 seed 3 (key 0123456789)" in told
        assert "fedprox" not in told
    write_results(toy, *three_methods(tool))
    call(tool, monkeypatch)
    assert call(tool, monkeypatch, "--check") == 0


def test_a_readme_without_markers_is_an_error_that_shows_them(tool, toy, monkeypatch):
    (toy / "benchmarks" / "toy" / "README.md").write_text("# Toy\n")
    assert tool.BEGIN in call(tool, monkeypatch)


def test_curves_are_means_of_the_ten_rounds_before(tool):
    rounds, values = tool.trailing_mean({"rounds": 12, "evaluated": 1, "accuracy": [10.0] * 2 + [20.0] * 10})
    assert rounds == list(range(1, 13))
    assert values == pytest.approx(
        [0.1, 0.1, 0.4 / 3, 0.15, 0.16, 1 / 6, 1.2 / 7, 0.175, 1.6 / 9, 0.18, 0.19, 0.2], abs=1e-5
    )


def test_a_page_shows_runs_of_the_cell_s_engine_and_names_those_that_it_does_not_show(tool, monkeypatch):
    cells = [Cell(method, "digits", small(rounds=1, method=method)) for method in METHODS]
    runs = [run_of(cell.experiment, [10.0]) for cell in cells]
    other = {**runs[0], "accuracy": [90.0], "engine": {"precision": "bf16"}}
    paper = tool.Paper(Path("tiny"), recipe_of(*cells), {}, [other, *runs])
    ((_, picture),) = tool.pictures(paper, "paper")
    assert picture.curves["fedavg"] == [([1], [0.1])], "one line a seed"
    monkeypatch.setattr(tool, "papers", lambda: [paper])
    (stray,) = tool.strays()
    assert stray.endswith("of another engine than the one shown)")
