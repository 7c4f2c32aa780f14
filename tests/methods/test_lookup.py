"""Methods as text: what is read, and how a mistake is told."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import resume_run, run
from fedstill.methods.lookup import Part, PhaseText, build_method, parse, single, split_methods, write
from fedstill.methods.options import defaults

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda name: name not in ("then", "until"))
VALUES = st.one_of(
    st.booleans(),
    st.integers(-99, 99),
    st.floats(-1e3, 1e3),
    st.sampled_from(["size", "uniform", "a, b", "(x)", "1+1"]),
)
PARTS = st.builds(Part, NAMES, st.dictionaries(NAMES, VALUES, max_size=3))
MIXTURES = st.lists(PARTS, min_size=1, max_size=3, unique_by=lambda part: part.name)


@given(st.lists(MIXTURES, min_size=1, max_size=3), st.lists(st.integers(0, 500), min_size=2, max_size=2))
def test_what_is_written_is_read_back(mixtures, rounds):
    ends = [*rounds[: len(mixtures) - 1], None]
    texts = [
        "+".join(write(part.name, part.options) for part in mixture) + ("" if end is None else f" until {end}")
        for mixture, end in zip(mixtures, ends, strict=True)
    ]
    assert parse(" then ".join(texts)) == tuple(
        PhaseText(tuple(mixture), end) for mixture, end in zip(mixtures, ends, strict=True)
    )


def test_words_need_no_quotes_and_spaces_do_not_matter():
    assert parse(" fedrs ( alpha = 0.1 , rule=binary ) + fedavgm ") == (
        PhaseText((Part("fedrs", {"alpha": 0.1, "rule": "binary"}), Part("fedavgm"))),
    )


def test_import_paths_are_names():
    assert single("examples/my_method.py:anchor(strength=1e-3)") == Part(
        "examples/my_method.py:anchor", {"strength": 1e-3}
    )
    assert single("package.module:method+fedavgm") is None


def test_commas_inside_parentheses_do_not_split():
    assert split_methods("a, b(x=1,y=[1,2])+c , d until 5 then e") == ["a", "b(x=1,y=[1,2])+c", "d until 5 then e"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedlmd+", "cannot read the method"),
        ("", "cannot read the method"),
        ("fedprox(mu=0.1", "cannot read the method"),
        ("fedprox(0.1)", r"write fedprox\(key=value\)"),
        ("fedprox(mu=1, mu=2)", "sets mu twice"),
        ("fedprox+fedprox(mu=2)", "names fedprox twice"),
        ("fedavg until 5", "say what comes after"),
        ("fedavg then fedprox", "say until which round"),
        ("fedavg until soon then fedprox", "'soon' is no round"),
    ],
)
def test_a_mistake_is_told_with_an_example(text, told):
    with pytest.raises(FedstillError, match=told):
        parse(text)


def test_options_of_one_method_may_stand_inside_or_beside_its_name():
    inside = Experiment(method="fedprox(mu=0.5)").method
    assert inside == Experiment(method={"name": "fedprox", "mu": 0.5}).method
    with pytest.raises(FedstillError, match=r"method\.mu is set twice"):
        Experiment(method={"name": "fedprox(mu=0.5)", "mu": 0.1})
    with pytest.raises(FedstillError, match="stand inside it"):
        Experiment(method={"name": "fedprox+fedavgm", "mu": 0.1})


def test_a_mixture_survives_the_file_it_is_written_to():
    experiment = Experiment(method="fedavg until 3 then fedprox(mu=0.5)+fedavgm(beta=0.7)")
    from fedstill.storage import toml as toml_io

    again = Experiment.model_validate(toml_io.loads(toml_io.dumps(experiment.resolved()), where="here"))
    assert again.method == experiment.method


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fedprox(nu=1)+fedavgm", "'method.nu' for fedprox: did you mean 'mu'"),
        ("fedprx+fedavgm", "did you mean 'fedprox'"),
        ("nothing.py:here", "no file 'nothing.py'"),
        ("not_a_package:here", "No module named 'not_a_package'"),
        ("fedstill.methods.fedprox:fedprax", "did you mean 'fedprox'"),
    ],
)
def test_an_experiment_refuses_a_method_that_is_not_there_or_an_option_that_it_does_not_take(name, told):
    with pytest.raises(FedstillError, match=told):
        Experiment(method=name)


def test_a_method_of_ones_own_is_found_by_file_and_by_module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from fedstill.methods import fedprox\n\n\ndef gentle(*, mu: float = 0.5):\n    return fedprox(mu=mu)\n\n\n"
        "def broken():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    for name in ("mine.py:gentle", "mine:gentle", f"{tmp_path}/mine.py:gentle(mu=0.1)", "mine.py:gentle+fedavgm"):
        assert Experiment(method=name).method.name.partition("(")[0].split(":")[1].startswith("gentle")
    with pytest.raises(FedstillError, match="returned a int"):
        build_method("mine.py:broken")
    with pytest.raises(FedstillError, match="must be a number"):
        Experiment(method="mine.py:gentle(mu=high)")


def test_a_run_with_a_method_of_ones_own_is_resumed_from_another_folder(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "kept.py").write_text(
        "from fedstill.methods import fedprox\n\n\ndef gentle(*, mu: float = 0.5):\n    return fedprox(mu=mu)\n"
    )
    monkeypatch.chdir(home)
    partition = {"scheme": "iid", "clients": 4}
    experiment = Experiment(method="kept.py:gentle", rounds=2, cohort=2, partition=partition, model="mlp")
    whole = run(experiment, run_dir=tmp_path / "run", pictures=False)
    assert whole.method == "kept.py:gentle"
    monkeypatch.chdir(elsewhere)
    again = resume_run(tmp_path / "run")
    assert again.history.rows == whole.history.rows


OWN = "from fedstill.methods import fedprox\n\n\ndef gentle(*, mu: float = {mu}):\n    return fedprox(mu=mu)\n"
FEW = {"rounds": 1, "cohort": 2, "partition": {"scheme": "iid", "clients": 4}, "model": "mlp"}


def default_mu(name):
    return defaults("method", name)["mu"]


def test_a_file_is_not_taken_for_its_namesake_nor_for_itself_before_an_edit(tmp_path, monkeypatch):
    for folder, mu in (("a", 0.25), ("b", 0.75)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(OWN.format(mu=mu))
    monkeypatch.chdir(tmp_path / "a")
    assert default_mu("mine.py:gentle") == 0.25
    monkeypatch.chdir(tmp_path / "b")
    assert default_mu("mine.py:gentle") == 0.75
    (tmp_path / "b" / "mine.py").write_text(OWN.format(mu=0.0625))
    os.utime(tmp_path / "b" / "mine.py", (1, 1))
    assert default_mu("mine.py:gentle") == 0.0625


def test_a_file_may_import_its_neighbour_and_use_types_of_checkers_only(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text("STRENGTH = 0.5\n")
    (tmp_path / "mine2.py").write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "from fedstill.methods import fedprox\nfrom neighbour_of_mine import STRENGTH\n"
        "if TYPE_CHECKING:\n    from fedstill import Method\n\n\n"
        "def gentle() -> Method:\n    return fedprox(mu=STRENGTH)\n"
    )
    assert Experiment(method=f"{tmp_path}/mine2.py:gentle").method.name.endswith("mine2.py:gentle")


@pytest.mark.parametrize("folder", ["my dir", "a+b"])
def test_a_method_runs_in_a_folder_whose_name_the_language_cannot_hold(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "mine3.py").write_text(OWN.format(mu=0.5))
    monkeypatch.chdir(tmp_path / folder)
    experiment = Experiment(method="mine3.py:gentle", **FEW)
    assert run(experiment, run_dir="here", pictures=False).method == "mine3.py:gentle"


def test_an_unchanged_experiment_gets_more_rounds_whatever_its_defaults(tmp_path):
    """The default network has a tuple among its options, which TOML gives back as a list."""
    experiment = Experiment(**FEW)
    run(experiment, run_dir=tmp_path / "run", pictures=False)
    longer = run(experiment.replace(rounds=2), run_dir=tmp_path / "run", resume=True, pictures=False)
    assert len(longer.history.rows) == 2
    with pytest.raises(FedstillError, match="cohort was 2 and is 3"):
        run(experiment.replace(rounds=3, cohort=3), run_dir=tmp_path / "run", resume=True, pictures=False)


def test_a_line_break_is_a_space():
    assert parse("fedlmd_tf until 50\n  then fedlmd") == parse("fedlmd_tf until 50 then fedlmd")


def test_options_of_an_odd_kind_are_told_not_raised():
    with pytest.raises(FedstillError, match="weighting"):
        Experiment(method="fedprox+average(weighting=[1])")


def test_phases_that_run_backwards_are_told_before_a_folder_is_made(tmp_path):
    experiment = Experiment(method="fedavg until 5 then fedprox until 2 then fedavgm", **FEW)
    with pytest.raises(FedstillError, match="before the phase ahead"):
        run(experiment, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
