"""Builds a sample's token sequences from completions and observations, so that no loop splices masks and spans by hand.

    turns = TrajectoryBuilder()
    turns.append(await generate(turns.response))     # sampled: trained
    turns.append(tool_tokens)                        # observed: not trained
    turns.append(await generate(turns.response))
    return turns.sample(index)

A loop that rewrites its history, tries several continuations or starts a sub-agent makes further sequences, with
`branch` and `start`. Whatever the sequences share, each completion is trained exactly once: by the first of them that
has it. Their order is that in which each builder made its children: make those of concurrent agents before the first of
them waits, so that timing cannot change it. A child continues with ``generate(child.response, prefix=child.prefix)``.

A loop that rewards turns calls `reward` after each; the sample's reward is then their discounted sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl.rollouter.agents.base import Completion
from asyncrl.types.columns import Buffer, Layout
from asyncrl.types.prompts import Message
from asyncrl.types.samples import TOKEN_REWARDS, FinishReason, Sample, TokenSequence
from asyncrl.types.versions import PolicyVersion, VersionSpan

_STATE = Layout("trajectory", b"ARLT")

Part = Completion | np.ndarray | Sequence[int]


class TrajectoryBuilder:
    """One sequence in the making, and the tree that it belongs to. ``prefix``: tokens of the prompt that it begins
    with; None: all."""

    def __init__(self, prefix: int | None = None) -> None:
        self.prefix = prefix
        self._parts: list[Completion | np.ndarray] = []
        self._turns_before = 0  # completions of the sequences from which it was started, until then
        self._response = np.empty(0, np.int32)
        self._children: list[TrajectoryBuilder] = []
        self._root = self
        self._messages: list[Message] = []  # the root's
        self._rewards: dict[int, float] = {}  # the root's; by the identity of completions

    @property
    def response(self) -> np.ndarray:
        """int32 [R]: all tokens after the prefix so far; what `Generate` continues."""
        return self._response

    @property
    def messages(self) -> list[Message]:
        """Chat messages and tool calls of the whole tree, in JSON's types, for a reward function; append to it."""
        return self._root._messages

    @property
    def completions(self) -> int:
        """Number of its completions so far."""
        return len(self._completions)

    @property
    def finish(self) -> FinishReason | None:
        """Why its last completion ended; None before the first."""
        return self._completions[-1].finish if self._completions else None

    def append(self, part: Part) -> None:
        """Add a completion, which the policy sampled, or tokens that it only read. Raises ValueError for a completion
        that the sequence has already."""
        if isinstance(part, Completion):
            if any(part is other for other in self._parts):
                raise ValueError("a completion was appended twice to one sequence; expected each of them once")
            tokens = part.tokens
        else:
            part = tokens = np.asarray(part, np.int32)
        self._parts.append(part)
        self._response = np.concatenate([self._response, tokens])

    def reward(self, reward: float) -> None:
        """Add to the reward of the last completion. Raises ValueError before the first, and for one that is not
        finite."""
        if not math.isfinite(reward):
            raise ValueError(f"a turn's reward: expected a finite number, found {reward}")
        if not self._completions:
            raise ValueError("a reward before the first completion: expected one to which it belongs")
        rewards, last = self._root._rewards, id(self._completions[-1])
        rewards[last] = rewards.get(last, 0.0) + reward

    def branch(self) -> TrajectoryBuilder:
        """A further sequence that begins with all tokens so far."""
        child = self.start(self.prefix)
        child._parts, child._response, child._turns_before = list(self._parts), self._response, self._turns_before
        return child

    def start(self, prefix: int | None = 0) -> TrajectoryBuilder:
        """A further sequence that begins with ``prefix`` tokens of the prompt (None: all): a sub-agent, or the task
        with a compacted history."""
        child = TrajectoryBuilder(prefix)
        child._root, child._turns_before = self._root, self._turns_before + self.completions
        self._children.append(child)
        return child

    def sample(
        self,
        index: int,
        finish: FinishReason | None = None,
        reward: float | None = None,
        discount: float = 1.0,
        whole: bool = False,
    ) -> Sample:
        """The sample of the whole tree. ``finish``: by default of this sequence's last completion. Sequences that would
        train nothing are left out and, unless ``whole``, what a sequence only reads after its last completion. With
        ``whole``, the last sequence trains what it shares with others: it ends in the answer that is scored, which the
        policy may not have sampled as it is trained.

        ``reward``: of the whole sample. If turns were rewarded, it is added to this sequence's last completion (the
        tree's, if this has none), and the sample's is Σ ``discount``ᵏ r over all completions, each of reward r and with
        k others before it: in its sequence, and in those from which this was started. Each r also stands in the column
        ``token_rewards`` (float32 [R]) at the completion's last token. Raises ValueError if nothing was sampled."""
        tree = self._root._tree()
        before: dict[int, int] = {}  # completions before each
        for builder in tree:
            for k, completion in enumerate(builder._completions, builder._turns_before):
                before.setdefault(id(completion), k)
        finish = self.finish if finish is None else finish
        rewards = dict(self._root._rewards)
        if rewards:
            last = id(self._completions[-1]) if self._completions else next(reversed(before))
            rewards[last] = rewards.get(last, 0.0) + (reward or 0.0)
            reward = sum(discount**k * rewards.get(turn, 0.0) for turn, k in before.items())
        untrained = set(before)
        order = [tree[-1], *tree[:-1]] if whole else tree
        made = {id(builder): builder._sequence(untrained, rewards, whole) for builder in order}
        sequences = [sequence for builder in tree if (sequence := made[id(builder)]) is not None]
        if finish is None or not sequences:
            raise ValueError("a trajectory without a completion: expected at least one call of generate")
        return Sample(index, sequences, finish, reward, messages=list(self.messages))

    @property
    def _completions(self) -> list[Completion]:
        return [part for part in self._parts if isinstance(part, Completion)]

    def _tree(self) -> list[TrajectoryBuilder]:
        """This sequence, then its children's, in the order of their making."""
        return [self, *(builder for child in self._children for builder in child._tree())]

    def _sequence(self, untrained: set[int], rewards: Mapping[int, float], whole: bool) -> TokenSequence | None:
        """The sequence, which trains those of its completions that are ``untrained`` (by identity), and removes them
        there; None if it trains nothing."""
        parts = list(self._parts)
        while not whole and parts and not isinstance(parts[-1], Completion):
            parts.pop()
        count = sum(len(part.tokens if isinstance(part, Completion) else part) for part in parts)
        logprobs, mask = np.zeros(count, np.float32), np.zeros(count, bool)
        token_rewards = np.zeros(count, np.float32)
        spans: list[VersionSpan] = []
        at = 0
        for part in parts:
            if not isinstance(part, Completion):
                at += len(part)
                continue
            end = at + len(part.tokens)
            logprobs[at:end] = part.logprobs
            spans += [span._replace(start=span.start + at) for span in part.spans]
            if id(part) in untrained:
                untrained.remove(id(part))
                mask[at:end] = True
                token_rewards[max(end - 1, 0) : end] += rewards.get(id(part), 0.0)
            at = end
        if not mask.any():
            return None
        spans[0] = spans[0]._replace(start=0)  # each span also covers the observations after it, the first those before
        extras = {TOKEN_REWARDS: token_rewards} if rewards else {}
        return TokenSequence(self._response[:count], logprobs, mask, spans, self.prefix, extras)

    # -- state -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The whole tree, for ``generate.save``. This builder is the one that `from_bytes` returns."""
        tree = self._root._tree()
        unique: dict[int, Completion | np.ndarray] = {id(p): p for builder in tree for p in builder._parts}
        number = {key: i for i, key in enumerate(unique)}
        place = {id(builder): i for i, builder in enumerate(tree)}
        sampled = [p for p in unique.values() if isinstance(p, Completion)]
        spans = [(i, *x.version, x.mixed_kv, x.start) for i, p in enumerate(sampled) for x in p.spans]
        meta = {
            "uid": "",
            "current": place[id(self)],
            "prefixes": [builder.prefix for builder in tree],
            "turns_before": [builder._turns_before for builder in tree],
            "children": [[place[id(child)] for child in builder._children] for builder in tree],
            "parts": [[number[id(p)] for p in builder._parts] for builder in tree],
            "finish": [int(p.finish) if isinstance(p, Completion) else -1 for p in unique.values()],
            "replicas": [x.replica for p in sampled for x in p.spans],
            "rewards": [(number[key], reward) for key, reward in self._root._rewards.items()],
            "messages": self.messages,
        }
        tokens = [p.tokens if isinstance(p, Completion) else p for p in unique.values()]
        columns = {
            "lengths": np.array([len(t) for t in tokens], np.int64),
            "tokens": _joined(tokens, np.int32),
            "logprobs": _joined([p.logprobs for p in sampled], np.float32),
            "spans": np.array(spans, np.int64).reshape(-1, 5),
        }
        return _STATE.to_bytes(meta, columns)

    @classmethod
    def from_bytes(cls, data: Buffer) -> TrajectoryBuilder:
        """Raises ValueError for a buffer that is not a trajectory's."""
        meta, columns = _STATE.from_buffer(data)
        spans: dict[int, list[VersionSpan]] = {}
        for (i, lineage, number, mixed, start), replica in zip(
            columns["spans"].tolist(), meta["replicas"], strict=True
        ):
            spans.setdefault(i, []).append(VersionSpan(start, PolicyVersion(lineage, number), bool(mixed), replica))
        parts: list[Completion | np.ndarray] = []
        at = logprob_at = sampled = 0
        for length, finish in zip(columns["lengths"].tolist(), meta["finish"], strict=True):
            tokens = columns["tokens"][at : at + length]
            at += length
            if finish < 0:
                parts.append(tokens)
                continue
            logprobs = columns["logprobs"][logprob_at : logprob_at + length]
            parts.append(Completion(tokens, logprobs, spans.get(sampled, []), FinishReason(finish)))
            logprob_at, sampled = logprob_at + length, sampled + 1
        tree = [cls(prefix) for prefix in meta["prefixes"]]
        columns_of_tree = zip(tree, meta["turns_before"], meta["children"], meta["parts"], strict=True)
        for builder, turns_before, children, numbers in columns_of_tree:
            builder._root = tree[0]
            builder._turns_before = turns_before
            builder._children = [tree[child] for child in children]
            builder._parts = [parts[n] for n in numbers]
            builder._response = _joined(
                [p.tokens if isinstance(p, Completion) else p for p in builder._parts], np.int32
            )
        tree[0]._rewards = {id(parts[n]): reward for n, reward in meta["rewards"]}
        tree[0]._messages = meta["messages"]
        return tree[meta["current"]]


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
