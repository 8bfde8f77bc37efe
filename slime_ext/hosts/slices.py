"""Says which tokens of a response a context-parallel rank holds, in slime and miles."""

from __future__ import annotations


def zigzag(
    total_length: int, response_length: int, cp_rank: int, cp_size: int, padded_length: int | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Finds the two shards (start, stop) of a response that a context-parallel rank holds.

    Either may be empty. The sequence is padded and cut into 2 cp_size equal chunks; under --qkv-format bshd
    ``padded_length`` is cut instead. Rank r holds chunks r and 2 cp_size - 1 - r. Shards are cut at logit
    positions, because the logit one position before a token makes its log-prob.

    >>> zigzag(12, 7, 0, 2), zigzag(12, 7, 1, 2)
    (((0, 0), (5, 7)), ((0, 2), (2, 5)))
    """
    chunk = -(-(padded_length or total_length) // (2 * cp_size))
    first_logit = total_length - response_length - 1

    def shard(index: int) -> tuple[int, int]:
        start, stop = (
            min(max(at - first_logit, 0), response_length) for at in (index * chunk, (index + 1) * chunk)
        )
        return start, stop

    return shard(cp_rank), shard(2 * cp_size - 1 - cp_rank)
