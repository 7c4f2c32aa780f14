"""The state of a live page: it follows the files of runs, whatever they hold."""

from __future__ import annotations

import json
import shutil
from html import escape
from html.parser import HTMLParser

import pytest
from run_folders import HOSTILE, row, write_comparison, write_hostile, write_run

from fedstill.report.live import UNDER_WAY, Live, event
from fedstill.report.under_way import RUNNING_FILE
from fedstill.storage.files import lock

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")


def told(live: Live, name: str) -> dict:
    return json.loads(live.frames[name].content.decode().partition("data: ")[2])


def add_round(folder, number: int, accuracy: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(number, accuracy, 2)) + "\n")


def test_a_round_that_is_written_makes_new_frames_of_the_sections_that_show_it_only(tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    live = Live([folder])
    assert live.refresh()
    before = dict(live.frames)
    assert not live.refresh()
    add_round(folder, 3, 0.73)
    assert live.refresh()
    new = {name for name, frame in live.frames.items() if before.get(name) != frame}
    assert {"answer", "curves", "cost"} <= new
    assert not {"holdings", "layout", "calibration"} & new
    assert "73.0 %" in told(live, "answer")["html"]


def test_between_two_makings_of_the_sections_the_runs_at_work_are_told(tmp_path):
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    live = Live([folder])
    with lock(folder / RUNNING_FILE, wait=False):
        live.refresh()
        before = live.frames["curves"]
        add_round(folder, 3, 0.73)
        assert live.refresh(sections=False)
        assert live.frames["curves"] == before
        assert "73.0 %" in told(live, UNDER_WAY)["html"]
        live.refresh()
        assert live.frames["curves"] != before
        add_round(folder, 4, 0.75)
    assert live.refresh(sections=False)  # nothing is at work any more, so that nothing is spared
    assert "75.0 %" in told(live, "answer")["html"]
    assert UNDER_WAY not in live.frames


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path):
    live = Live([tmp_path / "later"])
    live.refresh()
    assert told(live, "state") == {"words": "Waiting for a run in 'later'.", "share": None}
    write_run(tmp_path / "later", [0.5])
    live.refresh()
    assert told(live, "state")["words"] == "1 run: all is done."
    shutil.rmtree(tmp_path / "later")
    live.refresh()
    assert list(live.frames) == ["layout", "state"]


def test_several_folders_are_lines_of_one_chart(tmp_path):
    live = Live([write_run(tmp_path / name, [0.5, 0.6], method=name) for name in ("fedavg", "feddf")])
    live.refresh()
    html = told(live, "curves")["html"]
    assert html.count('type="checkbox"') == 2
    assert "<bdi>fedavg</bdi>" in html
    assert "<bdi>feddf</bdi>" in html


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        assert not [name for name, _ in attributes if name.startswith("on")]
        self.seen.append(tag)


def test_hostile_names_are_text_in_every_event(tmp_path):
    live = Live([write_hostile(tmp_path / "<img src=x onerror=alert(1)>")])
    with lock(tmp_path / "<img src=x onerror=alert(1)>" / RUNNING_FILE, wait=False):
        live.refresh()
    assert "Under way" in told(live, UNDER_WAY)["html"]
    for name, frame in live.frames.items():
        kind, data, *empty = frame.content.decode("ascii").split("\n")  # a name makes no line, so no event
        assert (kind.partition(" ")[0], data.partition(" ")[0], empty) == ("event:", "data:", ["", ""])
        text = told(live, name).get("html", "")
        seen = Tags(text).seen
        assert "img" not in seen
        assert seen.count("script") == text.count("<figure>")  # the data of charts
    shown = "".join(told(live, name).get("html", "") for name in live.frames)
    assert all(escape(name) in shown for name in HOSTILE if name.isprintable())


def test_an_event_is_one_line_whatever_is_in_it():
    assert event("state", {"words": "a\n\nevent: b\r\u2028<"}) == (
        b'event: state\ndata: {"words":"a\\n\\nevent: b\\r\\u2028\\u003c"}\n\n'
    )


def cut(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) - 40])


def unlink_all(folder):
    for file in folder.iterdir():
        if file.name != "metrics.jsonl":
            file.unlink()


def foreign(folder):
    (folder / "metrics.jsonl").write_bytes(bytes(range(256)) * 20)
    (folder / "config.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "partition.json").write_text("[" * 100_000)
    (folder / "env.json").unlink()
    (folder / "env.json").mkdir()


@pytest.mark.parametrize("damage", [cut, unlink_all, foreign], ids=["cut off", "missing", "foreign"])
def test_damage_while_the_page_is_open_is_named_and_heals(tmp_path, damage):
    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.5, 0.6]], "feddf": [[0.4, 0.5]]})
    inside = folder / "method-0/seed-0"
    shutil.copytree(inside, tmp_path / "whole")
    live = Live([folder])
    live.refresh()
    whole = {name: frame.content for name, frame in live.frames.items()}
    damage(inside)
    assert live.refresh()
    audit = told(live, "audit")["html"]
    assert "all/method-0/seed-0: " in audit
    assert "cannot be read" in audit or "damaged" in audit
    shutil.rmtree(inside)
    shutil.copytree(tmp_path / "whole", inside)
    live.refresh()
    assert {name: frame.content for name, frame in live.frames.items()} == whole


def test_a_link_out_of_the_folder_shows_nothing_but_rounds(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("a password\n")
    folder = write_run(tmp_path / "run", [0.5])
    for name in ("metrics.jsonl", "log.txt", "audit.jsonl"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    live = Live([folder])
    live.refresh()
    assert not any(b"password" in frame.content for frame in live.frames.values())
