from __future__ import annotations

import numpy as np
import pytest
import torch
from deployments import experiment, table
from PIL import Image

from fedstill.core.errors import FedstillError
from fedstill.data.tokens import encode, train_tokenizer
from fedstill.deploy.rows import read_rows

AGREED = {
    "label": "outcome",
    "classes": ["well", "ill", "unclear"],
    "columns": {"glucose": "numbers", "sex": ["f", "m"], "age": "numbers"},
    "mean": [95.0, 0.5, 0.5, 60.0],
    "std": [18.0, 0.5, 0.5, 9.0],
}


def agreed(**changes):
    return experiment("nowhere", data={"source": "(at the sites)", **AGREED, **changes})


def written(tmp_path, text, name="rows.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def lines_of(call, *args):
    with pytest.raises(FedstillError) as refused:
        call(*args)
    return list(refused.value.lines)


def test_all_rows_are_read_in_the_agreed_order_of_columns_and_classes(tmp_path):
    place = written(tmp_path, "id,age,sex,glucose,outcome\n1,50,m,90,ill\n2,61.5,f,101,well\n")
    data = read_rows(agreed(), place).data
    assert data.x.tolist() == [[90.0, 0.0, 1.0, 50.0], [101.0, 1.0, 0.0, 61.5]]
    assert data.y.tolist() == [1, 0]
    assert (data.classes, data.mean, data.std) == (
        ("well", "ill", "unclear"),
        (95.0, 0.5, 0.5, 60.0),
        (18.0, 0.5, 0.5, 9.0),
    )


def test_rows_of_train_and_test_files_all_count(tmp_path):
    for name, rows in (("train", "1,50,m,90,ill\n"), ("test", "2,40,f,80,well\n3,41,f,81,well\n")):
        written(tmp_path, f"id,age,sex,glucose,outcome\n{rows}", f"{name}.csv")
    assert read_rows(agreed(), str(tmp_path)).data.y.tolist() == [1, 0, 0]


def test_every_difference_is_named_at_once(tmp_path):
    place = written(tmp_path, "id,sex,glukose,outcome\n1,male,90,ill\n2,f,80,well\n")
    assert lines_of(read_rows, agreed(), place) == [
        "data: column 'glucose' is missing in rows.csv; is it 'glukose'?",
        "data: column 'age' is missing in rows.csv",
        "data: column 'sex' holds 'male', and agreed are the words f, m",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "age,sex,glucose,outcome\n50,m,90,dead\n51,f,91,ill\n",
            "'dead' in row 1 .*agreed classes are well, ill, unclear",
        ),
        ("age,sex,glucose,outcome\nold,m,90,ill\n51,f,91,ill\n", "column 'age' of rows must hold numbers, as agreed"),
        ("age,sex,glucose,outcome\n,m,90,ill\n51,f,91,ill\n", "column 'age' of rows has no value in row 1"),
    ],
)
def test_what_keeps_rows_from_being_read_is_said_in_a_line(tmp_path, text, line):
    with pytest.raises(FedstillError, match=line):
        read_rows(agreed(), written(tmp_path, text))


@pytest.mark.parametrize("key", ["mean", "std"])
def test_an_agreed_scale_of_another_length_is_refused(tmp_path, key):
    rows = written(tmp_path, "age,sex,glucose,outcome\n50,m,90,ill\n51,f,91,ill\n")
    with pytest.raises(FedstillError, match=f"data.{key} has 3 numbers"):
        read_rows(agreed(**{key: [1.0, 2.0, 3.0]}), rows)


def test_a_column_in_another_unit_is_doubted_and_a_usual_one_is_not(tmp_path):
    usual = read_rows(agreed(), str(table(tmp_path / "a.csv", 40, 1)))
    moles = read_rows(agreed(), str(table(tmp_path / "b.csv", 40, 1, unit=18.0)))
    assert [line for line in usual.doubts if "unit" in line] == []
    (line,) = (line for line in moles.doubts if "unit" in line)
    assert line.startswith("column 'glucose' looks different")
    assert "agreed are 95 and 18" in line


def test_a_class_without_rows_and_a_constant_column_are_pointed_out(tmp_path):
    rows = "".join(f"{40 + row},m,95,ill\n" for row in range(30))
    doubts = read_rows(agreed(), written(tmp_path, f"age,sex,glucose,outcome\n{rows}")).doubts
    assert doubts[0].startswith("no row here has the class well, unclear")
    assert any(line.startswith("column 'glucose' is 95 in every row") for line in doubts)


def test_words_that_count_as_none_are_pointed_out_beside_the_agreed_ones(tmp_path):
    place = written(tmp_path, "age,sex,glucose,outcome\n50,male,90,ill\n51,male,91,ill\n")
    rows = read_rows(agreed(unknown="zeros"), place)
    assert rows.doubts[0] == "column 'sex' holds 'male', and agreed are the words f, m: the others count as no word"
    assert rows.notes[1] == "no cell of column 'sex' could be used: is it written as agreed?"
    usual = read_rows(agreed(unknown="zeros"), str(table(tmp_path / "a.csv", 40, 1)))
    assert [line for line in usual.doubts if "word" in line] == []


def test_gaps_are_filled_with_the_agreed_mean_and_marked(tmp_path):
    place = written(tmp_path, "age,sex,glucose,outcome\n,m,90,ill\n50,,91,ill\n")
    columns = {"age": "numbers", "sex": ["(missing)", "f", "m"]}
    filled = agreed(columns=columns, missing="mean", mean=[60.0, 0.1, 0.3, 0.3, 0.3], std=[9.0, 0.3, 0.5, 0.5, 0.5])
    assert read_rows(filled, place).data.x.tolist() == [[60.0, 1.0, 0.0, 0.0, 1.0], [50.0, 0.0, 1.0, 0.0, 0.0]]


def test_images_of_any_size_and_colour_come_in_the_agreed_shape(tmp_path):
    for name, size in (("cat", (9, 7)), ("dog", (4, 4))):
        (tmp_path / "images" / name).mkdir(parents=True)
        colours = np.full((*size, 3), 200, np.uint8)
        Image.fromarray(colours).save(tmp_path / "images" / name / "1.png")
    form = {"source": "(at the sites)", "classes": ["dog", "cat"], "shape": [1, 4, 4], "mean": [0.5], "std": [0.25]}
    data = read_rows(experiment("nowhere", data=form), str(tmp_path / "images")).data
    assert (tuple(data.x.shape), data.x.dtype, sorted(data.y.tolist())) == ((2, 1, 4, 4), torch.uint8, [0, 1])
    assert (data.mean, data.std) == ((0.5,), (0.25,))
    assert data.x.unique().tolist() == [200]


def test_arrays_of_an_npz_file_are_read_as_images(tmp_path):
    x, y = np.arange(48, dtype=np.uint8).reshape(3, 4, 4), np.array([1, 0, 1])
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    form = {"source": "(at the sites)", "classes": ["0", "1"], "shape": [1, 4, 4], "mean": [0.1], "std": [0.1]}
    data = read_rows(experiment("nowhere", data=form), str(tmp_path / "rows.npz")).data
    assert data.x.flatten().tolist() == x.flatten().tolist()
    assert data.y.tolist() == [1, 0, 1]


def agreed_texts(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["the team won a match", "the bank lent a sum"] * 2, 100))
    form = {"source": "(at the sites)", "label": "label", "classes": ["sport", "money"], "inputs": ["text"]}
    return experiment("nowhere", data={**form, "tokens": 6, "tokenizer": str(tmp_path / "tokenizer.json")})


def test_texts_become_the_agreed_ids_whatever_their_column_is_called(tmp_path):
    place = written(tmp_path, "label,note\nmoney,the bank\nsport,the jury\n")
    data = read_rows(agreed_texts(tmp_path), place).data
    assert data.y.tolist() == [1, 0]
    assert data.x[0].tolist() == encode(["the bank"], data.tokenizer)[0].tolist()
    cls, the, unknown, end = data.x[1].tolist()[:4]
    assert (cls, unknown, end) == (2, 1, 3)  # nobody agreed on a j
    assert the == data.x[0, 1]


def test_texts_may_be_files_in_folders_of_their_class(tmp_path):
    for topic in ("money", "sport"):
        (tmp_path / "own" / topic).mkdir(parents=True)
        written(tmp_path / "own" / topic, "the bank\n", "1.txt")
    assert sorted(read_rows(agreed_texts(tmp_path), str(tmp_path / "own")).data.y.tolist()) == [0, 1]


def test_a_site_without_data_says_where_to_name_them(tmp_path):
    for place in ("", str(tmp_path / "gone.csv")):
        with pytest.raises(FedstillError, match=r"as `data` in site\.toml"):
            read_rows(agreed(), place)
