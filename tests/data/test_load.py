"""A name, a path, a hub id, a Hugging Face object or tensors become a Source; every wrong way ends in one line."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import fails, hub_folder, pictures, png, write_parquet
from PIL import Image

from fedstill.core.data import InputColumn
from fedstill.data import Source, describe_datasets, files, from_tensors, load

CIFAR10 = Path(__file__).parents[3] / "shared" / "data" / "cifar10"


def test_digits_keep_every_image_and_label() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    scaled = np.floor(bunch.images.reshape(1797, 64) * 255 / 16 + 0.5).astype(int)
    expected = sorted((*row, label) for row, label in zip(scaled.tolist(), bunch.target.tolist(), strict=True))
    source = load("digits")
    x = torch.cat([source.train.x, source.test.x]).reshape(1797, 64)
    y = torch.cat([source.train.y, source.test.y])
    assert sorted((*row, label) for row, label in zip(x.tolist(), y.tolist(), strict=True)) == expected
    assert source.train.x.shape[1:] == (1, 8, 8)
    assert source.train.classes == tuple("0123456789")


def test_fashion_mini_has_six_hundred_and_a_hundred_of_each_class() -> None:
    source = load("fashion_mini")
    assert torch.bincount(source.train.y).tolist() == [600] * 10
    assert torch.bincount(source.test.y).tolist() == [100] * 10
    assert source.train.x.dtype == torch.uint8
    assert source.train.mean == (0.2860,)  # of the full set, of which these are the first tenth
    assert source.train.x.float().mean().item() / 255 == pytest.approx(0.2860, abs=0.005)


def test_embedded_sets_take_the_same_options_as_files() -> None:
    source = load("digits", size=4)
    assert source.train.x.shape[1:] == (1, 4, 4)
    assert source.train.x.dtype == torch.uint8
    for small, image in zip(source.train.x[:50], load("digits").train.x[:50], strict=True):
        by_pillow = np.asarray(Image.fromarray(image[0].numpy()).resize((4, 4), Image.Resampling.BILINEAR))
        assert np.abs(small[0].numpy().astype(int) - by_pillow).max() <= 1
    assert "did you mean 'label'?" in fails(load, "digits", label="lable")
    assert "data.size" in fails(load, "digits", size=0)


def test_listing_is_true_of_what_is_loaded() -> None:
    listings = describe_datasets()
    for listing in listings:
        if listing.rows is not None:
            source = load(listing.name)
            assert (len(source.train.y), len(source.test.y)) == listing.rows
            assert tuple(source.train.x.shape[1:]) == listing.shape
            assert len(source.train.classes) == listing.classes
    assert {"digits", "fashion-mini"} <= {listing.name for listing in listings}
    assert any("hub id" in listing.summary for listing in listings)


def test_a_path_that_does_not_exist_never_goes_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for missing in (tmp_path / "none", "./cifar10", "../x/y", "data/cifar10", "table.csv", "a/b/c", Path("cifar10")):
        told = fails(load, missing)
        assert "no such file or folder" in told
        assert ("from the current folder" in told) is not Path(missing).is_absolute()
    assert "holds no parquet, CSV, JSON lines or image files" in fails(load, tmp_path / "data")
    (tmp_path / "data" / "x.bin").write_bytes(b"?")
    assert ".parquet" in fails(load, tmp_path / "data" / "x.bin")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'fedstill[data]'" in fails(load, "uoft-cs/cifar10")


def test_an_unreachable_hub_is_one_quick_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read from the environment at import
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    text = fails(load, "digitz")
    assert time.monotonic() - start < 5
    for words in ("data.source", "'digitz'", "embedded", "file or folder", "hub", "did you mean 'digits'?"):
        assert words in text


def test_a_hub_id_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub

    asked = []

    def hub(repository: str, configuration: str | None) -> datasets.DatasetDict:
        asked.append((repository, configuration))
        rows = {"x1": [0.0, 1.0] * 10, "label": [0, 1] * 10}
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    first = load("someone/coins:small", cache_dir=tmp_path / "c")
    second = load("someone/coins:small", cache_dir=tmp_path / "c")
    assert asked == [("someone/coins", "small")]
    assert torch.equal(first.train.x, second.train.x)
    assert second.train.name == "coins"
    load("someone/coins:small", cache_dir=tmp_path / "c", refresh=True)
    assert len(asked) == 2


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR10.exists(), reason="the real CIFAR-10 is not here")
def test_cifar10_is_decoded_once(tmp_path: Path) -> None:
    start = time.monotonic()
    first = load(CIFAR10, cache_dir=tmp_path)
    middle = time.monotonic()
    second = load(CIFAR10, cache_dir=tmp_path)
    assert time.monotonic() - middle < (middle - start) / 4
    for source in (first, second):
        assert source.train.x.shape == (50_000, 3, 32, 32)
        assert torch.bincount(source.train.y).tolist() == [5_000] * 10
        assert torch.bincount(source.test.y).tolist() == [1_000] * 10
        assert source.train.classes[0] == "airplane"
    measured = (second.train.x[:, 0].double() / 255).mean().item()
    assert measured == pytest.approx(second.train.mean[0], abs=1e-4)
    assert torch.equal(first.train.x, second.train.x)


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2)


def test_tensors_and_arrays_in_any_image_layout() -> None:
    pixels, labels = pictures(10), [1, 0] * 5
    first = from_tensors(torch.from_numpy(channels_first(pixels).copy()), torch.tensor(labels), test=(pixels, labels))
    last = from_tensors(pixels, np.array(labels), test=(pixels, labels))
    assert torch.equal(first.train.x, last.train.x)
    narrow = pictures(10, height=3, width=5).transpose(0, 3, 2, 1)  # (10, 3, 5, 3): channels first is assumed
    assert np.array_equal(from_tensors(narrow, labels, test=(narrow, labels)).train.x, narrow)
    grey = from_tensors(pixels[..., 0], labels, test=0.3)
    assert grey.train.x.shape == (7, 1, 5, 4)
    assert len(grey.test.y) == 3
    table = from_tensors(np.arange(20).reshape(10, 2), labels)
    assert table.train.x.dtype == torch.float32
    floats = from_tensors(pixels / 255.0, labels)
    assert floats.train.x.shape == (8, 3, 5, 4)
    assert floats.train.x.dtype == torch.float32


def test_tensors_with_wrong_shapes_or_values_are_refused() -> None:
    assert "(3, 2)" in fails(from_tensors, np.zeros((3, 2)), [0, 1])
    assert "numbers" in fails(from_tensors, np.array([["a"], ["b"]]), [0, 1])
    assert "no value in row 2" in fails(from_tensors, [[0.0], [np.nan], [1.0]], [0, 1, 0])
    assert "not finite in row 3" in fails(
        from_tensors, [[0.0], [1.0], [np.inf], [0.0]], [0, 1, 0, 1], test=([[0.0]], [0])
    )
    assert "outside 0..1" in fails(from_tensors, np.zeros((4, 1)), [0, 1, 2, 0], classes=("a", "b"))


# A source comes from the cache as it was decoded, until its files or its options change.


LOADERS = sys.modules["fedstill.data.load"]  # `fedstill.data.load` is the function


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of sources that were decoded, in order."""
    done: list[str] = []
    assemble = LOADERS.assemble

    def counting(*args, **options) -> Source:
        done.append(options["name"])
        return assemble(*args, **options)

    monkeypatch.setattr(LOADERS, "assemble", counting)
    return done


def same(a: Source, b: Source) -> bool:
    tensors = all(
        torch.equal(p, q) and p.dtype == q.dtype
        for p, q in ((a.train.x, b.train.x), (a.train.y, b.train.y), (a.test.x, b.test.x), (a.test.y, b.test.y))
    )
    keys = set(a.keys) == set(b.keys) and all(np.array_equal(a.keys[k], b.keys[k]) for k in a.keys)
    rows = set(a.rows) == set(b.rows) and all(np.array_equal(a.rows[k], b.rows[k]) for k in a.rows)
    facts = [
        (s.train.name, s.train.classes, s.train.mean, s.train.std, s.notes, s.origin, s.train.columns, s.skipped)
        for s in (a, b)
    ]
    return tensors and keys and rows and facts[0] == facts[1]


def test_the_second_load_is_the_first_without_decoding(tmp_path: Path, decodings: list[str]) -> None:
    columns = {"image": [png(p) for p in pictures(10)], "label": [0, 1] * 5, "writer": [f"w{i}é" for i in range(10)]}
    write_parquet(tmp_path / "notes.parquet", columns)
    first, second = load(tmp_path / "notes.parquet"), load(tmp_path / "notes.parquet")
    assert len(decodings) == 1
    assert same(first, second)
    assert list(second.keys) == ["writer"]
    second.train.x[0] = 0  # a copy: the stored bytes stay
    assert same(first, load(tmp_path / "notes.parquet"))
    assert len(decodings) == 1


def test_columns_words_and_row_numbers_come_back_from_the_cache(tmp_path: Path, decodings: list[str]) -> None:
    (tmp_path / "t.csv").write_text("colour,size,kind\n" + "".join(f"{'rgb'[i % 3]},{i},{i % 2}\n" for i in range(10)))
    first, second = (load(tmp_path / "t.csv", label="kind") for _ in range(2))
    assert len(decodings) == 1
    assert same(first, second)
    assert second.train.columns == (InputColumn("colour", 3, ("b", "g", "r")), InputColumn("size", 1))
    assert sorted([*second.rows["train"], *second.rows["test"]]) == list(range(10))


def test_other_source_files_are_decoded_again(tmp_path: Path, decodings: list[str]) -> None:
    folder = tmp_path / "pets"
    hub_folder(folder)
    load(folder)
    shard = folder / "train-00001-of-00002.parquet"
    os.utime(shard, ns=(1, 1))
    load(folder)
    assert len(decodings) == 2
    shard.unlink()
    assert len(load(folder).train.y) == 4
    assert len(decodings) == 3


def test_a_file_written_again_under_its_old_size_and_date_is_decoded_again(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,y\n" + "1,0\n2,1\n" * 5)
    assert load(file).train.x.max() == 2
    date = file.stat().st_mtime_ns
    file.write_text("a,y\n" + "1,0\n7,1\n" * 5)
    os.utime(file, ns=(date, date))
    assert load(file).train.x.max() == 7


def test_options_have_entries_of_their_own(tmp_path: Path, decodings: list[str]) -> None:
    hub_folder(tmp_path / "pets")
    assert load(tmp_path / "pets").train.x.shape[2:] == (5, 4)
    assert load(tmp_path / "pets", size=2).train.x.shape[2:] == (2, 2)
    assert load(tmp_path / "pets").train.x.shape[2:] == (5, 4)
    assert len(decodings) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub_folder(tmp_path / "pets")
    (tmp_path / "file").write_text("")
    source = load(tmp_path / "pets", cache_dir=tmp_path / "file" / "cache")
    assert len(source.train.y) == 7
    assert "not kept for other runs" in caplog.text


def test_reading_is_not_even_tried_on_the_second_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_folder(tmp_path / "pets")
    load(tmp_path / "pets")

    def read_again(*_: object) -> None:
        raise AssertionError("the parquet file was read again")

    monkeypatch.setattr(files, "_read_table", read_again)
    load(tmp_path / "pets")
