"""Experiment <-> TOML, its defaults, and a mistake in one line."""

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment

positive = st.floats(1e-6, 1e6, allow_nan=False)
share = st.floats(0.01, 0.99)

experiments = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,10}\Z"),
        "rounds": st.integers(1, 10**6),
        "cohort": st.integers(1, 10) | share,
        "seed": st.integers(0, 2**63 - 1),
        "target": share,
        "track": st.lists(st.sampled_from(["tensorboard", "mlflow", "wandb", "trackio"]), max_size=2),
        "data": st.fixed_dictionaries(
            {"source": st.text(min_size=1), "unlabeled": st.integers(0, 99) | st.text()},
            optional={"validation": st.integers(0, 99), "test_limit": st.integers(1, 99), "test_share": share},
        )
        | st.fixed_dictionaries({"client_rows": st.integers(1, 99), "unlabeled": st.just("central")}),
        "partition": st.fixed_dictionaries(
            {"scheme": st.just("lda"), "clients": st.integers(10, 99), "alpha": positive}
        ),
        "model": st.fixed_dictionaries({"name": st.just("mlp"), "hidden": st.lists(st.integers(1, 64), max_size=3)}),
        "local": st.fixed_dictionaries(
            {},
            optional={
                "epochs": st.integers(1, 99),
                "steps": st.integers(1, 99),
                "lr": positive,
                "momentum": st.floats(0, 0.99),
                "clip": positive,
                "augment": st.lists(st.sampled_from(["crop", "flip", "cutout"]), max_size=3),
            },
        ),
        "method": st.fixed_dictionaries({"name": st.just("fedprox"), "mu": st.floats(0, 10)}),
        "guard": st.fixed_dictionaries({"quorum": st.integers(0, 9) | share}),
        "engine": st.fixed_dictionaries(
            {"device": st.sampled_from(["auto", "cpu", "cuda:1"]), "graphs": st.booleans(), "compile": st.booleans()}
        ),
    },
)


def complaints(table):
    try:
        Experiment.model_validate(table)
    except FedstillError as error:
        return error.lines
    return ()


@given(experiments)
def test_an_experiment_survives_the_way_through_toml(table):
    experiment = Experiment.model_validate(table)
    assert Experiment.model_validate(tomllib.loads(experiment.to_toml())) == experiment
    resolved = Experiment.model_validate(experiment.resolved())
    assert Experiment.model_validate(tomllib.loads(resolved.to_toml())) == resolved
    assert resolved.resolved() == experiment.resolved()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.dictionaries(st.text(), x)
    )
)
def test_whatever_a_file_holds_is_an_experiment_or_one_line_for_each_mistake(value):
    lines = complaints(value if isinstance(value, dict) else {"rounds": value})
    assert all(len(line.splitlines()) == 1 for line in lines)


@pytest.mark.parametrize("table", [{"a\nb": 1}, {"name": "a\nb"}, {"local": {"l\nr": 1}}])
def test_a_line_break_in_a_key_or_value_does_not_break_the_line(table):
    (line,) = complaints(table)
    assert len(line.splitlines()) == 1


def test_a_resolved_experiment_spells_out_the_defaults_of_its_parts():
    resolved = Experiment(method={"name": "fedprox"}).resolved()
    assert resolved["method"]["mu"] == 0.01
    assert resolved["partition"]["alpha"] == 0.1


def test_a_digest_changes_with_any_key_and_only_then():
    one = Experiment()
    assert one.digest() == Experiment().digest()
    others = [one.replace(seed=1), one.replace(local={"lr": 0.02}), one.replace(method="fedprox")]
    assert len({experiment.digest() for experiment in [one, *others]}) == 4


def test_experiments_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        Experiment().rounds = 3


def test_a_mistake_in_python_is_the_same_one_line():
    with pytest.raises(FedstillError, match=r"^local\.lr = -1.0 must be a number above 0"):
        Experiment(local={"lr": -1.0})


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"unlabeled": "central"}, "data.unlabeled = 'central' needs data.client_rows: set it"),
        ({"test": "digits", "client_rows": 9}, "data.test and data.client_rows both say what the test set is"),
        ({"test": ""}, "data.test"),
        ({"validation": -1}, "data.validation = -1 must be a whole number, at least 0"),
        ({"client_rows": 0}, "data.client_rows = 0 must be a whole number, at least 1"),
        ({"test_limit": 0}, "data.test_limit = 0 must be a whole number, at least 1"),
        ({"test_share": 1.0}, "data.test_share = 1.0 must be a number above 0 and below 1"),
        ({"test_share": 0.0}, "data.test_share = 0.0 must be a number above 0 and below 1"),
        ({"label": 3}, "data.label = 3 must be a text"),
        ({"test_limitt": 3}, "did you mean 'data.test_limit'?"),
    ],
)
def test_what_cannot_be_a_test_or_validation_set_is_told_by_its_key(data, told):
    (line,) = complaints({"data": data})
    assert told in line


def test_data_keys_of_the_server_are_off_unless_asked_for():
    data = Experiment().data
    assert (data.validation, data.test, data.test_limit, data.client_rows) == (0, None, None, None)


def test_the_metric_of_the_best_model_must_exist_unless_the_evaluation_is_a_user_s():
    assert Experiment(best="macro_f1").best == "macro_f1"
    with pytest.raises(FedstillError, match="best = 'f1_macro' is no metric: did you mean 'macro_f1'"):
        Experiment(best="f1_macro")
    assert Experiment(best="cost", evaluate="mine.py:look").best == "cost"


def test_early_stopping_names_a_metric_that_exists_and_a_patience():
    assert Experiment(early_stop={"patience": 2, "metric": "auc"}).early_stop.metric == "auc"
    with pytest.raises(FedstillError, match=r"early_stop\.metric = 'f1_macro' is no metric: did you mean 'macro_f1'"):
        Experiment(early_stop={"patience": 2, "metric": "f1_macro"})
    with pytest.raises(FedstillError, match=r"early_stop\.metric needs early_stop\.patience"):
        Experiment(early_stop={"metric": "macro_f1"})
    with pytest.raises(FedstillError, match=r"early_stop\.patience = 0 must be a whole number, at least 1"):
        Experiment(early_stop={"patience": 0})
    mine = {"evaluate": "mine.py:look", "early_stop": {"patience": 1, "metric": "cost"}}
    assert Experiment(**mine).early_stop.metric == "cost"


def test_mistakes_of_all_sections_are_reported_at_once_each_with_its_key_and_its_cure():
    table = {
        "rounds": 0,
        "sed": 3,
        "data": {"sorce": "digits"},
        "partition": {"scheme": "ldaa", "clients": -6},
        "model": {"name": "mlp", "hiden": [8], "hidden": "eight"},
        "local": {"lr": "fast", "momentum": 2},
        "method": {"name": "fedprox(mu=-1)", "nu": 3},
        "server": {"aggregate": "medain", "bufers": "local"},
        "engine": {"name": "batchd", "chunk": 0},
        "guard": {"quorum": 1.5},
    }
    wanted = {
        "rounds": "at least 1",
        "sed": "'seed'",
        "data.sorce": "'data.source'",
        "partition.scheme": "'lda'",
        "partition.clients": "at least 0",
        "model.hiden": "'hidden'",
        "model.hidden": "a list of whole numbers",
        "local.lr": "a number above 0",
        "local.momentum": "below 1",
        "method.mu": "at least 0",
        "method.nu": "'mu'",
        "server.aggregate": "'median'",
        "server.bufers": "'server.buffers'",
        "engine.name": "'batched'",
        "engine.chunk": "at least 1",
        "guard.quorum": "between 0.0 and 1.0",
    }
    lines = complaints(table)
    assert len(lines) == len(wanted)
    for key, cure in wanted.items():
        (line,) = (line for line in lines if re.search(rf"(^|'){re.escape(key)}\b(?!\.)", line))
        assert cure in line


def test_a_cohort_is_compared_with_the_clients_only_where_both_are_right():
    clients = {"scheme": "iid", "clients": 6}
    assert len(complaints({"cohort": "many", "partition": clients})) == 1
    assert len(complaints({"cohort": 7, "partition": {"scheme": "iid", "clients": "six"}})) == 1
    assert len(complaints({"cohort": 7, "partition": clients, "rounds": 0})) == 2


def test_a_cohort_is_a_number_or_a_share_of_the_clients():
    partition = {"scheme": "lda", "clients": 40}
    assert Experiment(cohort=0.1, partition=partition).cohort_size(40) == 4
    assert Experiment(cohort=7, partition=partition).cohort_size(40) == 7
    assert Experiment(cohort=0.001, partition=partition).cohort_size(40) == 1
    with pytest.raises(FedstillError, match="30"):
        Experiment(cohort=35, partition=partition).cohort_size(30)  # a scheme may leave clients out


def test_a_section_with_only_its_name_may_be_a_word():
    experiment = Experiment(method="scaffold", partition="iid", model="mlp", data="digits")
    assert (experiment.method.name, experiment.partition.scheme) == ("scaffold", "iid")


def test_the_quick_start_compares_at_least_five_methods_on_embedded_non_iid_data():
    experiment = Experiment.quickstart()
    assert len(experiment.compare.methods) >= 5
    assert experiment.compare.seeds == 3
    assert experiment.data.source in ("digits", "fashion-mini")
    assert experiment.partition.options["alpha"] <= 0.1
    assert experiment.replace() == experiment


def test_an_unknown_scheme_is_told_before_its_number_of_clients():
    table = {"partition": {"scheme": "natural2", "clients": 0}}
    (line,) = complaints(table)
    assert line.startswith("partition.scheme = 'natural2' is unknown: did you mean 'natural'?")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("local.batch_size", {"local": {"batch_size": 2**31}}),
        ("student.batch_size", {"method": f"feddf(student.batch_size={2**64})"}),
        ("engine.threads", {"engine": {"threads": 2**31}}),
    ],
)
def test_a_number_whose_memory_no_machine_has_is_refused_before_it_is_taken(key, change):
    with pytest.raises(FedstillError, match=rf"{key}.*( at most|from 1 to| or below)") as caught:
        Experiment(**change)
    assert "\n" not in str(caught.value)
