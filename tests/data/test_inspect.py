"""A look at data before the first run finds everything at once."""

from pathlib import Path

import numpy as np
import pytest
from data_files import HUB_FEATURES, fails, pictures, png, write, write_parquet
from PIL import Image

from fedstill.data.inspect import inspect_data


@pytest.fixture
def table(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines = ["row,patient_id,clinic,age,score,code,ward,mistyped,notes,outcome"]
    for row in range(120):
        ill = row % 3 == 0
        age = "" if row % 40 == 0 else random.integers(20, 90)
        mistyped = "5,2" if row == 7 else f"{random.normal():.3f}"
        notes = f"came in on day {row} and left after {random.integers(9)} days"
        score = random.normal() + (100 if ill else 0)
        lines.append(
            f'{row},p{row},{"abc"[row % 7 % 3]},{age},{score:.4f},{"xyz"[row % 3]},w,"{mistyped}",{notes},{ill}'
        )
    return write(tmp_path / "table.csv", "\n".join(lines))


def test_every_column_has_its_use_and_the_reason_why_it_is_left_out(table: Path) -> None:
    findings = inspect_data(str(table), label="outcome")
    uses = {column.name: (column.use, column.reason) for column in findings.columns}
    assert findings.classes == {"False": 80, "True": 40}
    assert findings.owner == "clinic"
    assert sum(findings.owners.values()) == 120
    assert uses["age"] == ("input", "")
    assert findings.gaps == 3
    for name, reason in {
        "row": "an id",
        "patient_id": "an id",
        "score": "leak suspect",  # thresholds tell the label
        "code": "leak suspect",  # each word tells the label
        "ward": "the same in every row",
        "mistyped": "column 'mistyped'",
        "notes": "text",
    }.items():
        assert uses[name][0] == "left out"
        assert uses[name][1].startswith(reason)
    printed = "\n".join(findings.lines())
    assert all(name in printed for name in uses)
    assert "holds '5,2' in row 8" in printed


def test_a_missing_label_is_asked_for_with_the_columns_that_may_be_it(table: Path) -> None:
    text = fails(inspect_data, str(table))
    assert "--label COLUMN" in text
    assert "outcome (2 values)" in text
    assert "patient_id" not in text
    assert "did you mean 'outcome'" in fails(inspect_data, str(table), label="outcomes")
    assert "did you mean 'clinic'" in fails(inspect_data, str(table), label="outcome", owner="clinics")


def test_dates_and_numbers_that_may_be_ids_are_named(tmp_path: Path) -> None:
    days = [f"{1 + row % 28:02d}.{1 + row % 12:02d}.202{row % 5}" for row in range(60)]
    lines = [f"{7919 * row % 1000},{day},{row % 2}" for row, day in enumerate(days)]
    findings = inspect_data(str(write(tmp_path / "t.csv", "\n".join(["case,day,label", *lines]))))
    uses = {column.name: (column.use, column.reason[:5]) for column in findings.columns}
    assert uses == {"case": ("input", ""), "day": ("left out", "dates"), "label": ("label", "")}
    assert any(note.startswith("column 'case' holds another whole number in every row") for note in findings.notes)


def test_rows_without_a_label_and_repeated_rows_are_counted(tmp_path: Path) -> None:
    rows = ["1,2,a", "1,2,a", "3,4,b", "5,6,", "7,8,b"]
    findings = inspect_data(str(write(tmp_path / "t.csv", "\n".join(["u,v,label", *rows]))))
    assert findings.classes == {"a": 2, "b": 2}
    notes = " ".join(findings.notes)
    assert "1 rows have no label" in notes
    assert "1 rows repeat another row" in notes


def test_a_few_texts_differ_in_every_row_and_are_no_ids(tmp_path: Path) -> None:
    lines = [f"the {side} won match {row} of the cup,{row % 2}" for row, side in enumerate(["team", "club"] * 4)]
    findings = inspect_data(str(write(tmp_path / "t.csv", "\n".join(["text,label", *lines]))))
    assert findings.kind == "texts"
    codes = [f"P 7{row},{row % 2}" for row in range(8)]
    assert "an id, differs in every row" in fails(
        inspect_data, str(write(tmp_path / "codes.csv", "\n".join(["text,label", *codes])))
    )


def test_sizes_of_images_and_broken_files_are_found(tmp_path: Path) -> None:
    for number, side in enumerate((8, 8, 20)):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (side, side + 2)).save(tmp_path / "pets" / name / f"{number}.png")
    (tmp_path / "pets" / "dog" / "broken.png").write_bytes(b"no image")
    findings = inspect_data(str(tmp_path / "pets"))
    assert findings.kind == "images"
    assert findings.sizes == {(10, 8): 4, (22, 20): 2}
    assert findings.broken == ("dog/broken.png",)


def files_by_folder(root: Path, *layout: str, suffix: str = ".png") -> Path:
    """Write a file into each folder, an image or a text."""
    for folder in layout:
        (root / folder).mkdir(parents=True, exist_ok=True)
        file = root / folder / f"{len(list((root / folder).iterdir()))}{suffix}"
        Image.new("L", (4, 4)).save(file) if suffix == ".png" else write(file, f"words of {folder}")
    return root


@pytest.mark.parametrize("suffix", [".png", ".txt"])
def test_a_level_of_folders_may_hold_the_owners(tmp_path: Path, suffix: str) -> None:
    layout = ("north/ill", "north/ill", "north/well", "south/ill", "south/well")
    by_owner = inspect_data(str(files_by_folder(tmp_path / "a", *layout, suffix=suffix)), owner="folder1")
    turned = ["/".join(reversed(folder.split("/"))) for folder in layout]
    by_class = inspect_data(str(files_by_folder(tmp_path / "b", *turned, suffix=suffix)), owner="folder2")
    assert (by_owner.label, by_class.label) == ("folder2", "label")
    for findings in (by_owner, by_class):
        assert findings.owners == {"north": 3, "south": 2}
        assert findings.classes == {"ill": 3, "well": 2}
        assert "2 owners of 2 to 3" in "\n".join(findings.lines())


def test_folders_of_two_levels_without_an_owner_are_pointed_out(tmp_path: Path) -> None:
    findings = inspect_data(str(files_by_folder(tmp_path / "a", "cat/big", "dog/small")))
    assert findings.classes == {"cat": 1, "dog": 1}
    assert "folder1 (cat, dog), folder2 (big, small); the classes are folder1" in " ".join(findings.notes)


def test_the_level_of_owners_cannot_be_the_level_of_classes(tmp_path: Path) -> None:
    one = str(files_by_folder(tmp_path / "one", "cat", "dog"))
    two = str(files_by_folder(tmp_path / "two", "n/cat", "s/dog"))
    three = str(files_by_folder(tmp_path / "three", "n/2020/cat", "s/2021/dog"))
    assert "arrange the files as owner/class/file" in fails(inspect_data, one, owner="folder1")
    assert "did you mean 'folder2'" in fails(inspect_data, two, owner="folder3")
    assert "no column 'folder1' beside the label" in fails(inspect_data, two, owner="folder1", label="label")
    assert "holds the classes, folder2 or folder3? Give it with --label" in fails(inspect_data, three, owner="folder1")
    assert inspect_data(three, owner="folder1", label="folder3").classes == {"cat": 1, "dog": 1}


def test_a_table_of_images_may_name_the_owners(tmp_path: Path) -> None:
    sites, scanners = ["north", "south"] * 14 + ["north", None], ["x", "y", "z"] * 10
    columns = {"img": [png(p) for p in pictures(30)], "label": [0, 1, 2] * 10, "site": sites, "scanner": scanners}
    write_parquet(tmp_path / "train.parquet", columns, HUB_FEATURES)
    findings = inspect_data(str(tmp_path / "train.parquet"))
    assert (findings.owner, findings.owners) == ("site", {"north": 15, "south": 14})
    assert findings.incomplete == 1
    assert inspect_data(str(tmp_path / "train.parquet"), owner="scanner").owners == {"x": 10, "y": 10, "z": 10}


def test_tables_of_several_parties_in_a_folder_may_be_owned_by_file(tmp_path: Path) -> None:
    (tmp_path / "clinics").mkdir()
    for name, rows in {"north": 6, "south": 9}.items():
        lines = [f"{row},{'ill' if row % 3 else 'well'}" for row in range(rows)]
        write(tmp_path / "clinics" / f"{name}.csv", "\n".join(["age,state", *lines]))
    place = str(tmp_path / "clinics")
    assert "2 files are joined into one table: north.csv, south.csv. If each" in " ".join(
        inspect_data(place, label="state").notes
    )
    owned = inspect_data(place, label="state", owner="file")
    assert owned.owners == {"north": 6, "south": 9}
    assert "--owner" not in " ".join(owned.notes)


def test_a_unit_and_a_spelling_of_one_party_are_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "clinics").mkdir()
    for name, factor, sexes in (("north", 18.0, "mf"), ("south", 1.0, "MF"), ("west", 18.0, "mf")):
        lines = [
            f"p{row},{(5 + row % 7) * factor},{40 + row % 30},{sexes[row % 2]},{'ill' if row % 3 else 'well'}"
            for row in range(40)
        ]
        write(tmp_path / "clinics" / f"{name}.csv", "\n".join(["case,glucose,age,sex,state", *lines]))
    notes = inspect_data(str(tmp_path / "clinics"), label="state", owner="file").notes
    assert [note for note in notes if "another unit" in note] == [
        "column 'glucose' looks different at 'south': half of its cells lie below 8, elsewhere below 144: "
        "is it in another unit?"
    ]
    assert "column 'sex' holds 'F', 'M', 'f', 'm', each an input of its own: spell them alike" in notes
    assert "another unit" not in " ".join(inspect_data(str(tmp_path / "clinics"), label="state").notes)


def test_ids_that_are_numbers_in_one_table_and_words_in_another_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "clinics").mkdir()
    write(tmp_path / "clinics" / "north.csv", "case,age,state\nN1,4,ill\nN2,5,well\nN3,6,ill\nN4,7,well")
    write(tmp_path / "clinics" / "west.csv", "case,age,state\n1,4,ill\n2,5,well\n3,6,ill\n4,7,well")
    findings = inspect_data(str(tmp_path / "clinics"), label="state", owner="file")
    uses = {column.name: (column.use, column.reason) for column in findings.columns}
    assert uses["case"] == ("left out", "an id, differs in every row")
    assert uses["age"] == ("input", "")


def test_splits_of_a_table_are_no_parties(tmp_path: Path) -> None:
    (tmp_path / "clinics").mkdir()
    for name in ("train", "test"):
        write(tmp_path / "clinics" / f"{name}.csv", "age,state\n1,ill\n2,well\n3,ill\n4,well")
    place = str(tmp_path / "clinics")
    assert "joined" not in " ".join(inspect_data(place, label="state").notes)
    assert "no column 'file'" in fails(inspect_data, place, label="state", owner="file")
