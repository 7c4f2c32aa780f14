"""A look at data before the first run finds everything at once."""

from pathlib import Path

import numpy as np
import pytest
from data_files import fails, write
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


def test_rows_without_a_label_and_repeated_rows_are_counted(tmp_path: Path) -> None:
    rows = ["1,2,a", "1,2,a", "3,4,b", "5,6,", "7,8,b"]
    findings = inspect_data(str(write(tmp_path / "t.csv", "\n".join(["u,v,label", *rows]))))
    assert findings.classes == {"a": 2, "b": 2}
    notes = " ".join(findings.notes)
    assert "1 rows have no label" in notes
    assert "1 rows repeat another row" in notes


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
