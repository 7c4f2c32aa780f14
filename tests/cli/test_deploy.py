"""`deploy init`, `site` and `deploy rehearse` as an operator and a site see them."""

from __future__ import annotations

import pytest
from cli_runs import fedstill
from deployments import a_deployment, experiment, set_line, table


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "heart.toml"
    path.write_text(experiment(table(tmp_path / "pilot.csv", 60, 0)).to_toml())
    return path


def test_init_says_what_was_decided_and_what_is_next(tmp_path, file):
    lines = fedstill("deploy", "init", file, "--sites", "north, south", "--out", tmp_path / "dep").stdout.splitlines()
    assert lines[0].startswith("classes and columns: as in")
    assert "put public values there" in lines[1]
    assert lines[-1] == f"Next: read {tmp_path / 'dep'}/README.md"
    assert {path.name for path in (tmp_path / "dep" / "sites").iterdir()} == {"north", "south"}


def test_a_site_checks_its_rows_and_shows_what_would_leave(tmp_path):
    folder = a_deployment(tmp_path).site_folder("north")
    shown = fedstill("site", folder, "--check").stdout
    assert "LEAVES this site, in each round" in shown
    assert "STAYS at this site" in shown
    assert not (folder / "consent.json").exists()


def test_a_site_shows_what_looks_odd_last_where_its_people_read_before_they_answer(tmp_path):
    site = a_deployment(tmp_path).site_folder("north")
    said = fedstill("site", site, "--check").stderr.splitlines()
    assert said[-1].endswith(f"rows can be read, and nothing looks odd; start with: fedstill site {site}")
    table(site / "moles.csv", 40, 1, unit=18.0)
    set_line(site / "site.toml", "data", '"moles.csv"')
    shown = fedstill("site", site, "--check").output
    assert shown.index("LEAVES") < shown.index("look: column 'glucose'") < shown.index("what looks odd stands above")


def test_a_site_refuses_to_start_without_consent_where_nobody_can_be_asked(tmp_path):
    folder = a_deployment(tmp_path).site_folder("north")
    assert "nobody consented" in fedstill("site", folder, code=2).output


def test_mistakes_of_the_command_line_are_one_line(tmp_path, file):
    deployment = a_deployment(tmp_path)
    for words, line in (
        (("deploy", "init", file, "--sites", " , "), "--sites is empty"),
        (("deploy", "rehearse", deployment.folder, "--data", "north"), "write the site's name and its rows"),
        (("deploy", "rehearse", deployment.folder, "--out", tmp_path), "is there already"),
        (("site", tmp_path), "no folder of a site"),
    ):
        assert line in fedstill(*words, code=2).output
