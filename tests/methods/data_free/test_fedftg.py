"""FedFTG: its forms, and what it is on top of other methods."""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest
import torch
from papers import released
from server_rounds import LOCAL as TRAINING
from server_rounds import federation, network, run
from toy import furthest, same_bits
from whole_server import as_one, whole

from fedstill.about.toy import trial_federation, trial_model
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Need, Phase
from fedstill.methods import METHODS, fedavg, fedftg
from fedstill.methods.data_free.inventing import Generator, InventedStudent
from fedstill.methods.lookup import build_method
from fedstill.privacy.plan import Privacy
from fedstill.server.aggregate import average

SHORT = {"iterations": 2, "batch_size": 4, "generator": Generator(noise=3), "student": InventedStudent(steps=2, lr=0.3)}
TINY = "fedftg(iterations=2, student.steps=2, batch_size=4, generator.noise=3, student.lr=0.3)"
ELSEWHERE = {"simclr", "masked_lm", "next_token", "fedftg"}  # images or text, and itself
SERVERS = {"avglogit", "avgprob", "feddf", "feddf_gen", "fedaux", "fedbe", "mrtf", "d2cfl"}  # refine models too
BASES = [name for name in METHODS if name not in ELSEWHERE]
LOCAL = ["fedavg", "fedprox", "scaffold", "feddyn", "fedcurv", "moon", "fedmmd", "kd", "fedntd", "fedlmd", "fedlmd_tf"]
LOCAL += ["fednova", "fedavgm", "fedrs", "label_smoothing"]
QUICK = {
    "student": "student.steps=2",
    "generator": "generator.steps=2",
    "batch_size": "batch_size=8",
    "samples": "samples=2",
}


def method_of(text: str):
    (phase,) = build_method(text)
    return phase.method


def quick(name: str) -> str:
    """A server's own training, short."""
    known = inspect.signature(METHODS[name]).parameters
    options = [text for key, text in QUICK.items() if key in known] if name in SERVERS else []
    return f"{name}({', '.join(options)})" if options else name


@pytest.mark.parametrize("base", BASES)
def test_without_iterations_it_is_its_base_method_bit_for_bit(base):
    joined, alone = (
        run(method_of(text), rounds=2, privacy=Privacy(reproducible=True)).weights
        for text in (f"{quick(base)}+fedftg(iterations=0)", quick(base))
    )
    assert same_bits(joined, alone)


@pytest.mark.parametrize("base", ["fedavg", "scaffold", "feddyn", "moon", "fedlmd"])
def test_with_iterations_it_changes_its_base_method(base):
    assert furthest(run(method_of(f"{base}+{TINY}"), rounds=1).weights, run(method_of(base), rounds=1).weights) > 1e-6


def test_alone_it_is_fedavg_with_fine_tuning():
    alone, joined = (run(method_of(text), rounds=2).weights for text in (TINY, f"fedavg+{TINY}"))
    assert same_bits(alone, joined)
    assert same_bits(run(fedftg(iterations=0)).weights, run(fedavg()).weights)


@pytest.mark.parametrize("base", ["fedavg", "scaffold"])
def test_the_model_before_fine_tuning_can_be_reported_and_training_is_the_same(base):
    tuned, average = (
        run(method_of(f"{base}+{text}"), rounds=3) for text in (TINY, TINY.replace(")", ', report="average")'))
    )
    rows, others = tuned.history.rows, average.history.rows
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in others]
    assert [row["accuracy_aggregated"] for row in rows] == [row["accuracy"] for row in others]
    assert [row["accuracy"] for row in rows] == [row["accuracy_sent"] for row in others]
    assert all("accuracy_aggregated" not in row for row in others), "it would be told twice"
    assert furthest(tuned.weights, average.weights) > 1e-6


def compositions() -> list[str]:
    """Ten pairs of local methods that can be joined, drawn from all pairs."""
    generator = numpy_generator(seed_for(0, "fedftg compositions"))
    pairs, found = list(itertools.combinations(LOCAL, 2)), list[str]()
    for i in generator.permutation(len(pairs)):
        text = "+".join((*pairs[i], TINY))
        try:
            method_of(text)
        except FedstillError:
            continue
        found.append(text)
        if len(found) == 10:
            break
    return found


def test_the_draw_of_compositions_is_wide():
    drawn = compositions()
    assert len(set(drawn)) == 10
    assert len({name for text in drawn for name in text.split("+")}) >= 10


@pytest.mark.parametrize("text", compositions())
def test_the_same_step_refines_any_local_composition(text):
    result = run(method_of(text), rounds=2)
    base = run(method_of(text.removesuffix(f"+{TINY}")), rounds=2)
    assert furthest(result.weights, base.weights) > 1e-6
    for row in result.history.rows:
        assert {"server/generator_loss", "server/student_loss", "server/samples_right"} <= set(row)
        assert 0 <= row["server/samples_right"] <= 1
        assert "accuracy_aggregated" in row


def watched(text, rounds=3):
    """[(candidate before the round's last step, what was sent next, the round, server state after it)]."""
    method = method_of(text)
    seen = []

    def apply(candidate, state, round):
        after, new = whole(method).apply(candidate, state, round)
        seen.append((after, round, new))
        return after, new

    run(as_one(method, apply=apply), rounds=rounds)
    return seen


def test_scaffolds_controls_refer_to_the_fine_tuned_model_that_was_sent():
    """Option II: c_k+ - c_k = (w - w_k) / travel - c, with w as received and c as broadcast."""
    first, second, _ = watched(f"scaffold+{TINY}")
    sent, aggregated = first[0], first[1].models["aggregated"]
    assert furthest(sent, aggregated) > 1e-5
    assert same_bits(second[1].start, sent)
    uploads, control = second[1].uploads, first[2]["control"]["control"]

    def gap(start):
        return max(
            float(
                (
                    (start.params[name] - uploads.weights.params[name])
                    / uploads.travel.reshape(-1, *[1] * leaf.ndim).to(leaf)
                    - leaf
                    - uploads.extra["control_delta"][name]
                ).abs().max()
            )
            for name, leaf in control.items()
        )  # fmt: skip

    assert gap(sent) < 1e-5
    assert gap(aggregated) > 1e-5


def test_feddyns_memory_refers_to_the_fine_tuned_model_that_was_sent():
    """h <- h - alpha (|S| / N) mean_k (w_k - w), with w as received."""
    first, second, _ = watched(f"feddyn(alpha=0.1)+{TINY}")
    sent, aggregated = first[0], first[1].models["aggregated"]
    before, after = (step[2]["dyn"]["dyn_mean"] for step in (first, second))
    uploads, share = second[1].uploads, 4 / 5

    def gap(start):
        return max(
            float((before[n] - 0.1 * share * (uploads.weights.params[n] - start.params[n]).mean(0) - leaf).abs().max())
            for n, leaf in after.items()
        )

    assert gap(sent) < 1e-6
    assert gap(aggregated) > 1e-6


def test_joined_it_takes_the_other_methods_average():
    """FedAvg weighs by size, SCAFFOLD evenly; neither has to be told."""
    for base, weighting in (("fedavg", "size"), ("scaffold", "uniform"), ("fedprox", "size")):
        for text in (f"{base}+fedftg", f"fedftg+{base}"):
            assert method_of(text).aggregate == average(weighting)
    assert method_of("fedftg+fednova").aggregate.name == "normalized_average"
    assert fedftg().aggregate == average("size")
    assert method_of("scaffold+fedftg+average").aggregate == average("size")


def test_defaults_are_those_of_the_released_code_but_for_one_generator_step_on_all_clients_and_eval_mode():
    """Card 14.3."""
    defaults = {name: one.default for name, one in inspect.signature(fedftg).parameters.items()}
    assert (defaults["iterations"], defaults["batch_size"], defaults["discrepancy"]) == (10, 50, "l1")
    generator, student = defaults["generator"], defaults["student"]
    assert (generator.steps, generator.noise, generator.lam_cls, generator.lam_dis) == (1, 100, 1.0, 1.0)
    assert (generator.lr, generator.lr_decay, generator.weight_decay) == (0.01, 0.998, 0.0)
    assert (student.steps, student.lr, student.lr_decay, student.weight_decay) == (5, 0.1, 0.998, 1e-3)
    assert student.batch_norm == "frozen"


PAPER = {"discrepancy": "kl", "discrepancy_through": "both", "student_loss": "reverse_kl", "student_scale": "batch"}
RELEASED = {"clients": "each", "cls_weights": "client"}
TRAIN = {"student": dataclasses.replace(SHORT["student"], batch_norm="train")}
FORMS = {"correct": fedftg(**SHORT)}
FORMS |= {
    name: released("fedftg", "fedftg")(**{**SHORT, **TRAIN, **form})
    for name, form in {"paper": PAPER, "released": RELEASED}.items()
}


def test_the_printed_and_the_released_form_are_other_methods():
    models = [run(method, rounds=1).weights for method in FORMS.values()]
    assert all(furthest(one, other) > 1e-7 for one, other in itertools.combinations(models, 2))


def test_the_papers_file_has_fedftg_itself_as_its_default():
    assert same_bits(run(released("fedftg", "fedftg")(**SHORT)).weights, run(fedftg(**SHORT)).weights)


@pytest.mark.parametrize("form", FORMS)
def test_clients_trained_together_or_in_turn_give_the_same_model(form):
    """In float64: in float32 the generator's Adam makes whole steps of gradients that are nothing but rounding."""
    exact = {"engine_options": {"precision": "float64"}, "rounds": 2}
    together, in_turn = (run(FORMS[form], engine=engine, **exact).weights for engine in ("batched", "looped"))
    assert furthest(together, in_turn) < 1e-9


@pytest.mark.parametrize(
    "ablation",
    [
        {"discrepancy": "none"},
        {"labels": "uniform"},
        {"ensemble": "uniform"},
        {"generator": Generator(noise=3, lam_cls=0.0)},
        {"generator": Generator(noise=3, lam_dis=0.0)},
        {"student_loss": "mse"},
        {"input": "feature"},
        {"clients": "each"},
    ],
    ids=str,
)
def test_every_ablation_of_the_papers_tables_is_another_method(ablation):
    build = released("fedftg", "fedftg")
    found, plain = (run(build(**{**SHORT, **options}), rounds=2).weights for options in (ablation, {}))
    assert furthest(found, plain) > 1e-7


def test_features_come_from_a_generator_without_bounds_and_samples_from_a_normalised_one():
    """FedGen's dense layers; the last norm, which has statistics and no parameters, is that of inputs alone."""
    for options, ends_normalised in (("", True), (', input="feature"', False)):
        text = TINY.removesuffix(")") + options + ")"
        ((_, _, state),) = watched(text, rounds=1)
        kept = state["hard_samples"]["hard_generator"]
        assert ("4.running_mean" in kept["buffers"]) == ends_normalised
        assert ("samples" in state["hard_samples"]) == ends_normalised


def test_with_features_it_refines_the_head_of_linear_evaluation_alone():
    how = {"training": dataclasses.replace(TRAINING, part="head"), "rounds": 2}
    found, base = (run(one, **how).weights for one in (fedftg(**SHORT, input="feature"), fedavg()))
    for name, leaf in base.params.items():
        assert torch.equal(found.params[name], leaf) != name.startswith("head.")


def test_text_is_refused_before_the_first_round_and_served_by_features():
    text = {"model": trial_model(text=True), "federation": trial_federation(text=True), "rounds": 1}
    with pytest.raises(FedstillError, match=r"numbers, not words: .*method\.input = 'feature'"):
        run(fedftg(**SHORT), **text)
    result = run(fedftg(**SHORT, input="feature"), **text)
    assert "server/samples_right" in result.history.rows[0]


def test_label_counts_leave_clients_unless_nothing_is_made_of_them():
    asks = {Need.LABEL_COUNTS_UPLOADED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    assert needs_of(fedftg()) == asks
    assert Need.HEAD in needs_of(fedftg(input="feature"))
    without = method_of(fedftg().without_counts)
    assert needs_of(without) == asks - {Need.LABEL_COUNTS_UPLOADED}
    assert run(
        method_of('fedftg(labels="uniform", ensemble="uniform", iterations=1, batch_size=4, generator.noise=3)'),
        rounds=1,
    )


def test_a_generator_goes_on_when_another_local_method_takes_over():
    seen = []

    def overheard(text):
        method = method_of(text)
        (step,) = method.server

        def apply(candidate, state, round):
            after, new = step.apply(candidate, state, round)
            seen.append((state["hard_generator"], new["hard_generator"]))
            return after, new

        return dataclasses.replace(method, server=(dataclasses.replace(step, apply=apply),))

    run((Phase(overheard(TINY), 1), Phase(overheard(f"fedprox(mu=0.1)+{TINY}"))), rounds=2)
    (first, trained), (second, _) = seen
    assert furthest(first, trained) > 1e-3
    assert same_bits(second, trained)


def test_it_runs_where_a_class_and_all_but_one_client_are_missing():
    data = federation()
    only = torch.nonzero(data.train.y[data.indices] < 2).flatten()
    offsets = torch.tensor([0, *[min(int(o), len(only)) for o in data.offsets[1:]]])
    fewer = dataclasses.replace(data, indices=data.indices[only], offsets=offsets)
    result = run(fedftg(**SHORT), federation=fewer, cohort=1, rounds=2)
    assert all(bool(leaf.isfinite().all()) for leaf in result.weights.params.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"iterations": -1}, "iterations = -1 must be a whole number, at least 0"),
        ({"batch_size": 1}, "batch_size = 1 must be a whole number, at least 2"),
        ({"generator": {"noise": 0}}, r"method\.generator\.noise = 0 must be a whole number"),
        ({"student": {"lr": 0.0}}, r"method\.student\.lr = 0\.0 must be a number above 0"),
        ({"generator": {"lr_decay": 0.0}}, r"method\.generator\.lr_decay = 0\.0 must be"),
        ({"discrepancy": "none", "generator": {"lam_cls": 0.0, "lam_dis": 0.0}}, "leaves the generator nothing to"),
        ({"discrepancy": "l2"}, r'discrepancy = "l2" is unknown'),
        ({"student": {"batch_norm": "froze"}}, "did you mean 'frozen'"),
        ({"input": "features"}, "did you mean 'feature'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(options, told):
    with pytest.raises(FedstillError, match=told) as error:
        build_method("fedftg", options)
    assert "\n" not in str(error.value)


def test_an_unknown_or_unfit_generator_is_told_before_the_first_round():
    with pytest.raises(FedstillError, match=r"generator\.network = 'covn' is unknown: did you mean 'conv'"):
        run(fedftg(generator=Generator("covn")), rounds=1)
    with pytest.raises(FedstillError, match="makes images"):
        run(fedftg(generator=Generator("conv")), rounds=1, model=network())
