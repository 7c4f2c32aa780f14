from __future__ import annotations

import dataclasses
import json

import pytest
import safetensors.torch
import torch
from desks import LIMIT, RUN, a_run, an_order, desk_of, model_of, own_part
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.types import Mechanism, Weights
from fedstill.data import hold_client_tests
from fedstill.population.desk import EVALUATION, Desk, held_by
from fedstill.population.wire import digest_of, pack_tree, seal, unpack_tree, unseal
from fedstill.privacy.plan import Privacy

NOISY = "dp_fedavg(trust='nobody', clip=1.0, noise_multiplier=8.0)"
QUESTION = "fedaux(student.steps=2, lam=1.0, form='mean', epsilon=1.0)"


@pytest.fixture
def desk(tmp_path):
    return desk_of(a_run(), tmp_path / "site")


def reply_of(desk, order):
    """The answer's facts and body."""
    return unseal(desk.answer(*order), limit=LIMIT)


def reason(desk, order):
    facts, body = reply_of(desk, order)
    assert (facts["kind"], body) == ("refused", b"")
    assert "\n" not in facts["reason"]
    return facts["reason"]


def audit_of(desk):
    return [json.loads(line) for line in (desk.folder / "audit.jsonl").read_text().splitlines()]


def test_an_honest_order_gets_an_upload_and_a_line_of_the_audit(desk):
    order = an_order(model_of(desk))
    data = desk.answer(*order)
    facts = unseal(data, limit=LIMIT).facts
    assert facts == {"order": digest_of(order[0]), "client": 1, "kind": "upload"}
    (line,) = audit_of(desk)
    assert (line["sent"], line["round"], line["from_memory_of"]) == ("upload", 1, 0)
    assert (line["order"], line["bytes_in"], line["bytes_out"]) == (facts["order"], sum(map(len, order)), len(data))


def spoiled(desk, **changes):
    return {**model_of(desk), **changes}


def with_nan(desk):
    tree = model_of(desk)
    tree["start"]["params"]["head.bias"] = torch.full_like(tree["start"]["params"]["head.bias"], torch.nan)
    return tree


def with_inf_in_a_slot(desk):
    tree = model_of(desk)
    slot = next(iter(tree["received"]))
    leaves = tree["received"][slot]
    return {**tree, "received": {slot: {name: leaf + torch.inf for name, leaf in leaves.items()}}}


def with_wider_head(desk):
    tree = model_of(desk)
    tree["start"]["params"]["head.bias"] = torch.zeros(99)
    return tree


def without_buffers(desk):
    tree = model_of(desk)
    assert tree["start"].pop("buffers") == {}
    return tree


REFUSED = {
    "another version": (model_of, {"facts": {"fedstill": "0.0.0"}}, "the server's fedstill is '0.0.0', and"),
    "another run": (model_of, {"facts": {"run": "other"}}, "the server's run is 'other', and this client's is 'a run'"),
    "another experiment": (model_of, {"facts": {"experiment": "x"}}, "the server's experiment is 'x'"),
    "no run": (model_of, {"facts": {"run": None}}, "the server's run is 'None'"),
    "unknown kind": (model_of, {"facts": {"kind": "obey"}}, "unknown kind of order: 'obey'"),
    "round 0": (model_of, {"facts": {"round": 0}}, "an order of round 0: this run has 3 rounds"),
    "a later round": (model_of, {"facts": {"round": 4}}, "an order of round 4: this run has 3 rounds"),
    "a round in words": (model_of, {"facts": {"round": "1"}}, "an order of round 1"),
    "no round": (model_of, {"facts": {"round": True}}, "an order of round True"),
    "another client's part": (model_of, {"mine": {"client": 2}}, "another client's"),
    "another order's part": (model_of, {"mine": {"order": "0" * 64}}, "do not belong together"),
    "no memory": (model_of, {"mine": {"memory_of": None}}, "cannot name the memories of rounds"),
    "memory of this round": (model_of, {"mine": {"memory_of": 1}}, "cannot name the memories"),
    "memory before the oldest": (model_of, {"facts": {"round": 3}, "mine": {"oldest": 1}}, "cannot name the memories"),
    "memory before all": (model_of, {"mine": {"memory_of": -1, "oldest": -1}}, "cannot name the memories"),
    "NaN": (with_nan, {}, "the order holds NaN or Inf"),
    "Inf in a slot": (with_inf_in_a_slot, {}, "the order holds NaN or Inf"),
    "another form": (with_wider_head, {}, r"the order/start/params/head.bias is float32 \(99,\)"),
    "no model": (lambda desk: spoiled(desk, start={}), {}, "the order lacks '/start/"),
    "a model without its empty table": (without_buffers, {}, "the order lacks '/start/buffers'"),
    "no tables": (lambda desk: spoiled(desk, received=torch.zeros(1)), {}, "something else than a model and slots"),
    "more than a model": (lambda desk: spoiled(desk, code=torch.zeros(1)), {}, "something else than a model and slots"),
    "no slot": (lambda desk: spoiled(desk, received={}), {}, "the order's slot lacks '/control"),
    "another slot": (lambda desk: spoiled(desk, received={"control": {"w": torch.zeros(1)}}), {}, "the order's slot "),
    "an unknown question": (lambda desk: {}, {"facts": {"kind": "ask", "question": "x.y"}}, "no question 'x.y'"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_an_order_is_refused_in_one_line_and_noted(desk, how):
    tree_of, changes, line = REFUSED[how]
    said = reason(desk, an_order(tree_of(desk), **changes))
    with pytest.raises(FedstillError, match=line):
        raise FedstillError(said)
    (noted,) = audit_of(desk)
    assert (noted["sent"], noted["reason"]) == ("refused", said)


def test_two_parts_of_which_one_is_of_another_order_are_refused(desk):
    first, second = an_order(model_of(desk)), an_order(model_of(desk, 1))
    assert "do not belong together" in reason(desk, (first[0], second[1]))


def test_an_order_over_the_limit_is_refused_before_it_is_opened(tmp_path):
    desk = desk_of(a_run(), tmp_path, largest=1000)
    common, own = an_order(model_of(desk))
    assert f"parcel of {len(common):,} bytes: at most 1,000" in reason(desk, (common, own))
    assert "at most 1,000" in reason(desk, (own, common))


@pytest.mark.parametrize("data", [b"", b"fedstill", b"x" * 300])
def test_bytes_that_are_no_order_are_refused_and_noted(desk, data):
    common, own = an_order(model_of(desk))
    assert "no parcel" in reason(desk, (data, own))
    assert "no parcel" in reason(desk, (common, data))
    assert "tensors" in reason(desk, (order := seal({**unseal(common, limit=LIMIT).facts}, data), own_part(order)))
    assert [line["sent"] for line in audit_of(desk)] == ["refused"] * 3


def test_a_client_goes_on_from_the_memory_that_the_server_names(desk):
    first = desk.answer(*an_order(model_of(desk)))
    later = {"facts": {"round": 2}}
    fresh, kept = (an_order(model_of(desk, 1), **later, mine={"memory_of": number}) for number in (0, 1))
    assert desk.answer(*kept) != desk.answer(*fresh)
    assert desk.answer(*an_order(model_of(desk))) == first
    assert audit_of(desk)[1]["from_memory_of"] == 1


def test_memories_that_no_checkpoint_names_are_removed(desk):
    for number in (1, 2, 3):
        mine = {"memory_of": number - 1, "oldest": max(0, number - 2)}
        assert reply_of(desk, an_order(model_of(desk), facts={"round": number}, mine=mine)).facts["kind"] == "upload"
    assert sorted(path.name for path in desk.folder.glob("memory-*")) == [
        f"memory-00000{n}.fedstill" for n in (1, 2, 3)
    ]
    desk.answer(*an_order(model_of(desk), facts={"round": 3}, mine={"memory_of": 2, "oldest": 2}))
    assert sorted(path.name for path in desk.folder.glob("memory-*")) == [f"memory-00000{n}.fedstill" for n in (2, 3)]


@pytest.mark.parametrize("begin_anew", [False, True])
def test_a_client_that_lost_its_memory_says_so_and_begins_anew_only_if_it_may(tmp_path, begin_anew):
    desk = desk_of(a_run(), tmp_path, begin_anew=begin_anew)
    lost = an_order(model_of(desk), facts={"round": 3}, mine={"memory_of": 2})
    if not begin_anew:
        assert reason(desk, lost) == "this client has no memory of round 2: it was lost"
        return
    data = unseal(desk.answer(*lost), limit=LIMIT)
    first = unseal(desk.answer(*an_order(model_of(desk), facts={"round": 3})), limit=LIMIT)
    assert (
        data.facts["begun_anew"]
        == audit_of(desk)[0]["begun_anew"]
        == "this client has no memory of round 2: it was lost"
    )
    assert data.body == first.body
    assert "begun_anew" not in first.facts


def noise_run(**changes):
    return a_run(NOISY, **changes)


def test_the_same_order_gets_the_same_bytes_in_another_process_too(tmp_path):
    desk = desk_of(noise_run(), tmp_path)
    order = an_order(model_of(desk))
    assert len({desk.answer(*order), desk.answer(*order), desk_of(noise_run(), tmp_path).answer(*order)}) == 1


def uploaded(desk, order):
    """A tensor of the model that a client sent."""
    return safetensors.torch.load(reply_of(desk, order).body)["params/head.weight"]


def test_any_other_order_gets_other_noise(tmp_path):
    """Clients hardly train here, so that an upload is its start and noise."""
    run = noise_run(training=dataclasses.replace(a_run().training, lr=1e-30))
    desk = desk_of(run, tmp_path / "a")
    tree = model_of(desk)
    orders = [an_order(tree), an_order(tree, facts={"round": 2}), an_order(tree, facts={"more": "1"})]
    sent = [uploaded(desk, order) for order in orders]
    sent.append(uploaded(desk_of(run, tmp_path / "b"), orders[0]))  # another secret
    for place, one in enumerate(sent):
        for other in sent[:place]:
            assert float((one - other).abs().max()) > 0.1


def test_one_order_that_names_two_memories_gets_two_noises(tmp_path):
    """Else the noise would cancel between two uploads that differ by what the client remembers."""
    quiet = a_run("scaffold")
    method = quiet.method[0].method
    seeds = []

    def hear(uploads, start, seed):
        seeds.append(seed)
        return uploads

    heard = dataclasses.replace(method, way=(Mechanism(per_client=hear),))
    desk = desk_of(dataclasses.replace(quiet, method=heard), tmp_path)
    desk.answer(*an_order(model_of(desk)))
    common, own = an_order(model_of(desk), facts={"round": 2}, mine={"memory_of": 1})
    for part in (own, own_part(common, memory_of=0), own):
        assert unseal(desk.answer(common, part), limit=LIMIT).facts["kind"] == "upload"
    assert seeds[1] == seeds[3]
    assert len(set(seeds)) == 3


BUDGET = Privacy(epsilon=1.5, against="server")


def budgeted(folder, **how):
    desk = desk_of(noise_run(privacy=BUDGET), folder, **how)
    assert desk.allowed == 2
    return desk


def order_number(desk, place):
    return an_order(model_of(desk, place), facts={"round": 1})


def test_a_client_at_its_budget_answers_no_other_order_after_a_restart_too(tmp_path):
    desk = budgeted(tmp_path)
    answers = [desk.answer(*order_number(desk, place)) for place in (0, 1)]
    for again in (desk, budgeted(tmp_path)):
        assert "this client's budget is spent: privacy.epsilon = 1.5 allows 2 rounds" in reason(
            again, order_number(desk, 2)
        )
        assert [again.answer(*order_number(desk, place)) for place in (0, 1)] == answers


def test_a_repeated_order_costs_no_budget(tmp_path):
    desk = budgeted(tmp_path)
    for _ in range(4):
        assert reply_of(desk, order_number(desk, 0)).facts["kind"] == "upload"
    assert reply_of(desk, order_number(desk, 1)).facts["kind"] == "upload"


def test_two_desks_over_one_folder_have_one_budget(tmp_path):
    first, second = budgeted(tmp_path), budgeted(tmp_path)
    assert reply_of(first, order_number(first, 0)).facts["kind"] == "upload"
    assert reply_of(second, order_number(first, 1)).facts["kind"] == "upload"
    assert "budget is spent" in reason(first, order_number(first, 2))


def test_an_order_is_noted_as_spent_before_its_client_trains(tmp_path):
    desk = budgeted(tmp_path)
    desk.site.play = lambda *_: 1 / 0
    reason(desk, order_number(desk, 0))
    assert len((tmp_path / "spent.jsonl").read_text().splitlines()) == 1


def test_half_a_note_of_a_machine_that_fell_is_taken_away(tmp_path):
    desk = budgeted(tmp_path)
    desk.answer(*order_number(desk, 0))
    with (tmp_path / "spent.jsonl").open("a") as file:
        file.write('{"order": "12')
    desk = budgeted(tmp_path)
    assert reply_of(desk, order_number(desk, 1)).facts["kind"] == "upload"
    assert "budget is spent" in reason(desk, order_number(desk, 2))


def test_without_its_notes_a_client_with_a_budget_does_not_start(tmp_path):
    (tmp_path / "spent.jsonl").write_text("no note\n")
    with pytest.raises(FedstillError, match="damaged"):
        budgeted(tmp_path)


def asked(desk, question, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tree = {"model": desk._first._asdict(), "negatives": torch.randn(12, 8, generator=generator)}
    return an_order(tree, facts={"kind": "ask", "question": question})


def test_a_question_is_answered_with_a_line_of_the_audit(tmp_path):
    desk = desk_of(a_run(QUESTION), tmp_path)
    (question,) = desk.task.method(1).questions
    facts, body = reply_of(desk, asked(desk, question.name))
    assert facts["kind"] == "answer"
    assert unpack_tree(body)["w"].shape == (8,)
    assert audit_of(desk)[0]["question"] == question.name


def test_a_budget_allows_one_answer_to_a_question(tmp_path):
    private = Privacy(epsilon=2.0, unit="sample", against="server", partial=True)
    desk = desk_of(a_run(QUESTION, privacy=private), tmp_path)
    (question,) = desk.task.method(1).questions
    first = desk.answer(*asked(desk, question.name))
    assert unseal(first, limit=LIMIT).facts["kind"] == "answer"
    desk = desk_of(a_run(QUESTION, privacy=private), tmp_path)
    assert desk.answer(*asked(desk, question.name)) == first
    assert "allows one answer to" in reason(desk, asked(desk, question.name, seed=1))


def test_other_rows_do_not_get_the_noise_of_the_run(tmp_path):
    here = noise_run()
    desk_of(here, tmp_path)
    desk_of(here, tmp_path)
    train = here.federation.train
    other = dataclasses.replace(here.federation, train=dataclasses.replace(train, y=(train.y + 1) % 4))
    with pytest.raises(FedstillError, match="rows or settings are not those"):
        desk_of(dataclasses.replace(here, federation=other), tmp_path)
    quiet = a_run()
    desk_of(quiet, tmp_path / "quiet")
    desk_of(dataclasses.replace(quiet, federation=other), tmp_path / "quiet")


def test_neither_secret_nor_rows_are_in_audit_or_answers(tmp_path):
    desk = desk_of(noise_run(), tmp_path)
    answers = [desk.answer(*an_order(model_of(desk))), desk.answer(b"?", b"?")]
    told = b"".join(answers) + (tmp_path / "audit.jsonl").read_bytes()
    secret, rows = (tmp_path / "secret").read_bytes(), desk.task.federation.train.x
    for kept in (secret, secret.hex().encode(), *(row.numpy().tobytes() for row in rows)):
        assert kept not in told


def test_the_text_of_an_error_of_the_client_s_own_work_stays_at_home(desk):
    def breaks(*_):
        raise ValueError("could not read 'Ada Lovelace'")

    desk.site.play = breaks
    assert reason(desk, an_order(model_of(desk))) == "ValueError in the client's own work: its audit has the text"
    assert audit_of(desk)[0]["reason"] == "ValueError: could not read 'Ada Lovelace'"


def test_what_cannot_be_noted_does_not_leave(desk):
    (desk.folder / "audit.jsonl").mkdir()
    assert reason(desk, an_order(model_of(desk))) == "this client cannot write its audit"


def test_training_that_breaks_under_noise_is_not_remembered(tmp_path):
    """Noise hides a broken model from the server, so that the client itself keeps the memory that it had."""
    quiet = a_run("scaffold", training=dataclasses.replace(a_run().training, lr=1e30))
    method = quiet.method[0].method
    hides = dataclasses.replace(method, way=(Mechanism(per_client=lambda uploads, start, seed: uploads),))
    desk = desk_of(dataclasses.replace(quiet, method=hides), tmp_path)
    desk.answer(*an_order(model_of(desk)))
    assert same_bits(desk.memory.read(1), desk.memory.first)


def test_a_memory_is_filed_under_its_client_and_run(tmp_path):
    desk = desk_of(a_run(), tmp_path)
    desk.answer(*an_order(model_of(desk)))
    other = desk_of(a_run(), tmp_path, run={**RUN, "run": "another"})
    with pytest.raises(FedstillError, match="another run's"):
        other.memory.read(1)


def test_a_tree_is_as_large_as_its_tensors():
    """So that the limits of orders are limits of models: 1 MB of floats, and what names them."""
    assert len(pack_tree({"w": torch.zeros(250_000)})) < 1_001_000


def measuring(tmp_path, **how):
    """A desk whose client holds back two of its nine rows."""
    here = a_run("fedavg", **how.pop("run", {}))
    alone = hold_client_tests(held_by(here.federation, 1), 0.2, seed=0)
    return Desk(dataclasses.replace(here, federation=alone), 1, tmp_path, run=RUN, **{"evaluates": True, **how})


def to_measure(desk, number=1, **mine):
    facts = {"kind": "ask", "question": EVALUATION, "round": number}
    return an_order(model_of(desk)["start"], facts=facts, mine=mine)


def test_a_client_counts_what_a_model_gets_right_on_the_rows_that_it_holds_back(tmp_path):
    desk = measuring(tmp_path)
    facts, body = reply_of(desk, to_measure(desk))
    federation = desk.task.federation
    held = federation.client_test[0]
    weights = Weights(**model_of(desk)["start"])
    logits = desk.task.model.apply(weights, federation.train.x[held], training=False, weight=None, seed=None)[0].logits
    chances = logits.double().softmax(dim=1)[torch.arange(len(held)), federation.train.y[held]]
    measured = unpack_tree(body)
    assert facts["kind"] == "answer"
    assert int(measured["count"]) == len(held) == 2
    assert int(measured["right"]) == int((logits.argmax(dim=1) == federation.train.y[held]).sum())
    assert float(measured["loss"]) == pytest.approx(-float(chances.log().sum()), rel=1e-5)


def test_a_model_is_measured_after_its_round(tmp_path):
    """The memory that an order names may be that round's own."""
    desk = measuring(tmp_path)
    assert reply_of(desk, to_measure(desk, 2, memory_of=2))[0]["kind"] == "answer"
    assert "cannot name the memories" in reason(desk, to_measure(desk, 2, memory_of=3))


def test_a_client_measures_nothing_without_consent_without_rows_or_under_a_budget(tmp_path):
    desk = measuring(tmp_path / "a", evaluates=False)
    assert "did not agree" in reason(desk, to_measure(desk))
    desk = desk_of(a_run("fedavg"), tmp_path / "b", evaluates=True)
    assert "holds back no rows" in reason(desk, to_measure(desk))
    budget = Privacy(epsilon=50.0, against="server")
    desk = desk_of(a_run(NOISY, privacy=budget), tmp_path / "c", evaluates=True)
    assert "has no noise" in reason(desk, to_measure(desk))


def test_a_model_of_another_form_is_not_measured(tmp_path):
    desk = measuring(tmp_path)
    order = an_order({"params": {}, "buffers": {}}, facts={"kind": "ask", "question": EVALUATION})
    assert "the model to measure lacks" in reason(desk, order)
