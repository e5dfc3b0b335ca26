"""Between prompts and token ids: the checkpoint's own tokenizer and chat template, checked against its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.models.config import CheckpointError, ModelConfig
from asyncrl.sample import Prompt


class PromptTokenizer:
    """Renders prompts to tokens and responses to text. Raises CheckpointError if the folder's tokenizer is missing,
    broken, or knows more tokens than the model has embeddings."""

    def __init__(self, checkpoint: str | Path, apply_chat_template: bool = True) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(str(checkpoint))
        except Exception as e:  # transformers raises many kinds; all mean the same here
            raise CheckpointError(f"{checkpoint}: the tokenizer does not load ({type(e).__name__}: {e})") from None
        vocabulary = ModelConfig.load(checkpoint).vocab_size
        if len(self.hf) > vocabulary:
            raise CheckpointError(
                f"{checkpoint}: the tokenizer knows {len(self.hf)} tokens, the model has {vocabulary} embeddings; "
                "they are not of one model"
            )
        if apply_chat_template and not self.hf.chat_template:
            raise CheckpointError(
                f"{checkpoint}: the tokenizer has no chat template; set data.apply_chat_template=false to join messages"
            )
        self._apply_chat_template = apply_chat_template

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        eos = self.hf.eos_token_id
        return () if eos is None else (int(eos),)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """int32 [P]: a raw text as it is, messages through the chat template with the assistant's turn opened."""
        if prompt.text is not None:
            ids = self.hf.encode(prompt.text, add_special_tokens=True)
        elif self._apply_chat_template:
            text = self.hf.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            ids = self.hf.encode(text, add_special_tokens=False)
        else:
            ids = self.hf.encode("".join(str(m["content"]) for m in prompt.messages), add_special_tokens=True)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text without special tokens, as a reward sees it."""
        return self.hf.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def decode_batch(self, tokens: Sequence[np.ndarray]) -> list[str]:
        return self.hf.batch_decode([t.tolist() for t in tokens], skip_special_tokens=True)
