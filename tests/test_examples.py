"""The examples run, and what they claim is true."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jkv

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The examples are programs, not part of the package; they import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


# ---- hybrid_decode ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid_decode(importable: None) -> ModuleType:
    return importlib.import_module("hybrid_decode")


@pytest.fixture(scope="module")
def server(hybrid_decode: ModuleType) -> Any:
    """One server for the tests below: a model step compiles for seconds."""
    steps = hybrid_decode.make_steps(hybrid_decode.Model(nnx.Rngs(0)))
    return hybrid_decode.Server(steps, hybrid_decode.cache_config())


@pytest.fixture
def main_with_server(hybrid_decode: ModuleType, server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """main(argv) of the example on that server."""

    def make_server(steps: Any, config: jkv.CacheConfig, overlap: bool) -> Any:
        monkeypatch.setattr(server, "overlap", overlap)
        return server

    monkeypatch.setattr(hybrid_decode, "Server", make_server)
    return hybrid_decode.main


def test_hybrid_decode_overlapped_matches_reuses_and_compiles_little(hybrid_decode: ModuleType, server: Any) -> None:
    result = hybrid_decode.measure(server, requests=32, seed=0)
    warm, cold = result.with_reuse, result.without_reuse
    assert result.ok, warm.check.first_mismatch or cold.check.first_mismatch
    assert len(warm.requests) == len(cold.requests) == 32
    assert warm.check.tokens >= 300 and warm.check.near_ties + cold.check.near_ties <= 3
    assert cold.reused == 0
    assert warm.reused >= 0.5 * sum(len(request.prompt) for request in warm.requests)
    assert warm.reopened > 0, "pages are meant to run out, so that requests are closed and reopened"
    assert result.compiled_warmup <= 8
    assert warm.compiled == cold.compiled == 0
    server.manager.check()


def test_hybrid_decode_mixes_prompts_and_decodes_in_one_step(
    hybrid_decode: ModuleType, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt arrives while others decode: they go on with a token per step, and its chunks fill the rest."""
    steps, counts = server.steps, []

    def spy(state: jkv.CacheState, sampled: Any, batch: jkv.Ragged, tokens: Any) -> Any:
        counts.append(np.diff(batch.cu_q_lens)[: batch.num_seqs[0]].tolist())
        return steps.step(state, sampled, batch, tokens)

    monkeypatch.setattr(server, "steps", dataclasses.replace(steps, step=spy))
    short, long = hybrid_decode.bytes_of("where is it? "), list(range(65, 255))
    make = hybrid_decode.Request
    server.serve([(0, make("1.1", short, 12, [])), (0, make("2.1", short[1:], 12, [])), (3, make("3.1", long, 2, []))])
    assert hybrid_decode.check_tokens(server.steps, server.done).ok
    mixed = [each for each in counts if each[:2] == [1, 1] and len(each) == 3 and each[2] > 1]
    assert sum(each[2] for each in mixed) == len(long)


def test_hybrid_decode_waits_for_a_prefix_that_another_request_is_computing(
    hybrid_decode: ModuleType, server: Any
) -> None:
    """Three prompts arrive at once; what they share is computed once."""
    shared = hybrid_decode.bytes_of(hybrid_decode.SYSTEM_PROMPTS[1])
    ends = [hybrid_decode.bytes_of(end) for end in ("where is it? ", "is it near? ", "what is it? ")]
    server.serve([(0, hybrid_decode.Request(f"{i}.1", shared + end, 4, [])) for i, end in enumerate(ends, 1)])
    reused = sorted(request.reused[0] for request in server.done)
    whole_pages = len(shared) - len(shared) % hybrid_decode.PAGE_SIZE
    assert reused == [0, whole_pages, whole_pages]
    assert hybrid_decode.check_tokens(server.steps, server.done).ok


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
    hybrid_decode: ModuleType,
    main_with_server: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = hybrid_decode.Check(tokens=100, mismatches=1, first_mismatch="request 1.1, token 3 of its answer: ...")
    serving = hybrid_decode.Serving([], [], 1.0, 1, 0, check)
    monkeypatch.setattr(hybrid_decode, "measure", lambda *args: hybrid_decode.Result(0, serving, serving))
    assert main_with_server(["--quiet"]) == 1
    assert capsys.readouterr().out.startswith("FAILED: 2 of 200 generated tokens differ")


def test_hybrid_decode_command_line(main_with_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_with_server(["--requests", "4", "--seed", "2", "--sync"]) == 0
    output = capsys.readouterr().out
    assert "kept for reuse" in output and "variants in the warm-up" in output
    assert output.splitlines()[-1].startswith("OK: all ")


# ---- group_sampling --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group_sampling(importable: None) -> ModuleType:
    return importlib.import_module("group_sampling")


def test_group_sampling_forks_are_the_same_samples_in_fewer_pages(
    group_sampling: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, measure = {}, group_sampling.measure
    monkeypatch.setattr(group_sampling, "measure", lambda *args: results.update(measure(*args)) or results)
    assert group_sampling.main(["--samples", "4", "--tokens", "20", "--seed", "1"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == "OK: all 80 tokens of 4 samples are the same in each of 3 ways"
    fork, same_scope, apart = (results[way] for way in group_sampling.WAYS)
    assert fork.texts == same_scope.texts == apart.texts
    assert len(set(map(tuple, fork.texts))) == 4, "the samples differ from each other"
    assert fork.prefilled * 4 == same_scope.prefilled == apart.prefilled
    prompt, page = len(group_sampling.PROMPT) - 1, group_sampling.PAGE_SIZE
    pages = -(-(prompt + 20) // page)  # of one sample
    assert apart.pages == 4 * pages
    assert fork.pages == same_scope.pages == prompt // page + 4 * (pages - prompt // page)
    assert fork.states == same_scope.states == apart.states == 4


def test_group_sampling_fails_where_a_sample_differs(
    group_sampling: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = group_sampling.Result([[1, 2], [3, 4]], prefilled=5, pages=2, states=2, seconds=0.1)
    bad = dataclasses.replace(good, texts=[[1, 2], [3, 5]])
    monkeypatch.setattr(group_sampling, "measure", lambda *args: {"fork": good, "max_reuse=0": bad})
    assert group_sampling.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: max_reuse=0: samples [1] differ from those of the fork"


# ---- offload ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offload(importable: None) -> Iterator[ModuleType]:
    """With a smaller model and one shape of a step: compiled sooner."""
    module = importlib.import_module("offload")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LAYERS", ("ssm", "full"))
        patch.setattr(module, "STEP_TOKENS", (64,))
        patch.setattr(module, "PER_CONVERSATION", {"full": 40, "recurrent": 8})
        yield module


@pytest.fixture(scope="module")
def offload_result(offload: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six conversations of three turns; room for one on the device and for two in host memory."""
    return offload.measure(6, 3, 1, 2, str(tmp_path_factory.mktemp("store")), 0)


def test_offload_reuses_from_every_tier_and_gets_every_token_right(offload: ModuleType, offload_result: Any) -> None:
    assert offload_result.check.ok, offload_result.check.first_mismatch
    assert offload_result.check.tokens == 6 * 3 * offload.ANSWER
    assert {turn.tier for turn in offload_result.turns} == {"device", "host", "store", "nowhere"}
    for turn in offload_result.turns:
        # Known is all but the last token of the answer before: it was sampled, but never an input.
        first_turn = turn.request.name.endswith(".1")
        assert sum(turn.tiers.values()) == (0 if first_turn else len(turn.request.prompt) - offload.MESSAGE - 1)
    tiers = offload_result.stats.tiers
    assert tiers["store"].failures == tiers["host"].failures == {}


def test_offload_command_line(
    offload: ModuleType, offload_result: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "measure", lambda *args: offload_result)
    assert offload.main(["--conversations", "6"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[-1].startswith("OK: all 144 generated tokens equal the recomputation without a cache")
    assert [line.split()[0] for line in output[-7:-3]] == ["device", "host", "store", "nowhere"]
    for option in ("--turns", "--device", "--host", "--conversations"):
        with pytest.raises(SystemExit):
            offload.main([option, "0"])
        assert f"{option} must be" in capsys.readouterr().err


def test_offload_fails_on_a_mismatch(
    offload: ModuleType, offload_result: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = dataclasses.replace(offload_result.check, mismatches=1, first_mismatch="request 1.1, token 3 ...")
    monkeypatch.setattr(offload, "measure", lambda *args: dataclasses.replace(offload_result, check=check))
    assert offload.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: 1 of 144 generated tokens differ")


# ---- disaggregated -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disaggregated(importable: None) -> ModuleType:
    return importlib.import_module("disaggregated")


def test_disaggregated_gets_every_token_right_and_moves_what_is_lacking(
    disaggregated: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three conversations of two turns, in two processes, with a smaller model: compiled sooner."""
    turns, check = transferred = disaggregated.measure(3, 0, ("ssm", "window", "full"))
    assert check.ok, check.first_mismatch
    assert check.tokens == 3 * 2 * disaggregated.ANSWER
    first, second, third, *later = turns
    assert first.start == second.start == third.start == first.prefilled.reused == 0
    assert third.prefilled.reused == disaggregated.DOCUMENT  # where the second left the first, it left a state
    for turn in later:
        assert turn.start == len(turn.request.prompt) - disaggregated.MESSAGE - 1  # all but the answer's last token
        assert 0 < turn.prefilled.reused < turn.start  # the answer never was where prompts are computed
        assert turn.nbytes < first.nbytes / 2

    monkeypatch.setattr(disaggregated, "measure", lambda *args: transferred)
    assert disaggregated.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK: all 72 generated tokens equal")
    check = dataclasses.replace(check, mismatches=1, first_mismatch="request 1.1, token 3 ...")
    monkeypatch.setattr(disaggregated, "measure", lambda *args: (turns, check))
    assert disaggregated.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: 1 of 72 generated tokens differ")
    with pytest.raises(SystemExit):
        disaggregated.main(["--conversations", "0"])
    assert "--conversations must be" in capsys.readouterr().err


# ---- speculative_decode ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speculative_decode(importable: None) -> ModuleType:
    return importlib.import_module("speculative_decode")


@pytest.fixture(scope="module")
def decoders(speculative_decode: ModuleType) -> dict[str, Any]:
    return {way: make() for way, make in speculative_decode.WAYS.items()}


@pytest.fixture(scope="module")
def speculative_results(speculative_decode: ModuleType, decoders: dict[str, Any]) -> dict[str, Any]:
    return {way: speculative_decode.measure(decoders[way], 64) for way in ("candidates", "checkpoint")}


def check_speculative(result: Any, drafts: int) -> None:
    assert result.mismatches == []
    counts = collections.Counter(result.accepted)
    assert counts[0] >= 10 and counts[drafts] >= 10 and sum(counts[j] for j in range(1, drafts)) >= 3
    assert result.steps < result.plain_steps == 64


@pytest.mark.parametrize("way", ["candidates", "checkpoint"])
def test_speculative_decode_of_a_hybrid_model(
    speculative_decode: ModuleType, speculative_results: dict[str, Any], way: str
) -> None:
    check_speculative(speculative_results[way], speculative_decode.DRAFTS)


def test_speculative_decode_overlapped_needs_fewer_steps_for_the_same_drafts(
    speculative_results: dict[str, Any],
) -> None:
    """The device drafts on its own in one way, the host in the other; the other runs accepted tokens again."""
    candidates, checkpoint = speculative_results["candidates"], speculative_results["checkpoint"]
    assert candidates.accepted == checkpoint.accepted
    assert candidates.steps <= 0.75 * checkpoint.steps


def test_speculative_decode_of_a_tree(
    speculative_decode: ModuleType, decoders: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []  # tokens that a step ran again, since the second branch of the step before was right
    run_trees = speculative_decode.Tree.run_trees

    def spy(self: Any, texts: Any, tokens: Any, parents: Any) -> Any:
        again.extend(len(text.missing) - 1 for text, tree in zip(texts, parents, strict=True) if tree[-1] < len(tree))
        return run_trees(self, texts, tokens, parents)

    monkeypatch.setattr(speculative_decode.Tree, "run_trees", spy)
    check_speculative(speculative_decode.measure(decoders["tree"], 64), speculative_decode.DRAFTS)
    assert sum(again) > 0


def test_speculative_decode_notices_a_state_after_a_rejected_draft(
    speculative_decode: ModuleType, decoders: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on from the state after all drafts, whatever was accepted."""
    decoder, load = decoders["candidates"], speculative_decode.CandidateStates.load

    def load_last(self: Any, layer: str) -> Any:
        self.accepted = self.accepted * 0 + speculative_decode.DRAFTS
        return load(self, layer)

    monkeypatch.setattr(speculative_decode.CandidateStates, "load", load_last)
    traced_anew = jax.jit(lambda *args: decoder._verify(*args), donate_argnums=1)
    monkeypatch.setattr(decoder, "verify", traced_anew)
    result = speculative_decode.measure(decoder, 24)
    assert len(result.mismatches) == len(speculative_decode.PROMPTS)


def test_speculative_decode_command_line(
    speculative_decode: ModuleType,
    speculative_results: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(speculative_decode.WAYS, "checkpoint", lambda: "checkpoint")
    monkeypatch.setattr(speculative_decode, "measure", lambda way, tokens: speculative_results[way])
    assert speculative_decode.main(["--mode", "checkpoint", "--tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("checkpoint")
    assert lines[-1] == "OK: all 256 tokens equal plain greedy decoding (checkpoint)"
    with pytest.raises(SystemExit):
        speculative_decode.main(["--tokens", "0"])


def test_speculative_decode_fails_on_a_mismatch(
    speculative_decode: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = speculative_decode.Result("tree", 8, 4, [0, 3], 32, ["tree, text 2, id 70: 5, not 6"])
    monkeypatch.setattr(speculative_decode, "WAYS", dict.fromkeys(speculative_decode.WAYS, list))
    monkeypatch.setattr(speculative_decode, "measure", lambda *args: result)
    assert speculative_decode.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: 3 texts differ from plain greedy decoding")
