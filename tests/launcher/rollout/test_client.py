"""The client against a server that fails in every way we know."""

from __future__ import annotations

import threading
import time

import pytest

from slime_ext.errors import DataError, EngineError
from slime_ext.launcher.rollout.client import EngineClient, GenerateRequest, SamplingParams
from slime_ext.launcher.rollout.processes import hold_port
from tests.launcher.rollout.stand_in import StandIn

SAMPLING = SamplingParams(4)


def requests(count=6, n=2):
    return [GenerateRequest([3 + g, 5, 6], g, n) for g in range(count)]


def client(server, **options):
    return EngineClient(server.url, **{"timeout": 20.0, "backoff": 0.01, "recovery_timeout": 30.0, **options})


def indices(groups):
    return [sample.index for group in groups for sample in group]


def test_groups_come_in_the_order_of_the_requests(stand_in):
    groups = client(stand_in).generate(requests(), SAMPLING, rollout_id=4)
    assert indices(groups) == list(range(12))
    assert [group[0].tokens[:3] for group in groups] == [list(r.prompt_ids) for r in requests()]
    assert {sample.rollout_id for group in groups for sample in group} == {4}


@pytest.mark.parametrize("fault", [500, 503, 429, "drop", "text"])
def test_a_passing_failure_repeats_only_its_own_request(stand_in, fault):
    stand_in.faults.append(fault)
    asked = client(stand_in)
    groups = asked.generate(requests(), SAMPLING)
    assert indices(groups) == list(range(12)) and not any(
        sample.dropped for group in groups for sample in group
    )
    assert len(stand_in.prompts) == 7 and asked.last_stats.retried == 1


def test_a_request_that_hangs_is_repeated_after_its_timeout(stand_in):
    stand_in.faults.append("hang")
    asked = client(stand_in, timeout=1.0)
    assert indices(asked.generate(requests(2), SAMPLING)) == list(range(4))
    assert asked.last_stats.retried == 1


def test_a_refusal_is_final_and_in_the_servers_words(stand_in):
    stand_in.faults.append(400)
    with pytest.raises(EngineError, match=r"status 400: asked to fail with 400"):
        client(stand_in).generate(requests(1), SAMPLING)
    assert len(stand_in.prompts) == 1


def test_a_server_that_keeps_failing_is_given_up(stand_in):
    stand_in.faults.extend([500] * 9)
    with pytest.raises(EngineError, match=r"prompt of group 0: expected .* got status 500 3 times"):
        client(stand_in, retries=2).generate(requests(1), SAMPLING)
    assert len(stand_in.prompts) == 3


def test_damaged_samples_are_dropped_and_counted(stand_in):
    stand_in.faults.extend(["nan", "missing", "nan"])
    asked = client(stand_in, concurrency=1)
    groups = asked.generate(requests(), SAMPLING)
    assert asked.last_stats.dropped == {"non-finite log-prob": 2, "no log-probs in the answer": 1}
    assert [group[0].remove_sample for group in groups] == [True] * 3 + [False] * 3
    assert len(stand_in.prompts) == 6  # dropped, not repeated


def test_no_more_requests_at_once_than_allowed(stand_in):
    stand_in.pause_s = 0.05
    client(stand_in, concurrency=3).generate(requests(9), SAMPLING)
    assert stand_in.most_running == 3


def test_progress_counts_every_request_once(stand_in):
    stand_in.faults.extend([500, 500])
    seen = []
    client(stand_in).generate(requests(), SAMPLING, on_finish=lambda done, total: seen.append((done, total)))
    assert seen == [(k, 6) for k in range(1, 7)]


def test_a_bad_prompt_is_refused_before_anything_is_sent(stand_in):
    with pytest.raises(DataError, match=r"got 64"):
        client(stand_in, vocab_size=64).generate([*requests(), GenerateRequest([64], 9)], SAMPLING)
    assert stand_in.prompts == []


def test_new_weights_are_verified(stand_in, tmp_path):
    asked = client(stand_in)
    asked.update_weights_from_disk(tmp_path, 3)
    assert asked.weight_version() == "3"


def test_weights_that_the_server_refuses_are_an_error(stand_in, tmp_path):
    with pytest.raises(EngineError, match=r"status 400: no such directory"):
        client(stand_in).update_weights_from_disk(tmp_path / "absent", 3)


def test_weights_pushed_while_the_server_is_away_arrive_when_it_is_back(stand_in, tmp_path):
    asked = client(stand_in)
    stand_in.close()
    back = []
    later = threading.Timer(0.4, lambda: back.append(StandIn(stand_in.server_port)))
    later.start()
    asked.update_weights_from_disk(tmp_path, 3)
    later.join()
    assert back[0].version == "3"
    back[0].close()


def test_weights_that_did_not_arrive_are_an_error(stand_in, tmp_path, monkeypatch):
    asked = client(stand_in)
    monkeypatch.setattr(asked, "weight_version", lambda: "2")
    with pytest.raises(EngineError, match=r"expected weight version 3 .*, got 2"):
        asked.update_weights_from_disk(tmp_path, 3)


def test_no_server_at_all_is_one_line():
    with hold_port() as held:
        asked = EngineClient(f"http://127.0.0.1:{held.getsockname()[1]}", recovery_timeout=0.1)
        with pytest.raises(EngineError, match=r"expected an answer from .*/health within 0 s, got none"):
            asked.generate(requests(1), SAMPLING)
        assert not asked.health()


class Outage:
    """Kills a stand-in when `after` requests are done and starts an empty one in its place."""

    def __init__(self, server, tmp_path, after=3, away_s=0.3):
        self.servers, self.after, self.away_s, self.path = [server], after, away_s, tmp_path
        self.asked = client(server, concurrency=2, ensure_weights=self.push, backoff=0.05)
        self.pushes = 0
        self.asked.update_weights_from_disk(tmp_path, 5)

    def push(self):
        self.pushes += 1
        self.asked.update_weights_from_disk(self.path, 5)

    def on_finish(self, done, total):
        if done == self.after:
            self.servers[0].close()
            threading.Thread(target=self.back).start()

    def back(self):
        time.sleep(self.away_s)
        self.servers.append(StandIn(self.servers[0].server_port))

    def generate(self, count=12):
        try:
            return self.asked.generate(requests(count), SAMPLING, on_finish=self.on_finish)
        finally:
            self.servers[-1].close()


@pytest.mark.parametrize("away_s", [0.0, 0.6])
def test_after_an_outage_nothing_is_lost_and_nothing_asked_twice(stand_in, tmp_path, away_s):
    outage = Outage(stand_in, tmp_path, away_s=away_s)
    groups = outage.generate()
    assert indices(groups) == list(range(24))
    assert {version for group in groups for s in group for version in s.weight_versions} == {"5"}
    assert outage.pushes == 1 and outage.asked.last_stats.outages == 1
    first, second = ({tuple(prompt) for prompt in server.prompts} for server in outage.servers)
    assert len(first & second) <= 2  # only what was under way when the server died


def test_after_an_outage_the_trainer_is_asked_even_if_it_never_pushed(stand_in, tmp_path):
    outage = Outage(stand_in, tmp_path, away_s=0.6)
    outage.asked.pushed_version, outage.asked.pushed_versions = None, set()
    assert indices(outage.generate()) == list(range(24)) and outage.pushes == 1


def test_a_restarted_server_gets_its_weights_before_the_first_request(stand_in, tmp_path):
    outage = Outage(stand_in, tmp_path, after=-1)
    stand_in.version = "default"
    outage.generate(2)
    assert outage.pushes == 1


def test_without_a_way_to_push_other_weights_are_an_error(stand_in, tmp_path):
    asked = client(stand_in)
    asked.update_weights_from_disk(tmp_path, 5)
    stand_in.version = "default"
    with pytest.raises(EngineError, match=r"expected weight version 5, got default"):
        asked.generate(requests(1), SAMPLING)


def test_samples_of_unknown_weights_are_asked_for_again(stand_in, tmp_path):
    outage = Outage(stand_in, tmp_path, after=-1)
    outage.on_finish = lambda done, total: done == 1 and setattr(stand_in, "version", "default")
    groups = outage.generate()
    assert {version for group in groups for s in group for version in s.weight_versions} == {"5"}
    assert outage.pushes == 1
