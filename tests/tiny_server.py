"""A scripted server that really runs the tiny model and the adapters it was told to load.

What it samples and scores comes from plain transformers and peft on its own copy of the base, so a trainer that talks
to it can be checked end to end: is the adapter delivered, are the log-probs those of the new weights?
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from scripted_server import STOP, Body, ScriptedServer
from transformers import AutoModelForCausalLM

from train.local_engine import LOADING


class TinyServer(ScriptedServer):
    """``deaf``: accepts adapters and goes on with the base, as a server that never applies them would."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(model=str(folder), max_model_len=512, **options)
        self.folder, self.deaf = folder, False
        self.completion, self.edit, self.prompt_logprob = self._sample, self._score_sampled, self._score_prompt
        self.loaded: list[str] = []  # every adapter that was ever used
        self._networks: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._generator = torch.Generator().manual_seed(0)

    def _network(self, name: str) -> Any:
        if name == self.model or self.deaf:
            name, path = self.model, None
        else:
            path = self.adapters[name]
        if name not in self._networks:
            with LOADING:  # two servers in one process
                base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            self._networks[name] = base if path is None else PeftModel.from_pretrained(base, path).eval()
            self.loaded += [] if path is None else [name]
        return self._networks[name]

    @torch.no_grad()
    def _rows(self, name: str, ids: list[int]) -> torch.Tensor:
        with self._lock:
            logits = self._network(name)(input_ids=torch.tensor([ids])).logits[0].float()
        return torch.log_softmax(logits, dim=-1)

    def _sample(self, prompt: list[int], body: Body) -> list[int]:
        ids = list(prompt)
        while len(ids) - len(prompt) < body["max_tokens"] and (ids[-1] != STOP or len(ids) == len(prompt)):
            row = self._rows(body["model"], ids)[-1]
            greedy = body.get("temperature", 1.0) == 0
            token = row.argmax() if greedy else torch.multinomial(row.exp(), 1, generator=self._generator)
            ids.append(int(token))
        return ids[len(prompt) :]

    def _score_sampled(self, response: dict[str, Any]) -> dict[str, Any]:
        choice = response["choices"][0]
        prompt, sampled = choice["prompt_token_ids"], choice["token_ids"]
        rows = self._rows(response["model"], [*prompt, *sampled])[len(prompt) - 1 : -1]
        logprobs = [float(row[t]) for row, t in zip(rows, sampled, strict=True)]
        choice["logprobs"]["token_logprobs"] = logprobs
        choice["logprobs"]["top_logprobs"] = [{f"token_id:{t}": p} for t, p in zip(sampled, logprobs, strict=True)]
        return response

    def _score_prompt(self, ids: list[int], name: str) -> list[float]:
        rows = self._rows(name, ids)
        return [0.0, *(float(rows[i, t]) for i, t in enumerate(ids[1:]))]
