"""The native engine's core under random schedules, compared with forward passes without a cache."""

import numpy as np
import pytest
import torch

from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.rollouter.engines.base import Request, Scheduling
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.sampler import uniforms
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import make_request, read

VOCABULARY, CONTEXT = 24, 48
STOP_STRINGS = ("bb", "cab")


class Letters:
    """Tokenizer in which token 0 is a, 1 is b and so on."""

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(chr(ord("a") + t) for t in token_ids)


def _decoder(mtp_layers: int) -> Decoder:
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "num_nextn_predict_layers": mtp_layers,
        "tie_word_embeddings": True,
    }
    decoder = Decoder(DecoderConfig.from_dict(raw))
    decoder.init_weights(mtp_layers, std=0.3)
    return decoder


class Schedule:
    """Submits, aborts, moves between two cores and finishes requests, in an order drawn from ``rng``."""

    def __init__(
        self, rng: np.random.Generator, decoder: Decoder, k: int, deterministic: bool, look_ahead: bool
    ) -> None:
        self._rng, self._most = rng, k
        self.cores = [self._core(decoder, k, deterministic, look_ahead) for _ in range(2)]
        self.requests = self._requests()
        self.drawn: dict[str, tuple[list[int], np.ndarray]] = {r.id: ([], np.empty(0)) for r in self.requests}
        self.finish: dict[str, FinishReason] = {}
        self.cuts = 0

    def _core(self, decoder: Decoder, k: int, deterministic: bool, look_ahead: bool) -> Core:
        model = NativeModel(decoder.config, CONTEXT, torch.float32)
        with torch.no_grad():
            for name, view in model.named_views().items():
                view.copy_(decoder.get_parameter(name))
        core = Core(
            model,
            slots=4 if deterministic else int(self._rng.integers(1, 7)),
            context_tokens=CONTEXT,
            prefill_chunk_tokens=8 if deterministic else int(self._rng.integers(1, 12)),
            deterministic=deterministic,
            load_tokenizer=Letters,
            speculation=Speculation(k) if k else None,
            look_ahead=look_ahead,
        )
        if core._speculator is not None:
            core._speculator.guard.choose = lambda rows: int(self._rng.integers(k + 1))
        core.start(PolicyVersion(0, 0))
        return core

    def _requests(self) -> list[Request]:
        rng, requests = self._rng, []
        for g in range(6):
            shared = rng.integers(0, VOCABULARY, rng.integers(1, CONTEXT - 4))
            for s in range(3):
                tail = rng.integers(0, VOCABULARY, rng.integers(0, 4) * rng.integers(2))
                requests.append(
                    make_request(
                        f"{g}.{s}",
                        [*shared, *tail],
                        int(rng.choice([1, 2, 9, CONTEXT - len(shared) - len(tail), CONTEXT])),
                        key=int(rng.integers(2**63)),
                        position=int(rng.integers(2) * 7),
                        group=str(g),
                        shared=len(shared),
                        priority=int(rng.integers(2)),
                        temperature=float(rng.choice([0.0, 0.7, 1.0])),
                        top_k=int(rng.choice([0, 0, 5])),
                        min_p=float(rng.choice([0.0, 0.0, 0.02])),
                        stop_token_ids=(3,) if rng.integers(2) else (),
                        stop_strings=STOP_STRINGS if rng.integers(2) else (),
                    )
                )
        rng.shuffle(requests)
        return requests

    def run(self) -> None:
        rng, waiting, version = self._rng, list(self.requests), 0
        # deterministic mode replays aborted requests token by token
        often = 0.5 if self.cores[0].deterministic else 1.0
        while len(self.finish) < len(self.requests):
            for core in self.cores:
                if waiting and rng.random() < 0.4:
                    count = int(rng.integers(1, 5))
                    core.submit(map(self._part, waiting[:count]))
                    del waiting[:count]
                if rng.random() < 0.05 * often:
                    core.abort(rng.choice(list(core._scheduler.by_id), 2).tolist() if core.active else None)
                if rng.random() < 0.05:
                    core.set_scheduling(Scheduling(int(rng.integers(core.slots + 1)) or None, bool(rng.integers(2))))
                if rng.random() < 0.03 * often:
                    core.flush_kv()
                if rng.random() < 0.03 * often:
                    version += 1
                    core.start(PolicyVersion(0, version))  # with the same weights
                if rng.random() < 0.02 * often:
                    core.abort()
                    core.release_kv()
                    core.kv.restore()
                core.step()
                if rng.random() < 0.5:
                    waiting += self._read(core)

    def _part(self, request: Request) -> Request:
        """The rest of the request after the tokens drawn so far."""
        done = self.drawn[request.id][0]
        return request._replace(
            tokens=np.array([*request.tokens, *done], np.int32),
            position=request.position + len(done),
            max_new_tokens=request.max_new_tokens - len(done),
            resumed=len(done),
        )

    def _read(self, core: Core) -> list[Request]:
        """Collect the core's events; returns the aborted requests."""
        cut = []
        for id, (tokens, logprobs, finish) in read(core.drain()).items():
            before, their_logprobs = self.drawn[id]
            self.drawn[id] = before + tokens, np.concatenate([their_logprobs, logprobs])
            if finish is FinishReason.ABORT:
                self.cuts += 1
                cut.append(next(r for r in self.requests if r.id == id))
            elif finish is not None:
                self.finish[id] = finish
        return cut


def _logits(decoder: Decoder, request: Request, tokens: list[int]) -> torch.Tensor:
    """Logits from which ``tokens`` were drawn, by one forward pass without a cache."""
    row = torch.tensor([*request.tokens.tolist(), *tokens])
    with torch.no_grad():
        return decoder.logits(row, PackedLayout.from_lengths([len(row)]))[len(request.tokens) - 1 : -1]


def _stops(request: Request, tokens: list[int]) -> bool:
    text = Letters().decode(tokens)
    return tokens[-1] in request.sampling.stop_token_ids or any(map(text.endswith, request.sampling.stop_strings))


def _check_end(request: Request, tokens: list[int], finish: FinishReason) -> None:
    limit = min(request.max_new_tokens, CONTEXT - len(request.tokens))
    assert not any(_stops(request, tokens[:n]) for n in range(1, len(tokens)))
    assert finish is (FinishReason.STOP if _stops(request, tokens) else FinishReason.LENGTH)
    assert len(tokens) == limit or (finish is FinishReason.STOP and 0 < len(tokens) < limit)


def _check_draws(request: Request, tokens: list[int], logits_CV: torch.Tensor, speculated: bool) -> None:
    """Check that each token passes the filters and is the one that its random number selects."""
    p = request.sampling
    if p.temperature == 0:
        best_C = logits_CV.amax(-1) - logits_CV.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert best_C.max() < 1e-4
        return
    probs_CV = (logits_CV.double() / p.temperature).softmax(-1)
    least_C1 = p.min_p * probs_CV.amax(-1, keepdim=True)
    if p.top_k:
        least_C1 = torch.maximum(least_C1, probs_CV.topk(p.top_k).values[:, -1:])
    kept_CV = probs_CV.where(probs_CV > least_C1 * (1 - 1e-4), 0)
    assert (kept_CV[range(len(tokens)), tokens] > 0).all()
    if not speculated:
        kept_CV /= kept_CV.sum(-1, keepdim=True)
        upto_C = kept_CV.cumsum(-1)[range(len(tokens)), tokens].numpy()
        u_C = uniforms(request.key, request.position, len(tokens))
        assert (u_C < upto_C + 1e-4).all()
        assert (u_C > upto_C - kept_CV[range(len(tokens)), tokens].numpy() - 1e-4).all()


@pytest.mark.parametrize(
    ("seed", "look_ahead"), [*((seed, False) for seed in range(10)), *((seed, True) for seed in (0, 6, 12, 18))]
)
def test_tokens_of_a_random_schedule_are_drawn_as_by_a_forward_pass_without_a_cache(seed, look_ahead):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 5)) if seed % 3 else 0
    decoder = _decoder(mtp_layers=1 + seed % 3)
    schedule = Schedule(rng, decoder, k, deterministic=seed % 6 == 3, look_ahead=look_ahead)
    schedule.run()
    assert schedule.cuts
    for request in schedule.requests:
        tokens, logprobs = schedule.drawn[request.id]
        logits_CV = _logits(decoder, request, tokens)
        _check_end(request, tokens, schedule.finish[request.id])
        _check_draws(request, tokens, logits_CV, speculated=k > 0)
        expected_CV = (logits_CV / (request.sampling.temperature or 1.0)).log_softmax(-1)
        np.testing.assert_allclose(logprobs, expected_CV[range(len(tokens)), tokens].numpy(), atol=1e-4)
