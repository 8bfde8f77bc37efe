"""The client against a server that fails in every way we know."""

from __future__ import annotations

import threading
import time

import pytest

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.client import EngineClient
from slime_ext.launcher.rollout.processes import hold_port
from slime_ext.launcher.rollout.protocol import SamplingParams, n_dropped
from slime_ext.launcher.task.prompts import Prompt
from tests.launcher.rollout.stand_in import StandIn

SAMPLING = SamplingParams(4, n=2)


def requests(count=6):
    return [Prompt("", group_index=g, ids=(3 + g, 5, 6)) for g in range(count)]


def client(server, **options):
    return EngineClient(server.url, **{"timeout": 20.0, "backoff": 0.01, "recovery_timeout": 30.0, **options})


def indices(groups):
    return [sample.index for group in groups for sample in group]


def test_groups_come_in_the_order_of_the_requests(stand_in):
    groups = client(stand_in).generate(requests(), SAMPLING)
    assert indices(groups) == list(range(12))
    assert [group[0].tokens[:3] for group in groups] == [list(r.ids) for r in requests()]


@pytest.mark.parametrize("fault", [500, 503, 429, "drop", "text"])
def test_a_passing_failure_repeats_only_its_own_request(stand_in, fault):
    stand_in.faults.append(fault)
    asked = client(stand_in)
    groups = asked.generate(requests(), SAMPLING)
    assert indices(groups) == list(range(12)) and not any(
        sample.dropped for group in groups for sample in group
    )
    assert len(stand_in.prompts) == 7


def test_a_request_that_hangs_is_repeated_after_its_timeout(stand_in):
    stand_in.faults.append("hang")
    asked = client(stand_in, timeout=1.0)
    assert indices(asked.generate(requests(2), SAMPLING)) == list(range(4))
    assert len(stand_in.prompts) == 3


def test_a_refusal_is_final_and_in_the_servers_words(stand_in):
    stand_in.faults.append(400)
    with pytest.raises(EngineError, match=r"status 400: asked to fail with 400"):
        client(stand_in).generate(requests(1), SAMPLING)
    assert len(stand_in.prompts) == 1


def test_a_server_that_keeps_failing_is_given_up(stand_in):
    stand_in.faults.extend([500] * 9)
    with pytest.raises(
        EngineError, match=r"prompt of group 0: expected .* got status 500 \(asked to fail with 500\) 3 times"
    ):
        client(stand_in, retries=2).generate(requests(1), SAMPLING)
    assert len(stand_in.prompts) == 3


def test_damaged_samples_are_dropped_and_counted(stand_in):
    stand_in.faults.extend(["nan", "missing", "nan"])
    asked = client(stand_in, concurrency=1)
    groups = asked.generate(requests(), SAMPLING)
    dropped = n_dropped(sample for group in groups for sample in group)
    assert dropped == {"non-finite log-prob": 2, "no log-probs in the answer": 1}
    assert [group[0].remove_sample for group in groups] == [True] * 3 + [False] * 3
    assert len(stand_in.prompts) == 6  # dropped, not repeated


def test_no_more_requests_at_once_than_allowed(stand_in):
    stand_in.pause_s = 0.05
    client(stand_in, concurrency=3).generate(requests(9), SAMPLING)
    assert stand_in.most_running == 3


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
    asked = client(stand_in, retries=1)
    monkeypatch.setattr(asked, "weight_version", lambda: "2")
    with pytest.raises(EngineError, match=r"expected weight version 3 .*, got 2"):
        asked.update_weights_from_disk(tmp_path, 3)


def test_a_long_wait_says_what_is_waited_for(monkeypatch):
    monkeypatch.setattr("slime_ext.launcher.rollout.client.SAY_S", 0.0)
    said = []
    with hold_port() as held, pytest.raises(EngineError, match="within 1 s"):
        away = EngineClient(f"http://127.0.0.1:{held.getsockname()[1]}")
        away.wait_healthy(0.6, said.append)
    assert said[0] == "waiting for the rollout engine, 0 s of 1 s (sglang.log)"


def test_no_server_at_all_is_one_line():
    with hold_port() as held:
        asked = EngineClient(f"http://127.0.0.1:{held.getsockname()[1]}", recovery_timeout=0.1)
        with pytest.raises(EngineError, match=r"expected an answer from .*/health within 0 s, got none"):
            asked.generate(requests(1), SAMPLING)
        assert not asked.health()


class Outage:
    """A server that is replaced by an empty one when `after` requests were asked, `deaths` times."""

    def __init__(self, server, tmp_path, after=3, away_s=0.3, deaths=1):
        self.servers, self.after, self.away_s, self.deaths = [server], after, away_s, deaths
        self.asked = client(server, concurrency=2, backoff=0.05)
        self.asked.update_weights_from_disk(tmp_path, 5)
        self.versions = []

    def generate(self, count=12):
        killer = threading.Thread(target=self.kill)
        killer.start()
        try:
            return self.asked.generate(requests(count), SAMPLING)
        finally:
            killer.join()
            self.servers[-1].close()

    def kill(self):
        for _ in range(self.deaths):
            while len(self.servers[-1].prompts) < self.after:
                time.sleep(0.001)
            self.servers[-1].close()
            time.sleep(self.away_s)
            self.servers.append(StandIn(self.servers[0].server_port))
            self.servers[-1].pause_s = 0.01


@pytest.mark.parametrize(("away_s", "deaths"), [(0.0, 1), (0.6, 1), (0.3, 2)])
def test_after_an_outage_nothing_is_lost_and_nothing_asked_twice(stand_in, tmp_path, away_s, deaths):
    stand_in.pause_s = 0.01
    outage = Outage(stand_in, tmp_path, away_s=away_s, deaths=deaths)
    groups = outage.generate()
    assert indices(groups) == list(range(24))
    assert {version for group in groups for s in group for version in s.weight_versions} == {"5"}
    asked = [tuple(prompt) for server in outage.servers for prompt in server.prompts]
    assert (
        len(outage.servers) == 1 + deaths and len(asked) <= 12 + 2 * deaths
    )  # what was under way, once more


def test_a_restarted_server_gets_its_weights_before_the_first_request(stand_in, tmp_path):
    asked = client(stand_in)
    asked.update_weights_from_disk(tmp_path, 5)
    stand_in.version = "default"
    assert {s.weight_versions[0] for g in asked.generate(requests(2), SAMPLING) for s in g} == {"5"}


def test_samples_of_unknown_weights_are_asked_for_again(stand_in, tmp_path):
    asked = client(stand_in, concurrency=1)
    asked.update_weights_from_disk(tmp_path, 5)
    stand_in.pause_s = 0.05
    threading.Timer(0.12, lambda: setattr(stand_in, "version", "default")).start()
    groups = asked.generate(requests(), SAMPLING)
    assert {version for group in groups for s in group for version in s.weight_versions} == {"5"}
    assert len(stand_in.prompts) == 7


def test_a_server_that_dies_between_the_push_and_its_check_gets_the_weights_again(stand_in, tmp_path):
    """The second of two kills in a row: it is there again at once, without them."""
    asked, ask = client(stand_in), EngineClient.weight_version
    deaths = iter(["default", "default"])

    def dying(self):
        stand_in.version = next(deaths, stand_in.version)
        return ask(self)

    asked.weight_version = dying.__get__(asked)
    asked.update_weights_from_disk(tmp_path, 5)
    assert stand_in.version == "5"


def test_an_error_under_status_200_is_repeated_and_then_final(stand_in):
    for fault in ("error", "errors", "nothing"):
        stand_in.faults.append(fault)
        before = len(stand_in.prompts)
        groups = client(stand_in).generate(requests(1), SAMPLING)
        assert not any(sample.dropped for sample in groups[0]) and len(stand_in.prompts) == before + 2
    stand_in.always = "error"
    with pytest.raises(EngineError, match=r"status 200 without a response \(out of memory\) 3 times"):
        client(stand_in, retries=2).generate(requests(1), SAMPLING)
