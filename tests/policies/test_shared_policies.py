"""One policy shared by modules, threads and copies."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
import torch

from attnscale import LengthPolicy, build_policy, scaled_dot_product_attention


def test_threads_may_meet_at_the_first_use_of_a_shared_policy():
    q = torch.randn(1, 1, 12, 8)
    failures: list[BaseException] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(150):
            policy, start = build_policy("log", gamma=2 + turn / 1000), threading.Barrier(4)

            def work(policy: LengthPolicy = policy, start: threading.Barrier = start) -> None:
                start.wait()
                try:
                    scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_calls_only_read_a_policy(copied):
    q, policy = torch.randn(1, 1, 12, 8), copied(build_policy("log"))
    before = dict(policy.__dict__)
    scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy)
    assert policy.__dict__.keys() == before.keys()
    assert all(policy.__dict__[name] is value for name, value in before.items())
