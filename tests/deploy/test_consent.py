from __future__ import annotations

import json
import os

import pytest
from deployments import a_deployment, set_line, table

from fedstill.about.explain import explain
from fedstill.core.errors import FedstillError
from fedstill.deploy.consent import CONSENT_FILE, given_consent, record_consent
from fedstill.deploy.folder import read_site
from fedstill.deploy.site import consent, open_site

NOISY = "dp_fedavg(trust='nobody', clip=1.0, noise_multiplier=8.0)"


def site_of(folder, method="scaffold", **changes):
    return read_site(a_deployment(folder, method, **changes).site_folder("north"))


def words(text):
    return " ".join(text.split())


def test_the_text_says_everything_that_explain_says_leaves_stays_and_comes(tmp_path):
    text = words(open_site(site_of(tmp_path, "fedlmd+scaffold")).text)
    facts = explain("fedlmd+scaffold")
    for part in ("leaves_a_client", "stays_on_a_client", "sent_to_a_client"):
        for fact in facts[part]:
            assert fact in text or fact == "its data", fact  # the text says how many rows these are


def test_it_says_which_rows_stay_and_what_is_told_of_held_back_ones(tmp_path):
    text = words(open_site(site_of(tmp_path)).text)
    assert "32 to train on, 8 held back to measure on" in text  # a fifth of 40 rows
    assert "how many of 8 held-back rows the model gets right" in text
    assert "NOT protected from anybody: trained models" in text
    assert "how good models are here" in text


def test_a_site_that_does_not_measure_does_not_say_it_would(tmp_path):
    site = site_of(tmp_path)
    set_line(site.folder / "site.toml", "evaluates", "false")
    assert "gets right" not in open_site(read_site(site.folder)).text


def test_under_a_budget_it_says_how_many_rounds_are_answered(tmp_path):
    test = table(tmp_path / "test.csv", 30, 9)
    own = {"source": str(tmp_path / "pilot.csv"), "label": "outcome", "drop": ["patient_id"], "test": str(test)}
    site = site_of(tmp_path, NOISY, data=own, rounds=50, privacy={"against": "server"})
    lines = (site.folder / "site.toml").read_text().replace("# epsilon = 4.0", "epsilon = 2.0")
    (site.folder / "site.toml").write_text(lines)
    opened = open_site(read_site(site.folder))
    assert 1 <= opened.desk.allowed < 50
    assert f"epsilon = 2, which allows {opened.desk.allowed} rounds; then it answers no more" in words(opened.text)


def test_the_budget_of_a_site_is_the_smaller_of_two(tmp_path):
    test = table(tmp_path / "test.csv", 30, 9)
    own = {"source": str(tmp_path / "pilot.csv"), "label": "outcome", "drop": ["patient_id"], "test": str(test)}
    site = site_of(tmp_path, NOISY, data=own, rounds=50, privacy={"against": "server", "epsilon": 2.0})
    theirs = open_site(site).desk.allowed
    allowed = {}
    for epsilon in ("1.0", "9.0"):
        text = (site.folder / "site.toml").read_text()
        (site.folder / "site.toml").write_text(text.replace("# epsilon = 4.0", f"epsilon = {epsilon}"))
        allowed[epsilon] = open_site(read_site(site.folder)).desk.allowed
        (site.folder / "site.toml").write_text(text)
    assert allowed["1.0"] < theirs == allowed["9.0"]


def test_without_consent_nothing_is_answered(tmp_path):
    opened = open_site(site_of(tmp_path))
    with pytest.raises(FedstillError, match="nobody consented"):
        consent(opened, yes=False, ask=None)
    with pytest.raises(FedstillError, match="nothing has left this site"):
        consent(opened, yes=False, ask=lambda: False)
    assert not (opened.folder.folder / CONSENT_FILE).exists()


def test_consent_is_kept_with_the_text_and_asked_again_when_the_text_changes(tmp_path):
    opened = open_site(site_of(tmp_path))
    asked = []
    for _ in range(2):
        consent(opened, yes=False, ask=lambda: bool(asked.append(1)) or True)
    assert len(asked) == 1
    kept = json.loads((opened.folder.folder / CONSENT_FILE).read_text())
    assert (kept["text"], kept["how"]) == (opened.text, "typed")
    assert given_consent(opened.folder.folder, opened.text) == f"{kept['user']}, {kept['time']}"
    path = opened.folder.folder / "experiment.toml"
    path.write_text(path.read_text().replace("rounds = 3\n", "rounds = 4\n"))
    with pytest.raises(FedstillError, match="nobody consented"):
        consent(open_site(read_site(opened.folder.folder)), yes=False, ask=None)


def test_consent_to_another_text_does_not_count(tmp_path):
    record_consent(tmp_path, "one text", how="--yes")
    assert given_consent(tmp_path, "one text")
    assert not given_consent(tmp_path, "one text.")
    for damaged in ("{", "[" * 100_000):
        (tmp_path / CONSENT_FILE).write_text(damaged)
        with pytest.raises(FedstillError, match="consent again"):
            given_consent(tmp_path, "one text")


def test_neither_the_text_nor_the_consent_holds_the_secret(tmp_path):
    opened = open_site(site_of(tmp_path))
    consent(opened, yes=True, ask=None)
    secret = (opened.folder.memory / "secret").read_bytes()
    files = [path for path in opened.folder.folder.rglob("*") if path.is_file() and path.name != "secret"]
    assert all(secret not in path.read_bytes() and secret.hex().encode() not in path.read_bytes() for path in files)
    assert os.stat(opened.folder.memory / "secret").st_mode & 0o077 == 0
