"""The page as a file: nothing of a run is obeyed, everything is inside, and its size has a limit."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folders import HOSTILE, row, write_comparison, write_hostile, write_run

from fedstill.core.errors import FedstillError
from fedstill.report.page import CANNOT, write_report

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")


class Reader(HTMLParser):
    """Collects the tags, the addresses and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.alts: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            self.addresses += [value] if name in ("src", "href", "action") else []
            self.handlers += [name] if name.startswith("on") else []
            self.alts += [value] if name == "alt" else []

    def handle_data(self, text):
        self.words.append(text)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    page = write_report([write_hostile(folder / "all")], folder / "page.html").read_text(encoding="utf-8")
    return page, Reader(page)


def test_markup_in_names_stays_text(hostile):
    page, reader = hostile
    charts = page.count("<figure>")
    assert reader.tags.count("script") == charts + 2  # the data of each chart, the themes, and the page's own script
    assert reader.tags.count("img") == charts
    assert not reader.handlers
    text = "".join(reader.words)
    assert all(name in text for name in HOSTILE if name.isprintable())


def test_nothing_is_fetched_from_anywhere(hostile):
    _, reader = hostile
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)


def test_no_other_script_may_run(hostile):
    page, _ = hostile
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


def test_every_chart_has_a_static_picture_and_words_for_it(hostile):
    _, reader = hostile
    pictures = [address for address in reader.addresses if address.startswith("data:image/")]
    assert len(pictures) == len(reader.alts) > 8
    assert all(alt.strip() for alt in reader.alts)
    for picture in pictures:
        kind, content = re.match(r"data:image/(svg\+xml|png);base64,(.+)", picture).groups()
        decoded = base64.b64decode(content)
        assert decoded.startswith(b"<svg" if kind == "svg+xml" else b"\x89PNG")
        assert b"<script" not in decoded


def test_names_are_no_keys_and_no_expressions_of_a_chart(hostile):
    page, _ = hostile
    specs = re.findall(r'<script type="application/json">(.+?)</script>', page)
    assert specs
    for text in specs:
        spec = json.loads(text)
        spec.pop("data")
        assert "hacked" not in json.dumps([layer.get("transform") for layer in spec.get("layer", [spec])])


def test_foreign_files_give_a_page_that_says_what_is_missing(tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    (folder / "contract.json").write_text('{"data": {"classes": 7, "name": ["x"]}}')
    (folder / "partition.json").write_text('{"counts": [[1, "two"], [3]], "clients": "many"}')
    (folder / "calibration.json").write_text('{"last": {"bins": 3}}')
    (folder / "parties.json").write_text('{"parties": [{"name": {}}, 5]}')
    (folder / "privacy.json").write_text('{"claims": [7]}')
    (folder / "references.json").write_text('{"alone": 3, "pooled": []}')
    (folder / "config.toml").write_text('method = "x"\npartition = 3\ncohort = "all"\n')
    (folder / "log.txt").unlink()
    page = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "log.txt cannot be read" in page
    assert "60.0 %" in page
    assert CANNOT not in page


@pytest.mark.parametrize("rows", [[], [{"round": 1}], [{"round": 1, "accuracy": None}]])
def test_a_run_without_an_evaluated_round_has_a_page(tmp_path, rows):
    folder = write_run(tmp_path / "run", [], rows=rows)
    page = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "No run has an evaluated round yet" in page
    assert CANNOT not in page


def test_a_panel_that_fails_leaves_the_others_on_the_page(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fedstill.report.panels.cost.panel", lambda runs: 1 / 0)
    page = write_report([write_run(tmp_path / "run", [0.5, 0.6])]).read_text(encoding="utf-8")
    assert page.count(CANNOT) == 1
    assert "How it learns" in page
    assert "no panel 'cost'" in caplog.text


def test_the_page_goes_into_the_first_folder_by_default_and_is_no_part_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run", [0.5])
    path = write_report([folder])
    assert path == folder / "report.html"
    assert write_report([folder]) == path


def test_a_folder_as_the_file_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", [0.5])
    with pytest.raises(FedstillError, match="is a folder: name the file"):
        write_report([folder], tmp_path)


def test_without_the_extra_the_message_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(FedstillError, match=r"pip install 'fedstill\[report\]'"):
        write_report([write_run(tmp_path / "run", [0.5])])


def test_thirty_methods_stay_far_below_the_limit(tmp_path):
    methods = {f"method {place}": [[0.01 * place, 0.02 * place]] for place in range(30)}
    assert write_report([write_comparison(tmp_path / "all", methods)]).stat().st_size < 2_500_000


@pytest.mark.slow
def test_a_thousand_rounds_of_a_thousand_clients_in_thirty_methods(tmp_path):
    classes = [f"class {place}" for place in range(32)]
    counts = np.random.default_rng(1).integers(100, size=(1000, 32)).tolist()
    rng = np.random.default_rng(0)
    rows = [
        row(at, float(rng.uniform()), 32, **{"server/u": float(rng.uniform())}, pseudo_labels=int(rng.integers(1000)))
        for at in range(1, 1001)
    ]
    for one in rows:  # noise, because it is the hardest to pack
        one["class_accuracy"] = rng.uniform(size=32).tolist()
        one["confusion"] = rng.integers(100, size=(32, 32)).tolist()
    names = [f"party {place}" for place in range(1000)]
    folders = [
        write_run(
            tmp_path / f"{place}", [], rows=rows, classes=classes, counts=counts, parties=names, method=f"m{place}"
        )
        for place in range(30)
    ]
    for some in (folders[:1], folders):
        began = time.perf_counter()
        path = write_report(some)
        assert time.perf_counter() - began < 20
        assert path.stat().st_size < 5_000_000
