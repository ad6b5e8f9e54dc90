"""Prompts: read from JSONL, checked line by line, turned into token ids."""

import json
from pathlib import Path
from typing import Any, TypedDict

from transformers import PreTrainedTokenizerBase


class PromptRow(TypedDict):
    """A prompt as token ids, and what the data has for it: the answer, and a completion with its EOS."""

    prompt_ids: list[int]
    answer: str | None
    completion_ids: list[int] | None


def read_jsonl(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read rows with a `prompt` string or chat `messages`, and optionally an `answer` string.

    Args:
        path: one JSON object per line; empty lines are skipped.
        limit: stop after so many rows.

    Raises:
        ValueError: a line is not such a row, naming file, line and remedy; or there is no row at all.
        OSError: the file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) == limit:
                break
            if line.strip():
                try:
                    rows.append(_checked(json.loads(line)))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows; write one JSON object per line")
    return rows


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object with `prompt` or `messages`, got {type(row).__name__}")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"expected exactly one of `prompt` and `messages`; the keys are {', '.join(row) or 'none'}")
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise ValueError(f"`prompt` is {row['prompt']!r}; expected text (a conversation goes into `messages`)")
    if "messages" in row and not (
        isinstance(row["messages"], list)
        and row["messages"]
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in row["messages"])
    ):
        raise ValueError("`messages` must be a list of objects with `role` and `content`, at least one")
    if not isinstance(row.get("answer", ""), str):
        raise ValueError(f"`answer` is {row['answer']!r}; expected text: put it in quotes")
    return row


def tokenize(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[PromptRow]:
    """Turn rows into prompts as token ids, with the special tokens that the tokenizer puts before a text.

    Chats go through the tokenizer's chat template, up to where the assistant's turn begins. Prompts of more than
    `max_prompt_tokens` are left out: a shortened one would be another question.

    Raises:
        ValueError: the tokenizer or its chat template refuses a row, a prompt has no token at all, or no prompt is
            short enough.
    """
    prompts: list[PromptRow] = []
    ids: Any
    for row in rows:
        try:
            if "messages" not in row:
                ids = tokenizer(row["prompt"]).input_ids
            elif tokenizer.chat_template is not None:
                ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            else:
                raise ValueError("it has no chat template; use `prompt`, or set tokenizer.chat_template")
        except Exception as error:  # templates and tokenizers raise what they like
            raise ValueError(f"the tokenizer refuses {row.get('prompt', row.get('messages'))!r}: {error}") from error
        if not ids:
            raise ValueError(f"the prompt {row.get('prompt')!r} has no token; a prompt needs at least one")
        if len(ids) <= max_prompt_tokens:
            prompts.append({"prompt_ids": list(ids), "answer": row.get("answer"), "completion_ids": None})
    if not prompts:
        raise ValueError(f"all {len(rows)} prompts have more than {max_prompt_tokens} tokens; raise max_prompt_tokens")
    return prompts
