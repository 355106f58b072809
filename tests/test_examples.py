"""The examples run, and what they claim is true."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flax import nnx

import jkv

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def hybrid_decode() -> ModuleType:
    """examples/hybrid_decode.py as a module; it is a program, not part of the package."""
    spec = importlib.util.spec_from_file_location("hybrid_decode", EXAMPLES / "hybrid_decode.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(hybrid_decode: ModuleType) -> Any:
    """One server for the tests below: a model step compiles for seconds."""
    steps = hybrid_decode.make_steps(hybrid_decode.Model(nnx.Rngs(0)))
    return hybrid_decode.Server(steps, hybrid_decode.cache_config())


def test_hybrid_decode_overlapped_matches_reuses_and_compiles_little(hybrid_decode: ModuleType, server: Any) -> None:
    result = hybrid_decode.measure(server, requests=32, seed=0)
    warm, cold = result.with_reuse, result.without_reuse
    assert result.ok, warm.check.first_mismatch or cold.check.first_mismatch
    assert len(warm.requests) == len(cold.requests) == 32
    assert warm.check.tokens >= 300 and warm.check.near_ties + cold.check.near_ties <= 3
    assert cold.reused == 0
    assert warm.reused >= 0.4 * sum(len(request.prompt) for request in warm.requests)
    assert warm.reopened > 0, "pages are meant to run out, so that requests are closed and reopened"
    assert result.compiled_warmup <= 8
    assert warm.compiled == cold.compiled == 0
    server.manager.check()


def test_hybrid_decode_follow_up_turns_reuse_the_whole_conversation(hybrid_decode: ModuleType, server: Any) -> None:
    """One conversation, alone: a follow-up recomputes its new message only."""
    message = hybrid_decode.bytes_of("where is it? ")
    server.serve([(0, hybrid_decode.Request("1.1", message, max_new=20, later=[message, message]))])
    assert len(server.done) == 3
    for previous, request in itertools.pairwise(server.done):
        stopped = previous.generated[-1] == hybrid_decode.STOP
        # Without a stop the last id was sampled, but never an input; with one the step in flight had it as its input.
        assert request.reused == [len(previous.text) - (not stopped)]
    assert hybrid_decode.check_tokens(server.steps, server.done).ok


def test_hybrid_decode_notices_a_cache_that_loses_a_state(hybrid_decode: ModuleType, server: Any) -> None:
    """The convolution states of one layer of six are lost at every tenth step."""
    steps, count = server.steps, itertools.count(1)

    def forgetful(state: jkv.CacheState, *args: Any) -> Any:
        if next(count) % 10 == 0:
            state = jkv.with_pool(state, "2.ssm", "conv", jkv.pool(state, "2.ssm", "conv") * 0)
        return steps.step(state, *args)

    server.steps = dataclasses.replace(steps, step=forgetful)
    try:
        server.serve(hybrid_decode.make_arrivals(4, seed=0))
    finally:
        server.steps = steps
    check = hybrid_decode.check_tokens(steps, server.done)
    assert check.mismatches > 0 and "with the cache" in check.first_mismatch


def test_hybrid_decode_fails_on_a_mismatch(
    hybrid_decode: ModuleType, server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = hybrid_decode.Check(tokens=100, mismatches=1, first_mismatch="request 1.1, token 3 of its answer: ...")
    serving = hybrid_decode.Serving([], [], 1.0, 1, 0, check)
    monkeypatch.setattr(hybrid_decode, "Server", lambda *args, **kwargs: server)
    monkeypatch.setattr(hybrid_decode, "measure", lambda *args: hybrid_decode.Result(0, serving, serving))
    assert hybrid_decode.main(["--quiet"]) == 1
    assert capsys.readouterr().out.startswith("FAILED: 2 of 200 generated tokens differ")


def test_hybrid_decode_command_line(hybrid_decode: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert hybrid_decode.main(["--requests", "4", "--seed", "2", "--sync"]) == 0
    output = capsys.readouterr().out
    assert "kept for reuse" in output and "variants in the warm-up" in output
    assert output.splitlines()[-1].startswith("OK: all ")
