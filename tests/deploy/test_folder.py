from __future__ import annotations

import json

import pytest
from deployments import a_deployment, set_line

from fedstill.core.errors import FedstillError
from fedstill.core.population import Stay
from fedstill.deploy.folder import check_names, facts_of, read_deployment, read_site, with_public_keys


@pytest.fixture
def deployment(tmp_path):
    return a_deployment(tmp_path)


def change_roster(deployment, change):
    path = deployment.folder / "roster.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def test_server_and_sites_read_the_same_facts_from_their_own_folders(deployment):
    for client, member in enumerate(deployment.members):
        site = read_site(deployment.site_folder(member.name))
        assert (site.client, site.name, site.seats) == (client, member.name, 3)
        assert site.facts == deployment.facts


def test_a_roster_that_is_nested_too_deep_is_one_line(deployment):
    (deployment.folder / "roster.json").write_text("[" * 100_000)
    with pytest.raises(FedstillError, match=r"roster\.json is no JSON"):
        read_deployment(deployment.folder)


def test_each_party_may_choose_its_own_device_and_no_other_setting(deployment):
    path = deployment.site_folder("north") / "experiment.toml"
    text = path.read_text()
    path.write_text(text.replace('device = "auto"', 'device = "cpu"'))
    assert read_site(path.parent).facts == deployment.facts
    path.write_text(text.replace("lr = 0.1\n", "lr = 0.2\n"))
    assert read_site(path.parent).facts != deployment.facts


def test_the_order_of_columns_is_a_part_of_what_is_agreed(deployment):
    data = deployment.experiment.data
    turned = data.model_copy(update={"columns": dict(reversed(data.columns.items()))})
    other = deployment.experiment.model_copy(update={"data": turned})
    assert facts_of("run", other) != facts_of("run", deployment.experiment)


def test_rounds_of_membership_and_empty_seats_are_read_from_the_roster(tmp_path):
    deployment = a_deployment(tmp_path, seats=4)
    change_roster(deployment, lambda tree: tree["sites"][1].update(first=2, last=5))
    changed = read_deployment(deployment.folder)
    assert changed.stays == {1: Stay(2, 5)}
    assert changed.names == ("north", "south", "west", "(seat 3)")


def test_public_keys_are_written_into_the_roster(deployment):
    with_public_keys(deployment, {"south": "ecdsa AAA"})
    assert [member.public_key for member in read_deployment(deployment.folder).members] == ["", "ecdsa AAA", ""]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda tree: tree["sites"][0].update(client=1), "two sites have one client id"),
        (lambda tree: tree["sites"][0].update(client=3), "client 3 has no place among 3 seats"),
        (lambda tree: tree["sites"][0].update(name="south"), "'south' is named twice"),
        (lambda tree: tree["sites"][0].update(name="../x"), "because it is a folder"),
        (lambda tree: tree["sites"][0].update(first=3, last=2), "leaves before it comes"),
        (lambda tree: tree.update(sites=[]), "there is no site"),
        (lambda tree: tree.update(deadline=3), "deadline: no such key"),
        (lambda tree: [site.update(public_key="same") for site in tree["sites"]], "one public key"),
    ],
)
def test_a_roster_that_contradicts_itself_is_refused(deployment, change, line):
    change_roster(deployment, change)
    with pytest.raises(FedstillError, match=line):
        read_deployment(deployment.folder)


def test_a_mistake_in_a_sites_file_names_file_and_key(deployment):
    path = deployment.site_folder("west") / "site.toml"
    set_line(path, "begin_anew", '"maybe"')
    with pytest.raises(FedstillError, match=r"west.site\.toml: begin_anew"):
        read_site(path.parent)


def test_another_folder_is_refused_with_the_one_to_give(tmp_path):
    for read in (read_deployment, read_site):
        with pytest.raises(FedstillError, match="give the one"):
            read(tmp_path)


@pytest.mark.parametrize("key", ["server", "name", "run", "memory"])
@pytest.mark.parametrize("word", [r"fed.example\nLEAVES this site: nothing", r"\u001b[2J", r"\u0000", r"\u202e"])
def test_the_operators_words_write_no_line_into_what_a_site_consents_to(deployment, key, word):
    folder = deployment.site_folder("north")
    set_line(folder / "site.toml", key, f'"{word}"')
    with pytest.raises(FedstillError, match=f"{key}: it has signs that cannot be printed"):
        read_site(folder)


def test_names_are_folders():
    check_names(["north", "st-mary.2"])
    for names in (["a/b"], [""], [".."], ["a", "a"], ["North", "north"]):
        with pytest.raises(FedstillError):
            check_names(names)
