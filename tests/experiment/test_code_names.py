"""Every key of an experiment that can name code is found, and no other key is."""

from __future__ import annotations

import pytest

from fedstill.experiment.code_names import code_names

TABLES = [
    ({"method": "a.py:f"}, ["a.py:f"]),
    ({"method": {"name": "fedavg until 5 then fedprox+a.py:f(mu=0.1)"}}, ["a.py:f"]),
    ({"model": "a b/net.py:Net"}, ["a b/net.py:Net"]),
    ({"model": {"name": "mixed", "prototypes": ["cnn", "net:Net(width=8)"]}}, ["net:Net"]),
    ({"evaluate": "a.py:look"}, ["a.py:look"]),
    ({"engine": {"name": "a.py:Engine", "device": "cuda:0"}}, ["a.py:Engine"]),
    ({"engine": "ray", "cluster": {"address": "10.0.0.1:6379"}}, ["10.0.0.1:6379"]),
    ({"engine": "ray", "cluster": {"address": "auto", "engine": "a:f"}}, ["a:f"]),
    ({"compare": {"over": ["cluster.address=somewhere://x"]}}, ["somewhere://x"]),
    ({"compare": {"methods": ["fedavg", "a:f"]}}, ["a:f"]),
    ({"compare": {"methods": ["fedavg,a:f"]}}, ["a:f"]),
    ({"compare": {"over": ["local.lr=0.1,0.2", "method=fedavg,a:f"]}}, ["a:f"]),
    ({"compare": {"over": ["engine.name=auto,a:f"]}}, ["a:f"]),
    ({"compare": {"over": ['model={name="mlp"},{name="a:f"}']}}, ["a:f"]),
    ({"compare": {"over": ['model={name="mixed", prototypes=["b:g"]}']}}, ["b:g"]),
    ({"data": {"source": "owner/name:configuration"}, "engine": {"device": "cuda:1"}}, []),
    ({"method": 3, "model": ["mlp"], "compare": "x", "evaluate": None}, []),
    ({"method": "(("}, []),
]


@pytest.mark.parametrize(("table", "names"), TABLES)
def test_names_of_code_are_found_where_the_loader_would_look(table, names):
    assert code_names(table) == names
