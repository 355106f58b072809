"""The examples run, and what they claim is true."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import pytest

import jkv

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def hybrid_decode() -> ModuleType:
    """examples/hybrid_decode.py as a module; it is a program, not part of the package."""
    spec = importlib.util.spec_from_file_location("hybrid_decode", EXAMPLES / "hybrid_decode.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_hybrid_decode_overlapped_matches_reuses_and_compiles_little(hybrid_decode: ModuleType) -> None:
    result = hybrid_decode.measure(requests=20, seed=0)
    warm, cold = result.with_reuse, result.without_reuse
    assert result.ok, warm.check.first_mismatch or cold.check.first_mismatch
    assert len(warm.requests) == len(cold.requests) == 20
    assert warm.check.tokens >= 200 and warm.check.near_ties + cold.check.near_ties <= 3
    assert cold.reused == 0
    assert warm.reused >= 0.5 * sum(len(request.prompt) for request in warm.requests)
    assert warm.reopened > 0, "the pool is meant to be too small, so that requests are closed and reopened"
    assert result.compiled_warmup <= 16
    assert warm.compiled == cold.compiled == 0


def test_hybrid_decode_follow_up_turns_reuse_the_whole_conversation(hybrid_decode: ModuleType) -> None:
    """One conversation, alone: a follow-up recomputes its new message only."""
    steps = hybrid_decode.make_steps(hybrid_decode.Model(hybrid_decode.nnx.Rngs(0)))
    server = hybrid_decode.Server(steps, hybrid_decode.cache_config())
    ids = hybrid_decode.bytes_of("where is it? ")
    server.serve([(0, hybrid_decode.Request("1.1", ids, max_new=20, later=[ids, ids]))])
    server.manager.check()
    previous = None
    for request in server.done:
        if previous is not None:
            stopped = previous.generated[-1] == hybrid_decode.STOP
            assert request.reused == [len(previous.text) - (not stopped)]  # the last sampled id was never an input
        previous = request
    assert len(server.done) == 3


def test_hybrid_decode_command_line(hybrid_decode: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert hybrid_decode.main(["--requests", "4", "--seed", "2", "--sync"]) == 0
    output = capsys.readouterr().out
    assert "kept for reuse" in output and "variants in the warm-up" in output
    assert output.splitlines()[-1].startswith("OK: all ")


def test_hybrid_decode_fails_when_the_cache_is_wrong(
    hybrid_decode: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution state that is lost between steps: a small error in one of two buffers of three layers."""
    read_state = jkv.read_state

    def forgetful(state: jkv.CacheState, layer: str, rows: jnp.ndarray) -> dict[str, jnp.ndarray]:
        values = read_state(state, layer, rows)
        return values | {"conv": jnp.zeros_like(values["conv"])}

    monkeypatch.setattr(jkv, "read_state", forgetful)
    assert hybrid_decode.main(["--requests", "2", "--quiet"]) == 1
    assert "FAILED" in capsys.readouterr().out
