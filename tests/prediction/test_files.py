"""The picture beside the labels, and how sure it is of each bin."""

import pytest
import torch

from fedstill.data.files import CsvFile
from fedstill.loop.calibrate import reliability
from fedstill.prediction.files import Part, reliability_picture, wilson, writing_tables


@pytest.mark.parametrize("calibrated", [True, False])
def test_the_curve_is_drawn_with_and_without_a_second_line(tmp_path, calibrated):
    probabilities = torch.softmax(torch.randn(50, 5, generator=torch.Generator().manual_seed(0)), 1)
    found = reliability(probabilities, torch.arange(50) % 5)
    path = reliability_picture(found, found if calibrated else None, tmp_path / "curve.png", title="long title " * 20)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_interval_of_a_bin_is_wide_for_few_rows_and_holds_what_was_seen():
    # Wilson with z = 1.96, 8 of 10: (8 + 1.9208) / 13.8416 = 0.7167, half width 1.96 sqrt(1.6 + 0.9604) / 13.8416
    low, high = wilson(0.8, 10)
    assert (low, high) == pytest.approx((0.7167 - 0.2266, 0.7167 + 0.2266), abs=1e-4)
    assert wilson(0.8, 1000)[0] > low
    assert wilson(0.0, 5)[0] == 0.0


def test_ids_and_classes_that_begin_a_formula_read_back_as_they_were(tmp_path):
    ids, classes = ("=1+1", "@x", "-7", "'=quoted", "\tt", "plain"), ("=yes", "no")
    even = torch.full((6, 2), 0.5)
    part = Part(ids, ("=yes", "no") * 3, even, even[:, 0], even[:, 0], None)
    with writing_tables(tmp_path, classes) as write:
        write(part)
    cells = [line.split(",")[0].strip('"') for line in (tmp_path / "predictions.csv").read_text().splitlines()[1:]]
    assert cells == ["'=1+1", "'@x", "-7", "''=quoted", "'\tt", "plain"]
    table = CsvFile(tmp_path / "predictions.csv")
    (piece,) = table.pieces(words={"id", "label"})
    assert tuple(piece["id"]) == ids
    assert tuple(piece["label"]) == part.labels


def test_a_file_name_that_is_no_text_can_be_written(tmp_path):
    half = torch.full((1, 2), 0.5)
    with writing_tables(tmp_path, ("a", "b")) as write:
        write(Part(("\udcff.png",), ("a",), half, half[:, 0], half[:, 0], None))
    assert "\\udcff.png,a" in (tmp_path / "predictions.csv").read_text()
