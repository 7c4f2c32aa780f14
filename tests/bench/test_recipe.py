"""A paper's folder: its recipe, its numbers, the cells that are chosen and where their data lie."""

import pytest
from bench_cases import RECIPE, recipe_of, small, write_paper

from fedstill.bench import Cell
from fedstill.bench.recipe import choose, find_paper, load_expected, load_recipe, select, with_data, with_settings
from fedstill.core.errors import FedstillError

DIGITS = 'DIGITS, note="On digits."'


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("RECIPE = 3", "RECIPE = Recipe"),
        ("x = 1\nraise ValueError('no')", "line 2: ValueError: no"),
        ("raise SystemExit('not here')", "line 1: SystemExit: not here"),
        (RECIPE.replace('"rounds": 3', '"roudns": 3'), "'rounds'"),
        (RECIPE.replace('"1": Table("1"', '"1": Table("9"'), "stands under '1'"),
        (RECIPE.replace("DIGITS, note", "DIGITS + DIGITS, note"), "fedavg twice"),
        (RECIPE.replace('"released": {"2"', '"relased": {"2"'), "same names"),
        (RECIPE.replace('{"2": TABLES["2"]}', "{}"), "preset 'released' has no table"),
        (RECIPE.replace(DIGITS, "()"), "table '1' has no cell"),
        (RECIPE.replace(DIGITS, '(Cell("r", "c", "fedavg"),)'), "Cell.experiment = 'fedavg': .*Experiment"),
        (RECIPE.replace(DIGITS, '("fedavg",)'), "Table.cells.0 = 'fedavg': .*Cell"),
        (RECIPE.replace(DIGITS, "DIGITS[0]"), "Table.cells = Cell.*: .*tuple"),
        (RECIPE.replace('cell(row, "digits")', "cell(row, 3)"), "Cell.column = 3: .*string"),
        (RECIPE.replace('{"paper": "as printed", "released": "as in its code"}', '["paper"]'), "Recipe.presets = .*"),
        (RECIPE.replace('{"2": TABLES["2"]}', '{"2": DIGITS}'), r"Recipe.tables.released.2 = .*Table"),
        (RECIPE.replace('"A tiny paper"', "3"), "Recipe.title = 3: .*string"),
    ],
    ids=lambda text: text[:30] if len(text) < 60 else "",
)
def test_a_mistake_in_a_recipe_is_one_line_with_its_place(tmp_path, recipe, reason):
    with pytest.raises(FedstillError, match=reason) as caught:
        load_recipe(write_paper(tmp_path, recipe=recipe))
    assert "recipe.py" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('["1"."digits"]\nfedavg = 33.02', r"1.digits.fedavg = 33.02: .*write .*fedavg = \{ best = 33.02 \}"),
        ('["1"."digits"]\nfedavg = { bset = 50.45 }', "'bset': did you mean 'best'"),
        ('["1"."digits"]\nfedavg = { best = true }', "fedavg.best.* = True"),
        ('["1"."digits"]\nfedvag = { best = 50.45 }', "no row 'fedvag': did you mean 'fedavg'"),
        ('["1"."digit"]\nfedavg = { best = 50.45 }', "no column 'digit': did you mean 'digits'"),
        ('["3"."digits"]\nfedavg = { best = 50.45 }', "no table '3'"),
    ],
)
def test_a_number_of_the_paper_that_belongs_nowhere_is_named(tmp_path, text, reason):
    folder = write_paper(tmp_path)
    recipe = load_recipe(folder)
    assert load_expected(folder, recipe)["1"]["digits"]["fedprox"] == {"best": 41.5, "speedup": "failed"}
    (folder / "expected.toml").write_text(text)
    with pytest.raises(FedstillError, match=reason):
        load_expected(folder, recipe)
    (folder / "expected.toml").unlink()
    assert load_expected(folder, recipe) == {}


def test_a_paper_is_found_by_its_name_or_path(tmp_path, monkeypatch):
    folder = write_paper(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_paper("tiny").resolve() == find_paper(str(folder)).resolve() == folder
    with pytest.raises(FedstillError, match="no benchmark 'tny': did you mean 'tiny'"):
        find_paper("tny")
    with pytest.raises(FedstillError, match=r"'\.' has no recipe.py"):
        find_paper(".")


def test_names_are_chosen_from_those_of_the_table_in_its_order():
    assert choose("--methods", None, ["a", "b"]) == ("a", "b")
    assert choose("--methods", "c, a", ["a", "b", "c"]) == ("a", "c")
    with pytest.raises(FedstillError, match="--methods: the table has no 'fedporx': did you mean 'fedprox'"):
        choose("--methods", "fedavg,fedporx", ["fedavg", "fedprox"])
    with pytest.raises(FedstillError, match=r"--methods is empty.*fedavg,fedprox"):
        choose("--methods", "", ["fedavg", "fedprox"])


CELLS = Cell("fedavg", "digits", small()), Cell("fedprox", "letters", small(method="fedprox"))
TABLE = recipe_of(*CELLS).tables["paper"]["1"]


def test_a_row_that_does_not_stand_in_a_column_is_left_out_there():
    assert select(TABLE, ["digits"], ["fedavg", "fedprox"]) == [CELLS[0]]
    with pytest.raises(FedstillError, match="table 1 has no fedprox in digits"):
        select(TABLE, ["digits"], ["fedprox"])


def test_a_setting_changes_every_cell_that_it_fits_and_must_fit_the_chosen_ones():
    changed = with_settings(TABLE, ["rounds=2"], TABLE.cells)
    assert [cell.experiment.rounds for cell in changed.cells] == [2, 2]
    (cell,) = with_settings(TABLE, ["method.mu=0.5"], [CELLS[1]]).cells
    assert cell.experiment.method.options["mu"] == 0.5
    with pytest.raises(FedstillError, match=r"fedavg in digits: .*method\.mu"):
        with_settings(TABLE, ["method.mu=0.5"], TABLE.cells)
    with pytest.raises(FedstillError, match="--seeds"):
        with_settings(TABLE, ["seed=3"], TABLE.cells)


@pytest.fixture
def shelf(tmp_path):
    for name in ("svhn", "cifar10"):
        (tmp_path / name).mkdir()
    return tmp_path


def placed(shelf, **data):
    return with_data(small(data=data), shelf).data


def test_a_hub_id_is_its_folder_with_or_without_a_configuration(shelf):
    assert placed(shelf, source="uoft-cs/cifar10").source == str(shelf / "cifar10")
    assert placed(shelf, source="ufldl-stanford/svhn:cropped_digits").source == str(shelf / "svhn")
    assert placed(shelf, source="digits").source == "digits", "an embedded set is no folder"


def test_the_test_set_of_another_domain_is_taken_from_the_folder_too(shelf):
    found = placed(shelf, source="uoft-cs/cifar10", test="ufldl-stanford/svhn:cropped_digits", unlabeled="test")
    assert (found.test, found.unlabeled) == (str(shelf / "svhn"), "test")
    with pytest.raises(FedstillError, match=r"no 'MNIST-M' in .*: put it there"):
        placed(shelf, source="uoft-cs/cifar10", test="Mike0307/MNIST-M")


def test_what_the_clients_leave_is_no_folder(shelf):
    assert placed(shelf, source="uoft-cs/cifar10", client_rows=20_000, unlabeled="central").unlabeled == "central"
