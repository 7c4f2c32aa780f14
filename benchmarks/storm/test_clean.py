"""A small part of the clean rounds; `python benchmarks/storm/clean.py` plays 1,000."""

from storm.clean import audits


def test_no_honest_client_is_refused_where_clients_differ_most():
    cases = [("fedavg", "lda 0.05"), ("scaffold", "uneven sizes")]
    assert [records for *_, records in audits(30, seed=3, cases=cases)] == [[], []]
