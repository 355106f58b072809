"""What the host half keeps of each cached token."""

from benchmarks.bench_memory import measure_bookkeeping


def test_at_most_8_bytes_per_cached_token():
    tokens = 200_000
    kept = measure_bookkeeping(tokens, prompts=10)
    assert 4 < kept.cached / tokens <= 8, kept.lines.most_common(5)
