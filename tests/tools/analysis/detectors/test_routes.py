"""The sampler's experts as they are recorded."""

from __future__ import annotations

import torch

from slime_ext.tools.analysis.readers.routes import odd_routes
from slime_ext.tools.analysis.readers.samples import DumpedSample
from tests.tools.analysis.detectors.toys import edited, findings, run

PROMPT, RESPONSE, LAYERS, ACTIVE, EXPERTS = 30, 40, 3, 2, 16


def pair(edit=lambda routed: routed, seed=0):
    g = torch.Generator().manual_seed(seed)
    routed = torch.randint(EXPERTS, (PROMPT + RESPONSE - 1, LAYERS, ACTIVE), generator=g)
    row = DumpedSample(seed, RESPONSE, prompt_length=PROMPT)
    return row, DumpedSample(seed, RESPONSE, prompt_length=PROMPT, routed=edit(routed))


def repeated(begin, count):
    def edit(routed):
        routed[begin : begin + count] = routed[begin]
        return routed

    return edit


def test_rows_that_repeat_are_counted_and_whether_they_are_in_the_prompt():
    pairs = [pair(repeated(5, 20)), pair(repeated(35, 12), 1), pair(seed=2), pair(repeated(5, 4), 3)]
    counted = odd_routes(pairs)
    assert (counted["routed"], counted["repeated"], counted["repeated_prompt"]) == (4, 2, 1)
    assert counted["repeated_tokens"] == 32 and not counted["misfit"]


def test_a_text_that_repeats_a_token_is_routed_alike_for_a_good_reason():
    def told(ids):
        row, sample = pair(repeated(35, 20))
        sample.ids = ids
        return odd_routes([(row, sample)])["repeated"]

    ids = list(range(PROMPT + RESPONSE))
    assert told(ids) == 1 and told(torch.tensor(ids)) == 1
    assert told(ids[:35] + [7] * 20 + ids[55:]) == 0


def test_a_sample_with_the_rows_of_a_longer_one_does_not_fit():
    longer = odd_routes([pair(lambda routed: torch.cat([routed, routed[:15]])), pair(seed=1)])
    assert longer["misfit"] == 1
    whole = odd_routes([pair(lambda routed: torch.cat([routed, routed[:1]]))])  # a row for every token
    assert not whole["misfit"]


def test_replaying_experts_that_repeat_is_no_remedy():
    counts = {"routed": 64, "repeated": 32, "repeated_tokens": 640, "repeated_prompt": 32}
    found = findings(edited(run(), lambda r: {"routing": counts}))
    assert set(found) == {"repeated_routes"} and "Do not replay" in found["repeated_routes"].fix
    found = findings(edited(run(), lambda r: {"routing": {"routed": 64, "misfit": 16}}))
    assert set(found) == {"route_lengths"} and "no remedy" in found["route_lengths"].fix
    assert findings(edited(run(), lambda r: {"routing": {"routed": 64}})) == {}
