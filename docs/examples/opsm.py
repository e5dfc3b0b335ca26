"""Off-policy sequence masking: negative sequences that the policy has moved away from are not trained.

DeepSeek-AI 2025, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (arXiv 2512.02556). The clipped
surrogate, times 0 for a sequence with A < 0 and mean log(μ / π) > opsm_delta.
"""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.items import Surrogate
from asyncrl.algorithms.surrogates import clip


@dataclass
class Options(clip.ClipOptions):
    opsm_delta: Annotated[float, Field(ge=0)] = 0.1  # nats per token


def loss(logprobs, anchor, advantages, segments, options):
    clipped, figures = clip.loss(logprobs, anchor, advantages, segments, options)
    masked = (advantages < 0) & (segments.mean(anchor - logprobs.detach()) > options.opsm_delta)
    return clipped * ~masked, {**figures, "opsm_masked": masked}


SURROGATE = Surrogate(loss, Options, anchors=("behaviour",), scales_advantages=True)
